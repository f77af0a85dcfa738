"""Bootstrap intervals of means over queries, resampled by image: the texts of an image come along with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
CHUNK = 128  # draws at a time; bounds the memory of the counts (CHUNK, N)


@dataclass(frozen=True, slots=True)
class Queries:
    """One number per query (Q,) and the image it belongs to (Q,); the metric is the mean of the numbers."""

    values: NDArray[np.float64]
    images: NDArray[np.int64]


def bootstrap(
    metrics: Mapping[str, Queries], images: int, draws: int, rng: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """``draws`` replicates of each mean, all from the same resampled images, so that they can be added.

    A draw takes ``images`` images with replacement; an image drawn c times brings each of its queries c
    times. With counts C (draws, N), sums of values s (N,) and numbers of queries n (N,), a replicate is
    C s / C n. The gallery stays whole: an interval speaks of other queries against the same gallery.
    """
    names = list(metrics)
    sums, sizes = np.zeros((images, len(names))), np.zeros((images, len(names)))
    for column, name in enumerate(names):
        queries = metrics[name]
        sums[:, column] = np.bincount(queries.images, queries.values, minlength=images)
        sizes[:, column] = np.bincount(queries.images, minlength=images)
    found = np.empty((draws, len(names)))
    for start in range(0, draws, CHUNK):
        size = min(CHUNK, draws - start)
        drawn = rng.integers(images, size=(size, images)) + np.arange(size)[:, None] * images
        counts = np.bincount(drawn.ravel(), minlength=size * images).reshape(size, images).astype(np.float64)
        with np.errstate(invalid="ignore"):  # a draw without any query (tiny data) is NaN and left out below
            found[start : start + size] = (counts @ sums) / (counts @ sizes)
    return {name: found[:, column] for column, name in enumerate(names)}


def interval(draws: NDArray[np.float64]) -> tuple[float, float]:
    """The central 95 % of the replicates."""
    low, high = np.nanquantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
