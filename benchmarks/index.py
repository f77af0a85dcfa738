"""Recall and latency of the embedded index beside the raw engines, on the same vectors, in one run and one table.

    python benchmarks/index.py --sizes 10000 100000 1000000

Vectors are unit rows with the structure of embeddings (clusters in a space of 64 directions, with noise):
harder for approximate search than plain clusters, easier than uniform noise. Raw engines and the index take
turns, so that all see the same machine. "over raw" is the distance of the index's median from that of the
raw engine: the fastest of numpy, faiss and torch as they come for exact search, else the one named below
it. A first round over all queries is timed apart ("first ms"): what it needs may have to come from the disk,
for whoever was not the last to use it. Recall is counted against the best in float64. The run ends with
status 1 and a sentence for each limit that is broken (see ``broken``), unless ``--no-limits`` is given.
Engines that are not installed (faiss, hnswlib) have a row that says so; graphs other than ours are built up
to ``--graphs_up_to`` items.
"""

from __future__ import annotations

import argparse
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.index.engines.embedded.approximate import NEIGHBOURS, WIDTH_ADD, WIDTH_SEARCH
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item, Vectors
from diptych.index.query.words import fuse
from diptych.progress import track

Search = Callable[[Vectors], Any]
Ids = list[list[int]]
K = 10
VOCABULARY = 20_000
TURN = 25  # queries
OVERHEAD = 1.0  # milliseconds that exact and approximate search may take beyond the raw engine, at p50
OPENED, RESIDENT = 1000.0, 200.0  # milliseconds and megabytes that opening must stay below
HEADS = ("items", "search", "engine", "first ms", "p50 ms", "p99 ms", "recall@10", "over raw ms", "note")
OPENING = """
import resource, sys, time
start = time.perf_counter()
from diptych.index.engines.opening import open_index
imported = time.perf_counter()
index = open_index(sys.argv[1])
count = len(index)
opened = time.perf_counter()
resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6
print(1e3 * (opened - imported), 1e3 * (imported - start), resident)
"""


@dataclass
class Row:
    """One line of the table; numbers that were not measured are None."""

    items: int
    search: str
    engine: str
    times: Any = None  # milliseconds
    first: Any = None  # milliseconds, of the first round
    recall: float | None = None
    over: float | None = None
    note: str = ""
    resident: float | None = None  # megabytes

    def cells(self) -> list[str]:
        """The line as texts."""
        p50, p99 = (
            ("", "")
            if self.times is None
            else (_ms(np.median(self.times)), _ms(np.quantile(self.times, 0.99)))
        )
        first = "" if self.first is None else _ms(np.median(self.first))
        share = "" if self.recall is None else f"{self.recall:.3f}"
        over = "" if self.over is None else f"{self.over:+.2f}"
        return [f"{self.items:,}", self.search, self.engine, first, p50, p99, share, over, self.note]


def make_vectors(count: int, dimension: int, seed: int) -> Vectors:
    """Unit rows: a cluster's centre, a combination of 64 common directions, and noise."""
    fixed, rng = np.random.default_rng(1), np.random.default_rng(seed)
    centres = 0.6 * fixed.normal(size=(1000, dimension)).astype(np.float32)
    directions = 0.1 * fixed.normal(size=(64, dimension)).astype(np.float32)
    out = np.empty((count, dimension), np.float32)
    for start in range(0, count, 50_000):
        part = out[start : start + 50_000]
        n = len(part)
        part[:] = centres[rng.integers(0, len(centres), n)]
        part += rng.standard_normal((n, 64), np.float32) @ directions
        part += 0.4 * rng.standard_normal((n, dimension), np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return out


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of eight words whose frequencies fall as words' do."""
    rng = np.random.default_rng(seed)
    words = np.minimum(rng.zipf(1.3, size=(count, 8)), VOCABULARY)
    return [" ".join(f"w{word}" for word in row) for row in words]


def build(path: Path, vectors: Vectors, texts: list[str]) -> EmbeddedIndex:
    """An index of all vectors, with texts and a column that selects a tenth and a hundredth."""
    index = EmbeddedIndex.create(path, vectors.shape[1])
    step = 20_000
    for start in track(range(0, len(vectors), step), f"{len(vectors):,} items", None, True):
        numbers = range(start, min(start + step, len(vectors)))
        items = [Item(str(n), text=texts[n], metadata={"part": n % 100, "n": n}) for n in numbers]
        index.add(items, vectors[start : start + step])
    return index


def best(vectors: Vectors, queries: Vectors, rows: Any = None) -> Ids:
    """The K best of the rows (of all for None) for each query: float32 proposes, float64 decides."""
    chosen = vectors if rows is None else vectors[rows]
    out = []
    for query in queries:
        some = min(4 * K, len(chosen))
        near = np.argpartition(chosen @ query, -some)[-some:]
        scores = chosen[near].astype(np.float64) @ query.astype(np.float64)
        order = near[np.lexsort((near, -scores))[:K]]
        out.append((order if rows is None else rows[order]).tolist())
    return out


def race(queries: Vectors, contestants: dict[str, Search], repeats: int) -> dict[str, tuple[Ids, Any, Any]]:
    """Answers, times of the first round and of the others (milliseconds) of each, taking turns every few queries.

    Not every query: the thread pools of different libraries keep spinning for a while after their work, and
    would slow down whoever comes next.
    """
    answers: dict[str, Ids] = {name: [] for name in contestants}
    first: dict[str, list[float]] = {name: [] for name in contestants}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for at in range(0, len(queries), TURN):
            # forth and back: whoever comes second finds the rows of these queries in the caches
            order = list(contestants.items())[:: -1 if (repeat + at // TURN) % 2 else 1]
            for name, search in order:
                time.sleep(0.02)
                search(queries[at - 1])
                for query in queries[at : at + TURN]:
                    start = time.perf_counter()
                    answer = search(query)
                    (times if repeat else first)[name].append(1e3 * (time.perf_counter() - start))
                    if repeat == 0:
                        answers[name].append([int(id) for id in answer])
    return {name: (answers[name], np.array(first[name]), np.array(times[name])) for name in contestants}


def recall(answers: Ids, truth: Ids) -> float:
    """Share of the true best that were found."""
    return float(
        np.mean([len(set(a) & set(t)) / max(1, len(t)) for a, t in zip(answers, truth, strict=True)])
    )


def torch_search(vectors: Vectors, rows: Any = None) -> Search:
    """Exact search by one product; with ``rows``, over those alone."""
    matrix = torch.from_numpy(vectors)
    chosen = None if rows is None else torch.from_numpy(rows)

    def search(query: Vectors) -> Any:
        if chosen is None:
            return torch.topk(matrix @ torch.from_numpy(query), K).indices.tolist()
        found = torch.topk(matrix.index_select(0, chosen) @ torch.from_numpy(query), K).indices
        return chosen[found].tolist()

    return search


def torch_doubled(vectors: Vectors) -> Search:
    """Exact search by the product the index uses: the query doubled, which torch streams faster."""
    matrix = torch.from_numpy(vectors)

    def search(query: Vectors) -> Any:
        pair = torch.from_numpy(query).repeat(2, 1)
        return torch.topk((matrix @ pair.T).T[0], K).indices.tolist()

    return search


def numpy_search(vectors: Vectors) -> Search:
    """Exact search by one product and a partition."""

    def search(query: Vectors) -> Any:
        scores = vectors @ query
        near = np.argpartition(scores, -K)[-K:]
        return near[np.argsort(-scores[near])]

    return search


def faiss_flat(vectors: Vectors) -> Search:
    """faiss's exact index."""
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return lambda query: index.search(query[None], K)[1][0]


def usearch_graph(path: Path, dimension: int) -> Search:
    """usearch alone on the graph that the index has built (its rows are those of the first segments, in order)."""
    from usearch.index import Index

    graph, other = (Index(ndim=dimension, metric="ip", dtype="i8", connectivity=NEIGHBOURS) for _ in range(2))
    graph.view(str(path))
    graph.expansion_search = WIDTH_SEARCH
    other.view(str(path))  # listing the keys touches every page: the graph that is raced starts as ours does
    keys = np.sort(np.asarray(other.keys))
    return lambda query: np.searchsorted(keys, graph.search(query, K).keys)


def hnswlib_graph(vectors: Vectors) -> Search:
    """hnswlib with comparable settings."""
    import hnswlib  # type: ignore[import-not-found]

    graph = hnswlib.Index("ip", vectors.shape[1])
    graph.init_index(len(vectors), ef_construction=WIDTH_ADD, M=NEIGHBOURS)
    graph.add_items(vectors)
    graph.set_ef(WIDTH_SEARCH)
    return lambda query: graph.knn_query(query, K, num_threads=1)[0][0]


def faiss_graph(vectors: Vectors) -> Search:
    """faiss's HNSW over float16."""
    import faiss

    kind = faiss.ScalarQuantizer.QT_fp16
    graph = faiss.IndexHNSWSQ(vectors.shape[1], kind, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = WIDTH_ADD, WIDTH_SEARCH
    graph.train(vectors[:10_000])
    graph.add(vectors)
    return lambda query: graph.search(query[None], K)[1][0]


class Bench:
    """All rows of one size."""

    def __init__(self, count: int, given: argparse.Namespace, folder: Path) -> None:
        self.count, self.given = count, given
        self.rows: list[Row] = []
        say(f"{count:,} items of {given.dimension} dimensions: making them")
        self.vectors = make_vectors(count, given.dimension, seed=2)
        self.queries = make_vectors(given.queries, given.dimension, seed=3)
        self.path = folder / f"{count}.index"
        start = time.perf_counter()
        self.index = build(self.path, self.vectors, make_texts(count, 4))
        size = self.index.info.size / 1e6
        self.built = f"built in {time.perf_counter() - start:.0f} s, {size:.0f} MB on disk"
        self.truth = best(self.vectors, self.queries)
        say(f"{count:,} items: {self.built}")

    def exact(self) -> None:
        """Every item scored."""
        self.compete(
            "exact",
            self.truth,
            {
                "index": lambda q: self.index.search(q, K, kind="image", exact=True).ids,
                "torch, the same product": torch_doubled(self.vectors),
                "torch": torch_search(self.vectors),
                "numpy": numpy_search(self.vectors),
            },
            {"faiss Flat": lambda: faiss_flat(self.vectors)},
            self.built,
            raw=("torch", "numpy", "faiss Flat"),
        )

    def filtered(self, share: str, condition: str, rows: Any) -> None:
        """A filter that leaves some rows; the raw engine knows them beforehand."""
        start = time.perf_counter()
        self.index.search(self.queries[0], K, kind="image", filter=condition)
        first = 1e3 * (time.perf_counter() - start)
        truth = best(self.vectors, self.queries, rows)
        search: Search = lambda q: self.index.search(q, K, kind="image", filter=condition).ids  # noqa: E731
        raw = {"torch, rows known": torch_search(self.vectors, rows)}
        self.compete(
            f"filtered to {share}",
            truth,
            {"index": search, **raw},
            {},
            f"the first took {first:.0f} ms",
        )

    def hybrid(self) -> None:
        """Vectors and BM25, 100 deep each, fused by rank."""
        words, turn = make_texts(len(self.queries), 5), iter(range(10**9))

        def search(query: Vectors) -> list[str]:
            near = self.index.search(query, 100, kind="image", exact=True)
            lexical = self.index.search_words(words[next(turn) % len(words)], 100, kind="image")
            scores = fuse([near.ids, lexical.ids])
            return sorted(scores, key=lambda id: -scores[id])[:K]

        vectors = {"torch, vectors alone": torch_doubled(self.vectors)}
        self.compete("hybrid", None, {"index": search, **vectors}, {})

    def approximate(self) -> None:
        """The graph, and other graphs of the same width."""
        start = time.perf_counter()
        self.index.build_graph("image", show_progress=True)
        built = f"built in {time.perf_counter() - start:.0f} s"
        (file,) = self.path.glob("graph-*")
        small = self.count <= self.given.graphs_up_to
        others: dict[str, Callable[[], Search]] = {
            "hnswlib": lambda: hnswlib_graph(self.vectors),
            "faiss HNSW, float16": lambda: faiss_graph(self.vectors),
        }
        self.compete(
            "approximate",
            self.truth,
            {
                "index": lambda q: self.index.search(q, K, kind="image").ids,
                "usearch, the same graph": usearch_graph(file, self.given.dimension),
            },
            others if small else {},
            built,
        )

    def batches(self) -> None:
        """Queries that come together."""
        count = min(100, len(self.queries))
        for name, exact in (("exact", True), ("approximate", None)):
            start = time.perf_counter()
            self.index.search_many(self.queries[:count], K, kind="image", exact=exact)
            seconds = time.perf_counter() - start
            note = f"{count / seconds:,.0f} queries/s"
            self.rows.append(Row(self.count, f"{count} at once, {name}", "index", note=note))

    def opening(self) -> None:
        """A process that opens the index and asks nothing yet."""
        self.index.close()
        command = [sys.executable, "-c", OPENING, str(self.path)]
        runs = []
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append([float(value) for value in done.stdout.split()])
        times = np.array(runs)
        memory, imports = times[:, 2].max(), np.median(times[:, 1])
        note = f"{memory:.0f} MB resident before the first query; imports take {imports:.0f} ms"
        self.rows.append(Row(self.count, "opening", "index", times[:, 0], note=note, resident=memory))

    def compete(
        self,
        search: str,
        truth: Ids | None,
        contestants: dict[str, Search],
        optional: dict[str, Callable[[], Search]],
        note: str = "",
        raw: Sequence[str] = (),
    ) -> None:
        """One row for each engine; the index is measured against the fastest of ``raw``, or else the second."""
        say(f"{self.count:,} items: {search} …")
        missing = []
        notes = {"index": note}
        for name, make in optional.items():
            start = time.perf_counter()
            try:
                contestants[name] = make()
                notes[name] = f"built in {time.perf_counter() - start:.0f} s"
            except ImportError:
                missing.append(name)
        results = race(self.queries, contestants, self.given.repeats)
        p50 = {name: float(np.median(times)) for name, (_, _, times) in results.items()}
        ours = p50["index"]
        fastest = min(p50[name] for name in (raw or list(results)[1:2]) if name in p50)
        for name, (answers, first, times) in results.items():
            share = None if truth is None else recall(answers, truth)
            over = ours - fastest if name == "index" else None
            self.rows.append(Row(self.count, search, name, times, first, share, over, notes.get(name, "")))
        self.rows += [Row(self.count, search, name, note="not installed") for name in missing]
        say(f"{self.count:,} items: {search}, p50 {ours:.2f} ms")

    def run(self) -> list[Row]:
        """Everything, in the order of the table."""
        self.exact()
        self.filtered("10 %", "part < 10", np.flatnonzero(np.arange(self.count) % 100 < 10))
        self.filtered("1 %", "part = 0", np.arange(0, self.count, 100))
        self.hybrid()
        self.approximate()
        self.batches()
        self.opening()
        shutil.rmtree(self.path)
        return self.rows


def broken(rows: list[Row]) -> list[str]:
    """A sentence for each limit that the index does not keep."""
    out = []
    for row in (row for row in rows if row.engine == "index"):
        what = f"{row.items:,} items, {row.search}"
        if row.search in ("exact", "approximate") and row.over is not None and row.over > OVERHEAD:
            out.append(f"{what}: {row.over:.2f} ms over the raw engine at p50, the limit is {OVERHEAD:g} ms.")
        if row.search == "exact" and row.recall is not None and row.recall < 1:
            out.append(f"{what}: recall@{K} is {row.recall:.4f}, and an exact search must find all.")
        if row.search.startswith("filtered") and row.recall is not None and row.recall < 1:
            out.append(f"{what}: recall@{K} is {row.recall:.4f}: not exact, or fewer than {K} hits.")
        if row.search == "opening" and (taken := float(np.median(row.times))) >= OPENED:
            out.append(f"{what}: it took {taken:.0f} ms, the limit is {OPENED:g} ms.")
        if row.resident is not None and row.resident >= RESIDENT:
            out.append(f"{what}: {row.resident:.0f} MB were resident, the limit is {RESIDENT:g} MB.")
    return out


def say(sentence: str) -> None:
    """Tell how far it is, beside the table."""
    print(sentence, file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    """The rows in columns that Markdown reads too."""
    lines = [list(HEADS), *(row.cells() for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEADS))]
    texts = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([texts[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *texts[1:]])


def _ms(value: Any) -> str:
    return f"{float(value):.2f}"


def main() -> None:
    """Run the sizes asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--graphs_up_to", type=int, default=100_000, help="largest size for graphs not ours")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to put the indexes (default: a temporary folder)")
    parser.add_argument("--no-limits", action="store_true", help="print the table, whatever it says")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    start, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for count in given.sizes:
            rows += Bench(count, given, Path(folder)).run()
    machine = platform.processor() or platform.machine()
    print(
        f"{machine}, {given.threads} threads, torch {torch.__version__}; {given.dimension} dimensions, k = {K}"
    )
    print(table(rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{time.perf_counter() - start:.0f} s, at most {peak:.1f} GB of memory, mapped files included")
    faults = [] if given.no_limits else broken(rows)
    for sentence in faults:
        say(f"broken limit: {sentence}")
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
