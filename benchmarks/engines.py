"""The three engines side by side: rows per second, latency, recall, memory and bytes, on the same vectors in one run.

    python benchmarks/engines.py --sizes 100000 1000000 --results engines.json

PostgreSQL and Milvus are real servers that the benchmark starts (packages of the extras ``test`` and ``scale``; Milvus
in a network namespace of its own). Vectors and recall are those of ``benchmarks/index.py``. Each engine is filled and
searched exactly, in turn; then each builds its graph, in turn, and is searched by it; the other servers are stopped. A
row of the table is written to ``--results`` when it is measured, and a second run goes on where the first was stopped.
Memory is that of the server, or what the process that searches an embedded index takes for it; bytes are those on disk.
Searches are for 10 images, one at a time, through the engine's own ``search``, in three rounds: the table has the
medians of the rounds' p50 and p99. ``load`` is the machine's load average of the last minute when a row was finished;
the benchmark itself adds one to two to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests" / "scale")]
from index import best, make_vectors  # noqa: E402

from diptych.errors import Unavailable  # noqa: E402
from diptych.index.base import Index  # noqa: E402
from diptych.index.engines.opening import empty_index, open_index  # noqa: E402
from diptych.index.protocol import Item, Vectors  # noqa: E402
from diptych.storage import write_text  # noqa: E402

K, DIMENSION, BATCH, WARM = 10, 512, 5_000, 10
ROUNDS, LEAST = 3, 34  # rounds of searches of each kind, and searches of a round at least
TOGETHER, LONGEST = 100, 60.0  # searches at once; seconds they may take, else they are left out
POSTGRESQL = (  # a quarter of 16 GB as its manual advises, a graph that is built in memory, two cores
    "fsync = on", "shared_buffers = '4GB'", "maintenance_work_mem = '4GB'", "max_parallel_maintenance_workers = 1",
    "max_wal_size = '8GB'",
)  # fmt: skip
KINDS = {  # of search, by engine: exact ones first, since building a graph takes longest
    "embedded": ("exact", "binary codes", "graph"),
    "PostgreSQL": ("exact", "HNSW"),
    "Milvus": ("FLAT, strong", "FLAT, bounded", "HNSW, bounded"),
}
PART = "part = 7"  # a filter that one item in a hundred passes


@dataclass
class Row:
    """A line of the table; numbers that were not measured are None."""

    items: int
    engine: str
    search: str
    load: float | None = None  # rows per second
    build: float | None = None  # seconds, of the approximate index
    p50: float | None = None  # milliseconds
    p99: float | None = None
    rate: float | None = None  # queries per second, many at once
    filtered: float | None = None  # p50 of a search with a filter, milliseconds
    recall: float | None = None
    memory: float | None = None  # megabytes
    disk: float | None = None  # megabytes
    busy: float | None = None  # load average when it was measured


class Results:
    """The rows that were measured, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = [Row(**one) for one in json.loads(path.read_text())] if path.exists() else []

    def has(self, items: int, engine: str, search: str) -> bool:
        return any((row.items, row.engine, row.search) == (items, engine, search) for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        write_text(self.path, json.dumps([asdict(one) for one in self.rows], indent=1))
        print(row, flush=True)


def fill(index: Index, vectors: Vectors) -> float:
    """Write all vectors, a batch again where a busy server does not answer in time; rows per second."""
    start = time.perf_counter()
    for first in range(0, len(vectors), BATCH):
        some = vectors[first : first + BATCH]
        items = [Item(str(first + n), metadata={"part": (first + n) % 100}) for n in range(len(some))]
        again(partial(index.update, items, some))
    return len(vectors) / (time.perf_counter() - start)


def measure(
    row: Row, index: Index, queries: Vectors, truth: list[list[int]], seconds: float, exact: bool
) -> Row:
    """Latency and recall of single searches, with and without a filter; the rate of many at once."""
    options: dict[str, Any] = {"exact": None} if exact else {"exact": False}

    def search(n: int) -> int:
        hits = index.search(queries[n], K, kind="image", **options)
        return len(set(hits.ids) & {str(one) for one in truth[n]})

    def search_filtered(n: int) -> int:
        return len(index.search(queries[n], K, kind="image", filter=PART))

    for n in range(WARM):
        search(n)
    rounds = [timed(search, len(queries), seconds / ROUNDS, LEAST) for _ in range(ROUNDS)]
    row.p50 = float(np.median([np.median(times) for times, _ in rounds]))
    row.p99 = float(np.median([np.quantile(times, 0.99) for times, _ in rounds]))
    row.recall = sum(found for _, found in rounds) / (K * sum(len(times) for times, _ in rounds))
    search_filtered(0)
    rounds = [timed(search_filtered, len(queries), seconds / ROUNDS / 3, WARM) for _ in range(ROUNDS)]
    row.filtered = float(np.median([np.median(times) for times, _ in rounds]))
    if TOGETHER * row.p50 / 1e3 <= LONGEST:
        took = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            index.search_many(queries[:TOGETHER], K, kind="image", **options)
            took.append(time.perf_counter() - start)
        row.rate = TOGETHER / float(np.median(took))
    row.busy = os.getloadavg()[0]
    return row


def timed(search: Callable[[int], int], count: int, seconds: float, least: int) -> tuple[list[float], int]:
    """Milliseconds of each search, query after query for so many seconds, and the sum of what they return."""
    times: list[float] = []
    found, begin = 0, time.perf_counter()
    while len(times) < least or (len(times) < count and time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        found += search(len(times))
        times.append(1e3 * (time.perf_counter() - start))
    return times, found


def memory(pids: list[int]) -> float:
    """Megabytes of processes: their own pages, and their part of those they share."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            total += int(line.split()[1]) * 1024 if line.startswith("Pss:") else 0
    return total / 1e6


def family(pid: int) -> list[int]:
    """A process and its children."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [pid, *map(int, found.split())]


def disk(folder: Path) -> float:
    """Megabytes that a folder takes."""
    return int(subprocess.run(["du", "-sb", folder], capture_output=True, text=True).stdout.split()[0]) / 1e6


def embedded(
    args: argparse.Namespace, results: Results, vectors: Vectors, queries: Vectors, truth: Any
) -> Iterator[None]:
    """The embedded engine: exact and by binary codes, then by its graph; searched in this process."""
    size = len(vectors)
    if all(results.has(size, "embedded", name) for name in KINDS["embedded"]):
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "index"
        with empty_index(place, DIMENSION) as index:
            speed = fill(index, vectors)
        for name in KINDS["embedded"]:
            if name == "graph":
                yield
            if results.has(size, "embedded", name):
                continue
            row = Row(size, "embedded", name, load=speed)
            if name != "exact":
                with open_index(place, writable=True) as index:
                    start = time.perf_counter()
                    index.build_graph("image", codes=name == "binary codes")
                    row.build = time.perf_counter() - start
            before = memory([os.getpid()])
            with open_index(place) as index:
                measure(row, index, queries, truth, args.seconds, name == "exact")
                row.memory, row.disk = memory([os.getpid()]) - before, disk(place)
            results.add(row)


def postgresql(
    args: argparse.Namespace, results: Results, vectors: Vectors, queries: Vectors, truth: Any
) -> Iterator[None]:
    """PostgreSQL with pgvector: exact, then HNSW; stopped in between."""
    import psycopg
    from servers import postgres

    size = len(vectors)
    if all(results.has(size, "PostgreSQL", name) for name in KINDS["PostgreSQL"]):
        return
    with postgres() as server:
        with psycopg.connect(server.url, autocommit=True) as db:
            for setting in POSTGRESQL:
                db.execute(f"ALTER SYSTEM SET {setting}")
            folder = Path(db.execute("SHOW data_directory").fetchone()[0])
        server.stop()
        server.start()
        url, speed = server.index_url("bench"), 0.0
        with empty_index(url, DIMENSION) as index:
            speed = fill(index, vectors)
            index.compact()
        for name in KINDS["PostgreSQL"]:
            row = Row(size, "PostgreSQL", name, load=speed)
            if name == "HNSW":
                server.stop()
                yield
                server.start()
            if results.has(size, "PostgreSQL", name):
                continue
            with open_index(url, writable=True) as index:
                if name == "HNSW":
                    start = time.perf_counter()
                    index.build_graph("image")
                    row.build = time.perf_counter() - start
                measure(row, index, queries, truth, args.seconds, name == "exact")
                pid = int((folder / "postmaster.pid").read_text().split()[0])
                row.memory, row.disk = memory(family(pid)), disk(folder / "base")
            results.add(row)


def milvus(
    args: argparse.Namespace, results: Results, vectors: Vectors, queries: Vectors, truth: Any
) -> Iterator[None]:
    """Milvus: exact with reads that see every change and with reads that may be seconds old, then HNSW.

    It is stopped before HNSW, as kill -9 does.
    """
    from milvus_server import milvus as running

    size = len(vectors)
    if all(results.has(size, "Milvus", name) for name in KINDS["Milvus"]):
        return
    with running() as server:
        with empty_index(server.url("bench"), DIMENSION) as index:
            speed = fill(index, vectors)
            again(index._items.flush)
            again(lambda: settle(index))
        for name in KINDS["Milvus"]:
            row = Row(size, "Milvus", name, load=speed)
            if name.startswith("HNSW"):
                server.kill()
                yield
                server.start()
            if results.has(size, "Milvus", name):
                continue
            if name.startswith("HNSW"):
                with again(lambda: open_index(server.url("bench", "index=hnsw"), writable=True)) as index:
                    start = time.perf_counter()
                    again(partial(index.build_graph, "image"))
                    row.build = time.perf_counter() - start
            with open_index(server.url("bench", f"consistency={name.rpartition(' ')[2]}")) as index:
                measure(row, index, queries, truth, args.seconds, name.startswith("FLAT"))
            assert server.pid is not None
            row.memory, row.disk = memory([server.pid]), disk(server.folder / "data")
            results.add(row)


def again(asked: Callable[[], Any]) -> Any:
    """What a server gives, once it answers: one that was just started, or is too busy, does not at first."""
    while True:
        try:
            return asked()
        except Unavailable as error:
            print(error, flush=True)
            time.sleep(1)


def settle(index: Any) -> None:
    """Wait until the server answers as quickly as it will: closed segments are loaded one by one."""
    before = float("inf")
    while True:
        time.sleep(10)
        start = time.perf_counter()
        index.search(np.ones(DIMENSION, np.float32), K)
        took = time.perf_counter() - start
        if took > 0.8 * before:
            return
        before = took


COLUMNS: dict[str, tuple[str, str]] = {  # head → (field of a row, its form)
    "rows/s": ("load", ",.0f"),
    "build s": ("build", ",.0f"),
    "p50 ms": ("p50", ",.1f"),
    "p99 ms": ("p99", ",.1f"),
    "p50 ms, 1 % filter": ("filtered", ",.1f"),
    "queries/s, 100 at once": ("rate", ",.0f"),
    "recall@10": ("recall", ".3f"),
    "memory MB": ("memory", ",.0f"),
    "disk MB": ("disk", ",.0f"),
    "load": ("busy", ".1f"),
}


def table(rows: list[Row]) -> Iterator[str]:
    """The rows in Markdown."""
    heads = ["items", "engine", "search", *COLUMNS]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    order = [(engine, search) for engine, searches in KINDS.items() for search in searches]
    for row in sorted(rows, key=lambda row: (row.items, order.index((row.engine, row.search)))):
        numbers = [_shown(getattr(row, name), form) for name, form in COLUMNS.values()]
        yield f"| {' | '.join([f'{row.items:,}', row.engine, row.search, *numbers])} |"


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Two cores, as the table says."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    yield


def main() -> None:
    """Measure what is missing, then print all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--engines", nargs="+", default=["embedded", "postgresql", "milvus"])
    parser.add_argument("--results", type=Path, default=Path("engines.json"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of searches of each kind, about")
    parser.add_argument("--queries", type=int, default=100)
    args = parser.parse_args()
    results = Results(args.results)
    engines = {"embedded": embedded, "postgresql": postgresql, "milvus": milvus}
    with limited(2):
        for size in args.sizes:
            vectors = make_vectors(size, DIMENSION, seed=2)
            queries = make_vectors(args.queries, DIMENSION, seed=3)
            truth = best(vectors, queries)
            parts = [engines[name](args, results, vectors, queries, truth) for name in args.engines]
            for part in [*parts, *parts]:  # each to its graph, then each to its end
                next(part, None)
    print("\n".join(table(results.rows)))


if __name__ == "__main__":
    main()
