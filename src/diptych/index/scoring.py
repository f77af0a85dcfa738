"""Scores that rounding must not decide: hits in float64, ties in the order of addition, the best pairs of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from diptych.index.protocol import Hit, Hits, Item, Vectors
from diptych.progress import track

TIE = 2e-6  # scores of unit vectors in float32 that are closer may be equal: float64 and order of addition decide
MAX_TIES = 4096  # tied candidates beyond the margin; of more, the earliest
MARGIN = 32  # candidates of a server beyond k that are scored again: its float32 must not decide who is in
BLOCK = 4096  # rows a side of a block of pairs: 64 MB of scores

Pairs = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]  # scores, first and second numbers


def rescore(stored: Vectors, query: Vectors) -> NDArray[np.float64]:
    """Dot products of rows with one query in float64, one row at a time: the same whatever the batch was."""
    result: NDArray[np.float64] = (stored.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
    return result


@dataclass(frozen=True)
class Candidates:
    """What an engine found for a query: items, the numbers of their addition, and vectors."""

    items: Sequence[Item]
    serials: Sequence[int]
    stored: Vectors
    query: Vectors

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """In float64."""
        return rescore(self.stored, self.query)

    def is_crowded(self, k: int) -> bool:
        """Whether items beyond the candidates may tie with the k-th: the engine's float32 has chosen them."""
        if len(self.items) < k + MARGIN:
            return False
        scores = np.sort(self.scores)
        tie = TIE * np.linalg.norm(self.stored, axis=1).max() * np.linalg.norm(self.query)
        return bool(scores[0] >= scores[-k] - tie)

    def hits(self, k: int, exact: bool) -> Hits:
        """The k best; of equal scores images first, then in the order in which they were added."""
        texts = np.array([one.kind == "text" for one in self.items], bool)
        best = np.lexsort((np.array(self.serials, np.int64), texts, -self.scores))[:k]
        return Hits(tuple(Hit(self.items[n], float(self.scores[n])) for n in best), exact)


Find = Callable[[Vectors, int], list[Candidates]]
"""An engine's search: the vectors of some queries and a number → that many of the best candidates of each."""


def best_hits(queries: Vectors, k: int, find: Find, exact: bool, most: int = 1 << 62) -> list[Hits]:
    """The k best of each query; where an exact search has more ties than candidates, more are asked for."""
    found = find(queries, k + MARGIN)
    crowded = [n for n, one in enumerate(found) if exact and one.is_crowded(k)]
    again = find(queries[crowded], min(most, k + MAX_TIES)) if crowded else []
    for n, one in zip(crowded, again, strict=True):
        found[n] = one
    return [one.hits(k, exact) for one in found]


def best_pairs(
    count: int,
    fetch: Callable[[NDArray[np.int64]], Vectors],
    threshold: float | None,
    limit: int,
    show_progress: bool,
) -> Pairs:
    """The ``limit`` best pairs of ``count`` items that score at least ``threshold``, best first.

    ``fetch`` gives the vectors of some of them, by number. Block is compared with block, never all at once.
    """
    slots = np.arange(count)
    floor = -np.inf if threshold is None else threshold
    best: Pairs = (np.zeros(0, np.float32), slots[:0], slots[:0])
    blocks = [slots[start : start + BLOCK] for start in range(0, len(slots), BLOCK)]
    for number, left in enumerate(track(blocks, "near-duplicates", len(blocks), show_progress)):
        a = fetch(left)
        for other, right in enumerate(blocks[number:], number):
            scores = a @ fetch(right).T
            if other == number:
                scores[np.tri(*scores.shape, dtype=np.bool)] = -np.inf
            flat = scores.ravel()
            at = np.flatnonzero(flat >= floor) if np.isfinite(floor) else np.arange(len(flat))
            if len(at) > limit:
                at = at[np.argpartition(flat[at], len(at) - limit)[-limit:]]
            found = flat[at]
            best = _merge(best, (found, left[at // len(right)], right[at % len(right)]), limit)
            if len(best[0]) == limit:  # from now on only pairs that would enter the list are of interest
                floor = max(floor, float(best[0][-1]))
    return best


def _merge(old: Pairs, new: Pairs, limit: int) -> Pairs:
    kept = new[0] > -np.inf
    scores = np.concatenate([old[0], new[0][kept]])
    first = np.concatenate([old[1], new[1][kept]])
    second = np.concatenate([old[2], new[2][kept]])
    order = np.lexsort((second, first, -scores))[:limit]
    return scores[order], first[order], second[order]
