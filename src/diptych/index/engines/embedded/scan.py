"""Exact search: one matrix product over the mapped rows, block by block, then the best in float64.

numpy does all of it: ``benchmarks/exact_search.py`` compares it with torch and ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.index import deadline
from diptych.index.engines.embedded.segments import ROW_BITS, RowLayout
from diptych.index.engines.embedded.state import RowNumbers, Segment, Selection
from diptych.index.protocol import Vectors
from diptych.index.scoring import MAX_TIES, TIE

MARGIN = 8  # candidates beyond k that are scored again: float32 rounding must not decide who is in
SCORES = 1 << 24  # scores held at once
UNPACKED = 1 << 14  # rows turned into float32 at once: about 32 MB at 512 dimensions
GATHERED = 1 << 20  # numbers gathered at once: as much as a cache holds, twice as fast as 16 times as much
GATHER = 0.15  # below this share of a segment, selected rows are gathered; above, all are scored
FEW_GONE = 1000  # removed rows whose scores are blotted out one by one

RowScores = NDArray[np.float32]


def scan(
    segments: Sequence[Segment], queries: Vectors, k: int, selection: Selection | None = None
) -> list[RowNumbers]:
    """For each query (Q, D), slots of the k + MARGIN best rows at least, in no order."""
    longest = max((segment.length for segment in segments), default=0.0)
    ties = TIE * longest * np.linalg.norm(queries, axis=1)
    found: list[list[tuple[RowScores, RowNumbers]]] = [[] for _ in range(len(queries))]
    # slots and scores of a filter's rows: one choice among all of them is cheaper than one a segment
    picked: list[tuple[RowNumbers, RowScores]] = []

    def choose(slots: RowNumbers | int, scores: RowScores) -> None:
        for row, best in enumerate(_best(scores, k, ties)):
            found[row].append((scores[row, best], slots + best if isinstance(slots, int) else slots[best]))

    for segment in segments:
        subset = None if selection is None else selection.get(segment.number, np.zeros(0, np.int64))
        base = segment.number << ROW_BITS
        for rows, scores in _blocks(segment, queries, subset):
            if isinstance(rows, int):
                choose(base + rows, scores)
                continue
            picked.append((base + rows, scores))
            if sum(part.size for _, part in picked) > SCORES:
                choose(*_join(picked))
                picked = []
    if picked:
        choose(*_join(picked))
    return [_merge(parts, k, ties[n : n + 1]) for n, parts in enumerate(found)]


def fetch(segments: Sequence[Segment], layout: RowLayout, slots: RowNumbers) -> Vectors:
    """The vectors at these slots, in their order."""
    out = np.zeros((len(slots), layout.dimension), np.float32)
    numbers, rows = slots >> ROW_BITS, slots & ((1 << ROW_BITS) - 1)
    for segment in segments:
        here = np.flatnonzero(numbers == segment.number)
        if len(here):
            out[here] = layout.unpack(segment.rows.take(rows[here]))
    return out


def _blocks(
    segment: Segment, queries: Vectors, subset: RowNumbers | None
) -> Iterator[tuple[RowNumbers | int, RowScores]]:
    """(rows, or the first of consecutive rows, and their scores (Q, rows)) piece by piece; removed ones are −inf."""
    count, gone = len(segment), segment.gone
    if subset is None and len(gone) > FEW_GONE:
        subset = segment.live_rows
    limit = max(1, SCORES // max(1, len(queries)))
    if subset is not None and len(subset) < GATHER * count:
        for start in range(0, len(subset), limit):
            rows = subset[start : start + limit]
            yield rows, _gather(segment, queries, rows)
        return
    step = limit if segment.layout.precision == "float32" else min(limit, UNPACKED)
    for start in range(0, count, step):
        deadline.check()
        stop = min(start + step, count)
        scores = _product(_floats(segment.layout, segment.rows.between(start, stop)), queries)
        wanted = gone if subset is None else subset
        inside = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, stop)]
        if subset is not None:
            yield inside, np.take(scores, inside - start, axis=1)
            continue
        if len(inside):
            scores[:, inside - start] = -np.inf
        yield start, scores


def _gather(segment: Segment, queries: Vectors, rows: RowNumbers) -> RowScores:
    """Scores (Q, rows) of some rows, which are copied a piece at a time to a place that stays in the cache."""
    layout = segment.layout
    out = np.empty((len(queries), len(rows)), np.float32)
    step = max(1, GATHERED // layout.dimension)
    place = np.empty((min(step, len(rows)), layout.width), layout.dtype)
    for start in range(0, len(rows), step):
        deadline.check()
        piece = rows[start : start + step]
        stored = place[: len(piece)]
        segment.rows.take(piece, out=stored)
        out[:, start : start + len(piece)] = _product(_floats(layout, stored), queries)
    return out


def _floats(layout: RowLayout, stored: NDArray[Any]) -> Vectors:
    return stored if layout.precision == "float32" else layout.unpack(stored)


def _product(rows: Vectors, queries: Vectors) -> RowScores:
    """Scores (Q, rows)."""
    scores: RowScores = (rows @ queries[0])[None] if len(queries) == 1 else queries @ rows.T
    return scores


def _join(parts: list[tuple[RowNumbers, RowScores]]) -> tuple[RowNumbers, RowScores]:
    """Slots (N,) and scores (Q, N) of several blocks."""
    return np.concatenate([slots for slots, _ in parts]), np.concatenate([part for _, part in parts], axis=1)


def _best(scores: RowScores, k: int, ties: NDArray[np.float32]) -> list[RowNumbers]:
    """For each row of scores (Q, N), indices of its best k + MARGIN and of all within ``ties`` of the k-th."""
    count = scores.shape[1]
    if count <= k:
        return [np.arange(count) for _ in scores]
    least = max(0, count - k - MARGIN)
    top = np.argpartition(scores, least, axis=1)[:, least:]
    values, out = np.sort(np.take_along_axis(scores, top, axis=1), axis=1)[:, ::-1], list(top)
    kth, last = values[:, k - 1], values[:, -1]
    ties = np.maximum(ties, np.where(np.isfinite(kth), TIE * np.abs(kth), 0))  # of rows longer than most
    crowded = (last >= kth - ties) & np.isfinite(last)  # else every tie of the k-th is within the margin
    for row in np.flatnonzero(crowded).tolist():
        limit = kth[row] - ties[row]
        near = np.flatnonzero(scores[row] >= limit)  # in the order of addition
        if len(near) > k + MAX_TIES:
            sure = scores[row][near] > limit + 2 * ties[row]
            near = np.concatenate([near[sure], near[~sure][: k + MAX_TIES]])
        out[row] = near
    return out


def _merge(parts: list[tuple[RowScores, RowNumbers]], k: int, ties: NDArray[np.float32]) -> RowNumbers:
    if not parts:
        return np.zeros(0, np.int64)
    scores, slots = parts[0]
    if len(parts) > 1:
        scores, slots = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
        order = np.argsort(slots)
        scores, slots = scores[order], slots[order]
        (kept,) = _best(scores[None], k, ties)
        scores, slots = scores[kept], slots[kept]
    return slots[scores > -np.inf]
