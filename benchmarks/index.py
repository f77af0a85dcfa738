"""Recall and latency of the embedded index beside the raw engines, on the same vectors in one run.

    python benchmarks/index.py --sizes 10000 100000 1000000

Vectors are unit rows with the structure of embeddings (clusters in a space of 64 directions, with noise):
harder for approximate search than plain clusters, easier than uniform noise. Raw engines and the index take
turns, so that all see the same machine. "over raw" is the distance of the medians from the first line's.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.index.approximate import NEIGHBOURS, WIDTH_ADD, WIDTH_SEARCH
from diptych.index.embedded import EmbeddedIndex
from diptych.index.protocol import Item, Vectors
from diptych.index.words import fuse

Search = Callable[[Vectors], Any]
K = 10
VOCABULARY = 20_000
TURN = 25  # queries
OPENING = """
import resource, sys, time
start = time.perf_counter()
from diptych.index.opening import open_index
imported = time.perf_counter()
index = open_index(sys.argv[1])
count = len(index)
opened = time.perf_counter()
resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6
print(f"{count:,} items: imports {imported - start:.2f} s, opening {opened - imported:.3f} s", end=", ")
print(f"{resident:.0f} MB resident")
"""


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
    for start in range(0, len(vectors), step):
        numbers = range(start, min(start + step, len(vectors)))
        items = [Item(str(n), text=texts[n], metadata={"part": n % 100, "n": n}) for n in numbers]
        index.add(items, vectors[start : start + step])
    return index


def race(queries: Vectors, contestants: dict[str, Search], repeats: int) -> dict[str, tuple[list[Any], Any]]:
    """Answers and times (milliseconds) of each contestant, taking turns every few queries.

    Not every query: the thread pools of different libraries keep spinning for a while after their work, and
    would slow down whoever comes next.
    """
    answers: dict[str, list[Any]] = {name: [] for name in contestants}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for at in range(0, len(queries), TURN):
            for name, search in contestants.items():
                time.sleep(0.02)
                search(queries[at - 1])
                for query in queries[at : at + TURN]:
                    start = time.perf_counter()
                    answer = search(query)
                    times[name].append(1e3 * (time.perf_counter() - start))
                    if repeat == 0:
                        answers[name].append([int(id) for id in answer])
    return {name: (answers[name], np.array(times[name])) for name in contestants}


def recall(answers: list[Any], truth: list[Any]) -> float:
    """Share of the true best that were found."""
    return float(
        np.mean([len(set(a) & set(t)) / max(1, len(t)) for a, t in zip(answers, truth, strict=True)])
    )


def table(title: str, results: dict[str, tuple[list[Any], Any]], truth: list[Any] | None) -> None:
    """One line a contestant, and how far each stands from the first."""
    print(f"\n{title}\n{'':34}{'p50 ms':>9}{'p99 ms':>9}{'recall@10':>11}{'over raw ms':>13}")
    base: float | None = None
    for name, (answers, times) in results.items():
        p50, p99 = float(np.median(times)), float(np.quantile(times, 0.99))
        over = "" if base is None else f"{p50 - base:+.2f}"
        base = p50 if base is None else base
        share = "" if truth is None else f"{recall(answers, truth):.3f}"
        print(f"{name:34}{p50:9.2f}{p99:9.2f}{share:>11}{over:>13}", flush=True)


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


def filtered(index: EmbeddedIndex, condition: str) -> Search:
    """The index with a filter."""
    return lambda query: index.search(query, K, kind="image", filter=condition).ids


def numpy_search(vectors: Vectors) -> Search:
    """Exact search by one product and a partition."""

    def search(query: Vectors) -> Any:
        scores = vectors @ query
        best = np.argpartition(scores, -K)[-K:]
        return best[np.argsort(-scores[best])]

    return search


def faiss_flat(vectors: Vectors) -> Search:
    """faiss's exact index."""
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return lambda query: index.search(query[None], K)[1][0]


def usearch_graph(vectors: Vectors) -> tuple[Search, float]:
    """usearch with the settings of the index, and the seconds it took to build."""
    from usearch.index import Index

    graph = Index(
        ndim=vectors.shape[1], metric="ip", dtype="i8", connectivity=NEIGHBOURS,
        expansion_add=WIDTH_ADD, expansion_search=WIDTH_SEARCH,
    )  # fmt: skip
    start = time.perf_counter()
    for at in range(0, len(vectors), 20_000):
        part = vectors[at : at + 20_000]
        graph.add(np.arange(at, at + len(part), dtype=np.uint64), part)
    return (lambda query: graph.search(query, K).keys), time.perf_counter() - start


def hnswlib_graph(vectors: Vectors) -> tuple[Search, float]:
    """hnswlib with comparable settings, and the seconds it took to build."""
    import hnswlib  # type: ignore[import-untyped]

    graph = hnswlib.Index("ip", vectors.shape[1])
    start = time.perf_counter()
    graph.init_index(len(vectors), ef_construction=WIDTH_ADD, M=NEIGHBOURS)
    graph.add_items(vectors)
    graph.set_ef(WIDTH_SEARCH)
    return (lambda query: graph.knn_query(query, K, num_threads=1)[0][0]), time.perf_counter() - start


def faiss_graph(vectors: Vectors) -> tuple[Search, float]:
    """faiss's HNSW over float16, and the seconds it took to build."""
    import faiss

    kind = faiss.ScalarQuantizer.QT_fp16
    graph = faiss.IndexHNSWSQ(vectors.shape[1], kind, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = WIDTH_ADD, WIDTH_SEARCH
    start = time.perf_counter()
    graph.train(vectors[:10_000])
    graph.add(vectors)
    return (lambda query: graph.search(query[None], K)[1][0]), time.perf_counter() - start


def run(count: int, given: argparse.Namespace, folder: Path) -> None:
    """All tables at one size."""
    vectors = make_vectors(count, given.dimension, seed=2)
    queries = make_vectors(given.queries, given.dimension, seed=3)
    print(f"\n== {count:,} × {given.dimension}, {len(queries)} queries, k = {K} ==")
    path = folder / f"{count}.index"
    start = time.perf_counter()
    index = build(path, vectors, make_texts(count, 4))
    print(f"index built in {time.perf_counter() - start:.1f} s, {index.info.size / 1e6:.0f} MB on disk")

    contestants: dict[str, Search] = {
        "raw torch, query doubled": torch_doubled(vectors),
        "raw torch": torch_search(vectors),
        "raw numpy": numpy_search(vectors),
    }
    if "faiss" in given.raw:
        contestants["raw faiss Flat"] = faiss_flat(vectors)
    contestants["index, exact"] = lambda q: index.search(q, K, kind="image", exact=True).ids
    results = race(queries, contestants, given.repeats)
    truth = results["raw torch"][0]
    table("Exact search", results, truth)

    for share, condition in ((10, "part < 10"), (1, "part = 0")):
        rows = np.flatnonzero(np.arange(count) % 100 < 10) if share == 10 else np.arange(0, count, 100)
        first = time.perf_counter()
        index.search(queries[0], K, kind="image", filter=condition)
        first = 1e3 * (time.perf_counter() - first)
        results = race(
            queries,
            {
                "raw torch, rows known": torch_search(vectors, rows),
                "index, filtered": filtered(index, condition),
            },
            given.repeats,
        )
        known = results["raw torch, rows known"][0]
        table(
            f"Filtered to {share} % (the first such query took {first:.0f} ms)",
            results,
            known,
        )

    words = make_texts(len(queries), 5)
    turn = iter(range(10**9))

    def hybrid(query: Vectors) -> list[str]:
        text = words[next(turn) % len(words)]
        near = index.search(query, 100, kind="image", exact=True)
        lexical = index.search_words(text, 100, kind="image")
        scores = fuse([near.ids, lexical.ids])
        return sorted(scores, key=lambda id: -scores[id])[:K]

    results = race(
        queries, {"raw torch, vectors alone": torch_doubled(vectors), "index, hybrid": hybrid}, given.repeats
    )
    table("Hybrid with BM25", results, None)

    start = time.perf_counter()
    index.build_graph("image", show_progress=True)
    print(f"\napproximate index built in {time.perf_counter() - start:.1f} s")
    contestants = {}
    makers = {"usearch": usearch_graph, "hnswlib": hnswlib_graph, "faiss": faiss_graph}
    for name, make in makers.items():
        if name in given.raw and (name == "usearch" or count <= given.graphs_up_to):
            contestants[f"raw {name} graph"], seconds = make(vectors)
            print(f"raw {name} graph built in {seconds:.1f} s")
    contestants["index, approximate"] = lambda q: index.search(q, K, kind="image").ids
    results = race(queries, contestants, given.repeats)
    table("Approximate search", results, truth)

    start = time.perf_counter()
    index.search_many(queries[:100], K, kind="image", exact=True)
    exact = min(100, len(queries)) / (time.perf_counter() - start)
    start = time.perf_counter()
    index.search_many(queries[:100], K, kind="image")
    approximate = min(100, len(queries)) / (time.perf_counter() - start)
    print(f"\nbatches of 100: exact {exact:,.0f} queries/s, approximate {approximate:,.0f} queries/s")
    index.close()
    done = subprocess.run(
        [sys.executable, "-c", OPENING, str(path)], capture_output=True, text=True, check=True
    )
    print(f"opening {done.stdout.strip()}")
    shutil.rmtree(path)


def main() -> None:
    """Run the sizes asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--raw", nargs="*", default=["faiss", "usearch", "hnswlib"], help="raw engines beside ours"
    )
    parser.add_argument("--graphs_up_to", type=int, default=100_000, help="largest size for every raw graph")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to put the indexes (default: a temporary folder)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{platform.processor() or platform.machine()}, {given.threads} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for count in given.sizes:
            run(count, given, Path(folder))


if __name__ == "__main__":
    main()
