"""Near-duplicates: the best pairs of a collection, block against block, never the whole matrix at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from diptych.index.protocol import Vectors
from diptych.progress import track

BLOCK = 4096  # rows a side: 64 MB of scores

Pairs = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]  # scores, first and second slots


def best_pairs(
    slots: NDArray[np.int64],
    fetch: Callable[[NDArray[np.int64]], Vectors],
    threshold: float | None,
    limit: int,
    show_progress: bool,
) -> Pairs:
    """The ``limit`` best pairs of items that score at least ``threshold``, best first.

    ``slots`` number the items, and ``fetch`` gives the vectors of some of them.
    """
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
