"""How sure a number or a difference is: over the queries of one data set, and over the seeds of training."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, stdev

import numpy as np
from numpy.typing import NDArray

from diptych.errors import SettingsError
from diptych.evaluation.metrics import DIRECTIONS, KS, Ranks
from diptych.evaluation.report import Outcomes

LEVEL = 0.95
CHUNK = 128  # draws at a time; bounds the memory of the counts (CHUNK, N)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)  # of the integral behind Student's t
ROUNDING = 1e-9  # two sums of the same numbers in another order
LEAST = 0.75  # share of the variance of queries that a difference has at least, whatever the seeds say
POWER = 0.8  # probability with which a gain is to be seen
MOST_IMAGES, MOST_SEEDS = 10**8, 200
MANY = 200.0  # degrees of freedom from which on Student's t is nearly normal
# seeds of each side that are proposed at least; degrees of freedom that Satterthwaite's formula needs
ENOUGH = 3


@dataclass(frozen=True, slots=True)
class Queries:
    """One number per query (Q,) and the image it belongs to (Q,); the metric is the mean of the numbers."""

    values: NDArray[np.float64]
    images: NDArray[np.int64]


def recall_queries(ranks: Ranks, image_of: NDArray[np.int64], ties: str) -> dict[str, Queries]:
    """R@K of both directions, query by query; ``image_of`` (M,) is the image of each text."""
    return {
        f"{direction}_recall@{k}": Queries(
            np.where(placement.ranks(ties) < k, 100.0, 0.0),
            placement.queries if direction == DIRECTIONS[0] else image_of[placement.queries],
        )
        for direction, placement in ranks
        for k in KS
    }


def per_query(one: Outcomes) -> dict[str, Queries]:
    """Every metric that is a mean over the queries of a result, query by query."""
    found: dict[str, Queries] = {}
    for way in DIRECTIONS:
        ranks, images = np.asarray(one.ranks[way]), np.asarray(one.images[way])
        found |= {f"{way}_recall@{k}": Queries(np.where(ranks < k, 100.0, 0.0), images) for k in KS}
        found[f"{way}_mean_rank"] = Queries(ranks + 1.0, images)
    return found


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


def over_folds(
    found: Sequence[Mapping[str, float]], draws: Sequence[Mapping[str, NDArray[np.float64]]]
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]]]:
    """The metrics of folds, averaged, and their replicates; without draws, none of these."""
    metrics = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    known = draws[0] if draws else ()
    return metrics, {name: np.mean([one[name] for one in draws], axis=0) for name in known}


def intervals_of(
    metrics: Mapping[str, Queries], images: int, draws: int, rng: np.random.Generator, total: str = ""
) -> dict[str, tuple[float, float]]:
    """The interval of each mean, and of their sum, called ``total``, where that has a name; none without draws."""
    if not draws:
        return {}
    sample = bootstrap(metrics, images, draws, rng)
    sums = {total: np.sum(list(sample.values()), axis=0)} if total else {}
    return {name: interval(values) for name, values in (sample | sums).items()}


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


def paired_difference(
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
            raise SettingsError("these results are of other queries or another order: evaluate both alike.")
    values = [[per_query(one) for one in side] for side in (first, second)]
    folds = np.asarray(first[0].folds)
    numbers = [np.flatnonzero(folds == fold) for fold in np.unique(folds)]
    found: list[dict[str, NDArray[np.float64]]] = []
    mirrored: list[dict[str, NDArray[np.float64]]] = []
    for number, images in enumerate(numbers):
        queries = {}
        for name, own in values[0][0].items():
            one, two = (np.mean([some[name].values for some in side], axis=0) for side in values)
            inside = np.isin(own.images, images)
            queries[name] = Queries((two - one)[inside], np.searchsorted(images, own.images[inside]))
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


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the variance of a difference, second − first, comes from: queries, and seeds of training.

    With y_ski what image i adds to the metric of seed k of system s, d_i the difference of the means over seeds, N
    images and n_s seeds:

    ============  ==========================================================================================
    ``queries``   N · Var(d_i): images, and the noise of single seeds on single images
    ``seed``      Var(Σ_i y_ski) over the seeds of a system: one seed, with the same noise
    ``cell``      N · Var(y_ski − its mean over seeds − its mean over images): that noise alone, in one seed
    ============  ==========================================================================================

    Var(difference) = queries + (seed − cell) · (1/n_1 + 1/n_2), since the noise is in both. The variance of a seed is
    that of all systems together, with ``freedom`` degrees of freedom: those beyond one seed of each system. With three
    or more, Student's t has the degrees of freedom of Satterthwaite. With two, which two seeds of each side have, that
    gives 7 % of false alarms, since a variance of two seeds is often far too small: p is then that of 2 degrees of
    freedom in the share that seeds have in the variance. With one, the spread of seeds is not known and not counted
    (``freedom`` 0).
    """

    change: float
    images: int
    weight: float  # 1/n_1 + 1/n_2
    queries: float
    seed: float = 0.0
    cell: float = 0.0
    freedom: int = 0

    @staticmethod
    def among(sides: Sequence[NDArray[np.float64]], one: int, other: int) -> Spread:
        """That between two of several systems, each (seeds, N): what every image adds to the metric."""
        images, freedom = sides[0].shape[1], sum(len(side) - 1 for side in sides)
        first, second = sides[one], sides[other]
        change = second.mean(axis=0) - first.mean(axis=0)
        weight, queries = 1 / len(first) + 1 / len(second), images * float(change.var(ddof=1))
        if freedom < 2:
            return Spread(float(change.sum()), images, weight, queries)
        seed = sum(float(((side.sum(axis=1) - side.sum(axis=1).mean()) ** 2).sum()) for side in sides)
        noise = [side - side.mean(axis=1, keepdims=True) - side.mean(axis=0) + side.mean() for side in sides]
        cell = images * sum(float((part**2).sum()) for part in noise) / (images - 1)
        return Spread(float(change.sum()), images, weight, queries, seed / freedom, cell / freedom, freedom)

    def doubt(self) -> Doubt:
        """The interval and p of the difference, over other queries and other seeds, by Student's t."""
        seeds = self.seed * self.weight
        variance = max(self.queries + seeds - self.cell * self.weight, LEAST * self.queries)
        if variance <= ROUNDING**2:
            return Doubt(self.change, self.change, 0.0 if self.change else 1.0)
        tails, _ = _student(self.queries, seeds, variance, self.images, self.freedom)
        error = math.sqrt(variance)
        width = _quantile(tails) * error
        return Doubt(self.change - width, self.change + width, tails(abs(self.change) / error))

    def power(self, gain: float, images: int | None = None, seeds: int | None = None) -> float:
        """The probability to see a gain (p < 0.05), with other numbers of images and of seeds of each side."""
        scale, weight = self.images / (images or self.images), 2 / seeds if seeds else self.weight
        freedom = 2 * (seeds - 1) if seeds else self.freedom
        alone = max(0.0, self.queries - self.cell * self.weight)
        queries = scale * (alone + self.cell * weight)
        seeded = (max(0.0, self.seed - self.cell) + scale * self.cell) * weight
        variance = max(queries + seeded - scale * self.cell * weight, 1e-12)
        tails, freedom_now = _student(
            queries, seeded, variance, images or self.images, freedom if self.freedom else 0
        )
        least = _quantile(tails)  # of t; below the normal approximation of the non-central t
        short = least * (1 - 1 / (4 * freedom_now)) - abs(gain) / math.sqrt(variance)
        return math.erfc(short / math.sqrt(1 + least**2 / (2 * freedom_now)) / math.sqrt(2)) / 2

    def images_for(self, gain: float) -> int | None:
        """The images that show a gain with these seeds; None where no number does."""
        found = bisect_left(range(MOST_IMAGES), POWER, lo=2, key=lambda images: self.power(gain, images))
        return found if found < MOST_IMAGES else None

    def seeds_for(self, gain: float) -> int | None:
        """The seeds of each side that show a gain with these images; None where no number does, or none is known."""
        if not self.freedom:
            return None
        tried = range(MOST_SEEDS + 1)
        found = bisect_left(tried, POWER, lo=ENOUGH, key=lambda seeds: self.power(gain, seeds=seeds))
        return found if found in tried else None


def contributions(one: Outcomes) -> dict[str, NDArray[np.float64]]:
    """What each image adds (N,) to every metric that is a mean over queries: the metric is the sum."""
    folds = np.asarray(one.folds)
    found: dict[str, NDArray[np.float64]] = {}
    for name, queries in per_query(one).items():
        images = queries.images
        sizes = np.bincount(folds[images], minlength=folds.max() + 1)
        share = 1 / (len(sizes) * sizes[folds[images]])
        found[name] = np.bincount(images, share * queries.values, len(folds)).astype(np.float64)
    return with_sums(found)


def unpaired(one: Outcomes) -> dict[str, Spread]:
    """The spread of each metric between this result and another on other queries: an upper bound of a paired one."""
    return {
        name: Spread(0.0, len(adds), 2.0, 2 * len(adds) * float(adds.var(ddof=1)))
        for name, adds in contributions(one).items()
    }


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, by Holm: the k-th smallest of m times m − k + 1, and never decreasing."""
    order = np.argsort(values, kind="stable")
    raised = np.asarray(values)[order] * np.arange(len(values), 0, -1)
    found = np.empty(len(values))
    found[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(p) for p in found]


def _student(
    queries: float, seeds: float, variance: float, images: int, freedom: int
) -> tuple[Callable[[float], float], float]:
    """P(|t| ≥ value) of a difference whose variance has parts of queries and of seeds, and its degrees of freedom."""
    loose = queries**2 / max(1, images - 1) + (seeds**2 / freedom if freedom else 0.0)
    found = variance**2 / max(loose, 1e-300)
    if not 0 < freedom < ENOUGH:
        return lambda t: student_tails(t, found), found
    share = min(1.0, seeds / variance)
    return lambda t: share * student_tails(t, freedom) + (1 - share) * student_tails(t, images - 1), found


def student_tails(t: float, freedom: float) -> float:
    """P(|T| ≥ t) of Student's t: with tan θ = T / √ν its density is proportional to cos^(ν−1) θ."""
    if freedom > MANY:
        return math.erfc(t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)) / math.sqrt(2))
    start = math.atan(t / math.sqrt(freedom))
    half = (math.pi / 2 - start) / 2
    part = half * float(WEIGHTS @ np.cos(start + half * (NODES + 1)) ** (freedom - 1))
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return part / whole


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
def student_quantile(freedom: float) -> float:
    """The t that leaves 5 % on both sides together."""
    return _quantile(lambda t: student_tails(t, freedom))


def _quantile(tails: Callable[[float], float]) -> float:
    """Where 5 % are left, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tails(middle) > 1 - LEVEL else (low, middle)
    return (low + high) / 2


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
