"""Exact search: one matrix product over the mapped rows, block by block, then the best in float64.

torch's product is the fastest exact search on a CPU, and is imported here, on the first query: opening an
index must not cost the memory of a framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from diptych.index.protocol import Vectors
from diptych.index.segments import ROW_BITS, Layout
from diptych.index.state import Rows, Segment, Selection

if TYPE_CHECKING:
    from torch import Tensor

MARGIN = 8  # candidates beyond k that are scored again: float32 rounding must not decide who is in
TIE = 2e-6  # scores of unit vectors in float32 that are closer may be equal: float64 and order of addition decide
MAX_TIES = 4096  # such candidates beyond the margin; of more, the earliest
SCORES = 1 << 24  # scores held at once
UNPACKED = 1 << 14  # rows turned into float32 at once: about 32 MB at 512 dimensions
GATHERED = 1 << 20  # numbers gathered at once: as much as a cache holds, twice as fast as 16 times as much
ALONE = 1 << 21  # numbers below which a product is not worth a second core
GATHER = 0.15  # below this share of a segment, selected rows are gathered; above, all are scored
FEW_GONE = 1000  # removed rows whose scores are blotted out one by one


def scan(
    segments: Sequence[Segment], layout: Layout, queries: Vectors, k: int, selection: Selection | None = None
) -> list[Rows]:
    """For each query (Q, D), slots of the k + MARGIN best rows at least, in no order."""
    import torch

    q = torch.from_numpy(np.ascontiguousarray(queries))
    ties = TIE * max((segment.length(layout) for segment in segments), default=0.0) * q.norm(dim=1)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(len(queries))]
    # slots and scores of a filter's rows: one choice among all of them is cheaper than one a segment
    picked: list[tuple[Tensor, Tensor]] = []

    def choose(slots: Tensor | int, scores: Tensor) -> None:
        for row, best in enumerate(_best(scores, k, ties)):
            found[row].append((scores[row][best], slots + best if isinstance(slots, int) else slots[best]))

    for segment in segments:
        chosen = None if selection is None else selection.get(segment.number, np.zeros(0, np.int64))
        base = segment.number << ROW_BITS
        for rows, scores in _blocks(segment, layout, q, chosen):
            if isinstance(rows, int):
                choose(base + rows, scores)
                continue
            picked.append((base + rows, scores))
            if sum(part.numel() for _, part in picked) > SCORES:
                choose(*_joined(picked))
                picked = []
    if picked:
        choose(*_joined(picked))
    return [_merge(parts, k, ties[n : n + 1]) for n, parts in enumerate(found)]


def rescore(stored: Vectors, query: Vectors) -> NDArray[np.float64]:
    """Dot products of rows with one query in float64, one row at a time: the same whatever the batch was."""
    result: NDArray[np.float64] = (stored.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
    return result


def fetch(segments: Sequence[Segment], layout: Layout, slots: Rows) -> Vectors:
    """The vectors at these slots, in their order."""
    out = np.zeros((len(slots), layout.dimension), np.float32)
    numbers, rows = slots >> ROW_BITS, slots & ((1 << ROW_BITS) - 1)
    for segment in segments:
        here = np.flatnonzero(numbers == segment.number)
        if len(here):
            out[here] = layout.unpack(np.asarray(segment.stored[rows[here]]))
    return out


def _blocks(
    segment: Segment, layout: Layout, queries: Tensor, chosen: Rows | None
) -> Iterator[tuple[Tensor | int, Tensor]]:
    """(rows, or the first of consecutive rows, and their scores (Q, rows)) piece by piece; removed ones are −inf."""
    import torch

    count, gone = len(segment), segment.gone
    if chosen is None and len(gone) > FEW_GONE:
        chosen = segment.live_rows
    limit = max(1, SCORES // max(1, len(queries)))
    if chosen is not None and len(chosen) < GATHER * count:
        step = max(1, GATHERED // layout.dimension)
        for start in range(0, len(chosen), limit):
            rows = chosen[start : start + limit]
            pieces = [rows[at : at + step] for at in range(0, len(rows), step)]
            products = [_product(_floats(segment, layout, piece), queries) for piece in pieces]
            yield torch.from_numpy(rows), torch.cat(products, dim=1)
        return
    step = limit if layout.precision == "float32" else min(limit, UNPACKED)
    for start in range(0, count, step):
        stop = min(start + step, count)
        scores = _product(_floats(segment, layout, slice(start, stop)), queries)
        wanted = gone if chosen is None else chosen
        inside = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, stop)]
        if chosen is not None:
            # numpy takes a few values out of many faster than torch, which hands the work to all its threads
            kept = np.take(scores.T.numpy(), inside - start, axis=0)
            yield torch.from_numpy(inside), torch.from_numpy(kept).T
            continue
        if len(inside):
            scores[:, torch.from_numpy(inside - start)] = -torch.inf
        yield start, scores


def _floats(segment: Segment, layout: Layout, rows: slice | Rows) -> Tensor:
    import torch

    stored = segment.stored[rows] if isinstance(rows, slice) else np.take(segment.stored, rows, axis=0)
    if layout.precision == "binary":
        return torch.from_numpy(layout.unpack(stored))
    return torch.from_numpy(stored).float()  # torch widens halves several times faster than numpy


def _product(rows: Tensor, queries: Tensor) -> Tensor:
    """Scores (Q, rows), as the transpose of rows @ queriesᵀ: the order in which few queries are fastest.

    A single query over many rows is doubled. A product with one vector runs on one core and streams the rows at
    a third of the speed of a product with two: 19 against 6 ms for 100,000 × 512 on two cores.
    """
    if len(queries) == 1:
        few = rows.numel() < ALONE
        return (rows @ queries[0])[None] if few else (rows @ queries.repeat(2, 1).T).T[:1]
    return (rows @ queries.T).T


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Slots (N,) and scores (Q, N) of several blocks."""
    import torch

    return torch.cat([slots for slots, _ in parts]), torch.cat([scores for _, scores in parts], dim=1)


def _best(scores: Tensor, k: int, ties: Tensor) -> list[Tensor]:
    """For each row of scores (Q, N), indices of its best k + MARGIN and of all within ``ties`` of the k-th."""
    import torch

    top = torch.topk(scores, min(k + MARGIN, scores.shape[1]), dim=1)
    out = list(top.indices)
    if top.indices.shape[1] <= k:
        return out
    ties = torch.maximum(
        ties, TIE * top.values[:, k - 1].abs().nan_to_num(posinf=0.0)
    )  # of rows longer than most
    last, limit = top.values[:, -1], top.values[:, k - 1] - ties
    crowded = (last >= limit) & last.isfinite()  # else every tie of the k-th is within the margin
    for row in torch.nonzero(crowded).flatten().tolist():
        near = torch.nonzero(scores[row] >= limit[row]).flatten()  # in the order of addition
        if len(near) > k + MAX_TIES:
            sure = scores[row][near] > limit[row] + 2 * ties[row]
            near = torch.cat([near[sure], near[~sure][: k + MAX_TIES]])
        out[row] = near
    return out


def _merge(parts: list[tuple[Tensor, Tensor]], k: int, ties: Tensor) -> Rows:
    import torch

    if not parts:
        return np.zeros(0, np.int64)
    scores, slots = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    if len(parts) > 1:
        order = torch.argsort(slots)
        scores, slots = scores[order], slots[order]
        (kept,) = _best(scores[None], k, ties)
        scores, slots = scores[kept], slots[kept]
    result: Rows = slots[scores > -torch.inf].numpy()
    return result
