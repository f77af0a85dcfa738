"""How sure a number or a difference is: over the queries of one data set, and over the seeds of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, stdev, variance

import numpy as np
from numpy.typing import NDArray

from diptych.errors import SettingsError
from diptych.evaluation.metrics import DIRECTIONS, KS
from diptych.evaluation.report import Outcomes

LEVEL = 0.95
CHUNK = 128  # draws at a time; bounds the memory of the counts (CHUNK, N)
GRID = 20_001  # points of the integral behind Student's t
ROUNDING = 1e-9  # two sums of the same numbers in another order


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


def with_sums(draws: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Replicates of the recalls, with those of what is made of them: RSUM and the mean recall."""
    recalls = [draws[f"{way}_recall@{k}"] for way in DIRECTIONS for k in KS]
    return draws | {"rsum": np.sum(recalls, axis=0), "mean_recall": np.mean(recalls, axis=0)}


@dataclass(frozen=True, slots=True)
class Doubt:
    """The 95 % interval of a difference, and the probability of one as large where there is none."""

    low: float
    high: float
    p: float


def paired(
    first: Sequence[Outcomes], second: Sequence[Outcomes], *, draws: int = 10_000, seed: int = 0
) -> dict[str, Doubt]:
    """Second minus first over the same queries: d_q = mean over seeds of the second − mean over seeds of the first.

    * Interval: images are drawn with replacement, their queries come along (``bootstrap``), within each fold.
    * p: a permutation test. Where neither side is better, each image might as well have had its two results
      exchanged: the sign of all d_q of an image is drawn at random, and p = (1 + the draws at least as far from 0) /
      (1 + draws).

    Both speak of other queries, with these models and this gallery.
    """
    for other in (*first[1:], *second):
        if other.images != first[0].images or other.folds != first[0].folds:
            raise SettingsError(
                "these results are not of the same queries in the same order: evaluate both alike."
            )
    values = [_values(side) for side in (first, second)]
    folds = np.asarray(first[0].folds)
    numbers = [np.flatnonzero(folds == fold) for fold in np.unique(folds)]
    found: list[dict[str, NDArray[np.float64]]] = []
    mirrored: list[dict[str, NDArray[np.float64]]] = []
    for number, images in enumerate(numbers):
        queries = {
            name: _of_fold(values[1][name] - values[0][name], _images(first[0], name), images)
            for name in values[0]
        }
        rng = np.random.default_rng([seed, number])
        found.append(with_sums(bootstrap(queries, len(images), draws, rng)))
        mirrored.append(with_sums(_signs(queries, len(images), draws, rng)))
    doubts = {}
    for name in found[0]:
        low, high = interval(np.mean([one[name] for one in found], axis=0))
        flips = np.mean([one[name] for one in mirrored], axis=0)  # the first is the difference itself
        far = np.abs(flips[1:]) >= abs(flips[0]) - ROUNDING
        doubts[name] = Doubt(low, high, float((1 + far.sum()) / (1 + len(far))))
    return doubts


def welch(first: Sequence[float], second: Sequence[float]) -> Doubt:
    """The mean of the second minus that of the first, by Welch's t: of other seeds, on the same queries."""
    shares = [variance(side) / len(side) for side in (first, second)]
    change, error = mean(second) - mean(first), math.sqrt(sum(shares))
    if error == 0:
        return Doubt(change, change, 0.0 if change else 1.0)
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(side) - 1) for share, side in zip(shares, (first, second), strict=True)
    )
    width = student_quantile(freedom) * error
    return Doubt(change - width, change + width, student_tails(abs(change) / error, freedom))


def student_tails(t: float, freedom: float) -> float:
    """P(|T| ≥ t) of Student's t: with tan θ = T / √ν its density is proportional to cos^(ν−1) θ."""
    angles = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, GRID)
    whole = np.linspace(0.0, math.pi / 2, GRID)
    share = [float(np.trapezoid(np.cos(one) ** (freedom - 1), one)) for one in (angles, whole)]
    return share[0] / share[1]


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of a few runs; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    return student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def mean_and_interval(values: Sequence[float], digits: int = 1) -> str:
    """Mean and half width of the 95 % interval of the mean over runs; the value alone for one run, nothing for none."""
    if len(values) < 2:
        return f"{values[0]:,.{digits}f}" if values else ""
    return f"{mean(values):,.{digits}f} ± {half_width(values):,.{digits}f}"


@lru_cache
def student_quantile(freedom: float, tails: float = 0.05) -> float:
    """The t that leaves ``tails`` on both sides together, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tails(middle, freedom) > tails else (low, middle)
    return (low + high) / 2


def _values(side: Sequence[Outcomes]) -> dict[str, NDArray[np.float64]]:
    """Every mean over queries, query by query, averaged over the seeds of a side."""
    found: dict[str, NDArray[np.float64]] = {}
    for way in DIRECTIONS:
        ranks = np.array([one.ranks[way] for one in side])  # (seeds, queries)
        found |= {f"{way}_recall@{k}": np.where(ranks < k, 100.0, 0.0).mean(axis=0) for k in KS}
        found[f"{way}_mean_rank"] = ranks.mean(axis=0) + 1
    return found


def _images(outcomes: Outcomes, metric: str) -> NDArray[np.int64]:
    way = next(way for way in DIRECTIONS if metric.startswith(way))
    return np.asarray(outcomes.images[way])


def _of_fold(values: NDArray[np.float64], images: NDArray[np.int64], fold: NDArray[np.int64]) -> Queries:
    inside = np.isin(images, fold)
    return Queries(values[inside], np.searchsorted(fold, images[inside]))


def _signs(
    queries: Mapping[str, Queries], images: int, draws: int, rng: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """The differences as they are, then with a random sign for each image, ``draws`` times."""
    sums = np.stack([np.bincount(q.images, q.values, minlength=images) for q in queries.values()], axis=1)
    means = sums / [max(1, len(q.values)) for q in queries.values()]
    found = [means.sum(axis=0, keepdims=True)]
    for start in range(0, draws, CHUNK):
        signs = rng.integers(0, 2, size=(min(CHUNK, draws - start), images)) * 2.0 - 1.0
        found.append(signs @ means)
    return dict(zip(queries, np.concatenate(found).T, strict=True))
