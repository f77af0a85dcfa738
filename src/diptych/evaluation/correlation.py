"""How well similarities agree with gold scores: Pearson and Spearman, and three ways to join sub-files.

=========  ====================================================================================
``all``    one correlation over the pairs of all sub-files together (SimCSE, CUSA)
``mean``   the mean over sub-files
``wmean``  the mean over sub-files, weighted by their number of pairs (SentEval's own figure)
=========  ====================================================================================

Published figures differ by several points between the three; always name the one you print.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diptych.errors import DataError

AGGREGATIONS = ("all", "mean", "wmean")
FEWEST = 3  # items that have an order of neighbours


def pearson(similarities: ArrayLike, gold: ArrayLike) -> float:
    """Pearson's r; 0 with a warning where one side is constant."""
    a, b = _checked(similarities, gold)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    if not size or not np.isfinite(size):
        warnings.warn("a correlation with constant values is reported as 0.", RuntimeWarning, stacklevel=2)
        return 0.0
    return float(np.clip((a * b).sum() / size, -1, 1))


def spearman(similarities: ArrayLike, gold: ArrayLike) -> float:
    """Spearman's ρ: Pearson's r of the ranks, where equal values share their mean rank."""
    a, b = _checked(similarities, gold)
    return pearson(average_ranks(a), average_ranks(b))


def average_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def agreement(files: Sequence[tuple[ArrayLike, ArrayLike]]) -> dict[str, float]:
    """``spearman_all``, ``pearson_wmean``, … × 100 of sub-files, each (similarities, gold).

    ``both_all``, … is the mean of the two, which COOKIE prints.
    """
    if not files:
        raise DataError("no pairs of sentences to correlate: give at least one file.")
    sizes = np.array([len(np.asarray(gold)) for _, gold in files], dtype=np.float64)
    together = tuple(np.concatenate([np.asarray(file[side]) for file in files]) for side in (0, 1))
    found: dict[str, float] = {}
    for name, measure in (("spearman", spearman), ("pearson", pearson)):
        whole = measure(*together)
        each = np.array([measure(*file) for file in files]) if len(files) > 1 else np.array([whole])
        values = (whole, float(each.mean()), float((each * sizes).sum() / sizes.sum()))
        found |= {f"{name}_{way}": 100 * value for way, value in zip(AGGREGATIONS, values, strict=True)}
    found |= {f"both_{way}": (found[f"spearman_{way}"] + found[f"pearson_{way}"]) / 2 for way in AGGREGATIONS}
    return found


def _checked(similarities: ArrayLike, gold: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a, b = np.asarray(similarities, dtype=np.float64), np.asarray(gold, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise DataError(
            f"{a.shape} similarities and {b.shape} gold scores cannot be correlated: give one each."
        )
    if not np.isfinite(b).all():
        raise DataError("a gold score is not a finite number: check the file of gold scores.")
    return np.nan_to_num(a, nan=0.0), b  # the cosine of a zero vector


def neighbour_agreement(vectors: ArrayLike, gold: ArrayLike) -> float:
    """How alike two spaces order the neighbours of an item: mean over items of Spearman's ρ, × 100.

    For each item of ``vectors`` (N, D) the cosines with all others are correlated with those of ``gold`` (N, E).
    """
    ours, theirs = (_cosines(np.asarray(rows, dtype=np.float64)) for rows in (vectors, gold))
    if len(ours) != len(theirs) or len(ours) < FEWEST:
        raise DataError(
            f"{len(ours)} vectors and {len(theirs)} of the gold space: give at least {FEWEST} of each."
        )
    others = ~np.eye(len(ours), dtype=np.bool_)
    found = [spearman(a[keep], b[keep]) for a, b, keep in zip(ours, theirs, others, strict=True)]
    return 100 * float(np.mean(found))


def _cosines(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    cosines: NDArray[np.float64] = rows @ rows.T
    return cosines
