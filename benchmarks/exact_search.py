"""Exact search of many rows: the index's own scan (numpy) beside torch and ONNX Runtime, in one run and one table.

    python benchmarks/exact_search.py --rows 1000000

Each engine scores all rows and takes the best 18, float32 in one piece or in blocks of 2²⁴ scores, float16 in blocks of
16,384 rows, which are widened first. The engines take turns, and the best of several rounds counts. The run ends with
status 1 where numpy takes more than 1.2 times torch's time in float32, or 1.5 times in float16, or finds other rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from diptych.index.engines.embedded.scan import MARGIN, SCORES, UNPACKED, _best, _product

K = 10
LIMITS = {"float32": 1.2, "float16": 1.5}
Block = NDArray[np.float32] | NDArray[np.float16]
Score = Callable[[Block, NDArray[np.float32]], tuple[NDArray[np.float32], NDArray[np.int64]]]


def by_numpy(rows: Block, queries: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """What the embedded index does."""
    scores = _product(rows if rows.dtype == np.float32 else rows.astype(np.float32), queries)
    best = np.stack([one[: K + MARGIN] for one in _best(scores, K, np.zeros(len(queries), np.float32))])
    return np.take_along_axis(scores, best, axis=1), best


def by_torch(rows: Block, queries: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The product is fastest with at least two queries."""
    asked = torch.from_numpy(queries)
    doubled = asked.repeat(2, 1) if len(asked) == 1 else asked
    scores = (torch.from_numpy(rows).float() @ doubled.T).T[: len(asked)]
    top = torch.topk(scores, K + MARGIN, dim=1)
    return top.values.numpy(), top.indices.numpy()


def by_onnx(dim: int, half: bool) -> Score:
    """Cast, MatMul and TopK."""
    import onnxruntime  # after diptych, which has it report nothing

    nodes = [helper.make_node("Cast", ["rows"], ["wide"], to=TensorProto.FLOAT)] if half else []
    nodes += [
        helper.make_node("MatMul", ["wide" if half else "rows", "queries"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["values", "best"], axis=0),
    ]
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "scan",
        [helper.make_tensor_value_info("rows", kind, ["n", dim]),
         helper.make_tensor_value_info("queries", TensorProto.FLOAT, [dim, "q"])],
        [helper.make_tensor_value_info("values", TensorProto.FLOAT, ["k", "q"]),
         helper.make_tensor_value_info("best", TensorProto.INT64, ["k", "q"])],
        [helper.make_tensor("k", TensorProto.INT64, [1], [K + MARGIN])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def score(rows: Block, queries: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        values, best = session.run(None, {"rows": rows, "queries": np.ascontiguousarray(queries.T)})
        return values.T, best.T

    return score


def blocks(rows: Block, queries: int) -> Iterator[tuple[int, Block]]:
    """Pieces of the rows, each with its first row."""
    step = max(K + MARGIN, SCORES // queries)
    step = step if rows.dtype == np.float32 else min(step, UNPACKED)
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step]


def search(score: Score, rows: Block, queries: NDArray[np.float32]) -> list[list[int]]:
    """The best rows of each query, best first."""
    found = [(start, *score(block, queries)) for start, block in blocks(rows, len(queries))]
    values = np.concatenate([one[1] for one in found], axis=1)
    best = np.concatenate([one[2] + one[0] for one in found], axis=1)
    order = np.lexsort((best, -values))[:, :K]
    return np.take_along_axis(best, order, axis=1).tolist()


def main() -> int:
    """Print the table; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((given.rows, given.dim), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    broken = 0
    print(f"{given.rows:,} × {given.dim}, {torch.get_num_threads()} threads, best of {given.rounds} rounds")
    print(
        "| rows | queries | numpy ms | torch ms | ONNX Runtime ms | numpy / torch |\n|---|---|---|---|---|---|"
    )
    for kind in LIMITS:
        stored = rows if kind == "float32" else rows.astype(np.float16)
        engines: dict[str, Score] = {
            "numpy": by_numpy, "torch": by_torch, "onnx": by_onnx(given.dim, kind == "float16")
        }  # fmt: skip
        for count in (1, 100):
            queries = rng.standard_normal((count, given.dim), dtype=np.float32)
            best = dict.fromkeys(engines, float("inf"))
            answers = {}
            for _ in range(given.rounds):
                for name, score in engines.items():
                    start = time.perf_counter()
                    answers[name] = search(score, stored, queries)
                    best[name] = min(best[name], time.perf_counter() - start)
            ratio = best["numpy"] / best["torch"]
            times = " | ".join(f"{1000 * best[name]:.0f}" for name in engines)
            print(f"| {kind} | {count} | {times} | {ratio:.2f} |", flush=True)
            broken += ratio > LIMITS[kind] or answers["numpy"] != answers["torch"]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
