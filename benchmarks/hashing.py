"""Retrieval by binary codes: MAP@5000 against the dense sort, and Hamming search against float search.

Run: ``python benchmarks/hashing.py`` (5,000 queries against 112,217 codes of 64 bits and 80 classes, the sizes of
COCO in the hashing literature; then 1,000,000 codes of 64 bits against 1,000,000 float vectors; then an index of
100,000 vectors searched by codes, by a graph and exactly), or with ``--small``.
Both forms of MAP run in this process on the same codes and must agree before a ratio is printed. The dense form is
that of published code: one product of ±1 rows, one sort of the whole database and one product of the labels for each
query. It takes minutes, so by default it is timed on 500 of the queries and its time scaled; ``--dense-queries 5000``
times it on all.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from sys import path

import numpy as np
import torch
from numpy.typing import NDArray

path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.codes import hamming, nearest, pack
from diptych.evaluation.hashing import TOP, hashing_map

Rows = NDArray[np.float32]
Labels = NDArray[np.bool_]


def labelled_codes(
    rng: np.random.Generator, centres: Rows, count: int, per_image: float
) -> tuple[Rows, Labels]:
    """Codes around the centres of their labels, with a share of noise, and the labels."""
    classes, bits = centres.shape
    labels = rng.random((count, classes)) < (per_image - 1) / classes
    labels[np.arange(count), rng.integers(classes, size=count)] = True
    values = labels.astype(np.float32) @ centres + 2 * rng.standard_normal((count, bits), np.float32)
    return values, labels


def dense_map(query: Rows, database: Rows, query_labels: Labels, database_labels: Labels, top: int) -> float:
    """MAP as published code computes it, with a stable sort so that ties are decided by the index."""
    q, d = (np.where(rows >= 0, 1, -1).astype(np.float32) for rows in (query, database))
    ql, dl = query_labels.astype(np.float32), database_labels.astype(np.float32)
    values = []
    for code, labels in zip(q, ql, strict=True):
        relevant = dl @ labels > 0
        distances = 0.5 * (q.shape[1] - d @ code)
        first = relevant[np.argsort(distances, kind="stable")][:top]
        hits = np.cumsum(first)
        ranks = np.flatnonzero(first) + 1
        values.append(float(np.mean(hits[first] / ranks)) if len(ranks) else 0.0)
    return 100 * float(np.mean(values))


def peak_of_memory() -> float:
    """The most memory this process has held since the mark was set back, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


def compare_map(queries: int, database: int, bits: int, dense_queries: int) -> None:
    """MAP@5000 both ways."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((80, bits), np.float32)
    q, ql = labelled_codes(rng, centres, queries, 2.9)
    d, dl = labelled_codes(rng, centres, database, 2.9)
    print(f"MAP@{TOP} of {queries:,} queries against {database:,} codes of {bits} bits, 80 classes")
    hashing_map(q[:5], d, ql[:5], dl)
    start = time.perf_counter()
    scores = hashing_map(q, d, ql, dl)
    ours = time.perf_counter() - start
    print(f"  counting: {ours:7.2f} s, the process held at most {peak_of_memory():,.0f} MB, data included")
    some = min(dense_queries, queries)
    start = time.perf_counter()
    dense = dense_map(q[:some], d, ql[:some], dl, TOP)
    theirs = (time.perf_counter() - start) * queries / some
    counted = hashing_map(q[:some], d, ql[:some], dl).map
    assert abs(dense - counted) < 1e-6, f"{dense} is not {counted}"
    scaled = "" if some == queries else f" (scaled from {some:,} queries)"
    print(f"  dense sort: {theirs:5.2f} s{scaled}, equal to 1e-6 on {some:,} queries")
    print(f"  ratio: {theirs / ours:.1f}×")
    print(f"  MAP {scores.map:.3f}, ties averaged {scores.map_tie_averaged:.3f}\n")


def compare_search(count: int, bits: int, dim: int, queries: int = 20, k: int = 10) -> None:
    """The ten nearest codes, and the ten best float vectors, of one query after the other."""
    rng = np.random.default_rng(1)
    vectors = torch.randn(count, dim, generator=torch.Generator().manual_seed(0))
    codes = pack(rng.standard_normal((count, bits), np.float32))
    wanted = pack(rng.standard_normal((queries, bits), np.float32))
    asked = torch.randn(queries, dim)
    print(f"search of {count:,}: codes of {bits} bits against float32 vectors of {dim} dimensions, top {k}")
    for _ in range(2):  # the first round loads kernels and pages
        start = time.perf_counter()
        for code in wanted:
            nearest(hamming(code, codes), k)
        ours = (time.perf_counter() - start) / queries
        start = time.perf_counter()
        for row in asked:
            pair = row.expand(2, -1)  # twice as many cores as a product with one vector
            torch.topk((vectors @ pair.T)[:, 0], k)
        theirs = (time.perf_counter() - start) / queries
    memory = codes.nbytes / 1e6, vectors.numel() * 4 / 1e6
    print(
        f"  Hamming {1000 * ours:.2f} ms a query ({memory[0]:,.0f} MB), float {1000 * theirs:.2f} ms ", end=""
    )
    print(f"({memory[1]:,.0f} MB)\n  ratio: {theirs / ours:.1f}×")


def compare_index(count: int, dim: int, queries: int = 100, k: int = 10) -> None:
    """An index searched exactly, by its codes and by its graph: time of a query, recall, time to build."""
    from index import build, make_vectors

    vectors, asked = make_vectors(count, dim, 2), make_vectors(queries, dim, 3)
    print(f"\nan index of {count:,} vectors of {dim} dimensions, top {k}, {queries} queries one by one")
    print(f"  {'search':<8}{'build s':>9}{'p50 ms':>9}{'recall@10':>11}")
    with tempfile.TemporaryDirectory() as folder:
        opened = build(Path(folder) / "index", vectors, [""] * count)
        truth: list[set[str]] = []
        for name in ("exact", "codes", "graph"):
            start = time.perf_counter()
            if name != "exact":
                opened.build_graph("image", codes=name == "codes")
            built = time.perf_counter() - start
            times, found = [], []
            for turn in range(2):  # the first round loads what is on disk
                for query in asked:
                    start = time.perf_counter()
                    hits = opened.search(query, k, kind="image", exact=name == "exact" or None)
                    if turn:
                        times.append(1000 * (time.perf_counter() - start))
                        found.append(set(hits.ids))
            truth = truth or found
            recall = np.mean([len(a & b) / k for a, b in zip(found, truth, strict=True)])
            print(f"  {name:<8}{built:>9.1f}{np.median(times):>9.2f}{recall:>11.3f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=64)
    parser.add_argument("--dim", type=int, default=512, help="of the float vectors")
    parser.add_argument("--dense-queries", type=int, default=500)
    parser.add_argument("--small", action="store_true", help="200 queries, 5,000 and 50,000 codes")
    args = parser.parse_args(arguments)
    compare_map(200 if args.small else 5000, 5000 if args.small else 112_217, args.bits, args.dense_queries)
    compare_search(50_000 if args.small else 1_000_000, args.bits, args.dim)
    compare_index(5000 if args.small else 100_000, args.dim)


if __name__ == "__main__":
    main()
