"""Wrong pairs: a probability for each, and how many there are, by comparison with errors that are planted.

A text may be wrong alone, which the other texts of its image show, or all texts of an image may be wrong, which only
the picture shows. Both are told by one number per text or image: the agreement with the siblings, and the middle of
the z of an image's texts (the mean without the least and the greatest, so that one wrong text does not move it).

What wrong ones look like is known: errors are planted, by giving texts to other images of the same fold. What right
ones look like is not, for the data hold errors. So the observed numbers are taken for a mixture,

    observed = π · planted + (1 − π) · right,   right: normal, with a spread of its own on either side

whose π and right side EM finds. Images are treated in strata of the strength of their predictions, since a picture
that tells little fits its own texts little. A few right pairs look as wrong as any: their share, seen on one data set
(docs/audit.md), is subtracted, and keeps a probability from being certain where errors are rare. The interval comes
from resampling and from what is not known of these constants. A second planting, of a known share into the observed
numbers, says by how much the estimate overstates a share, and corrects it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.audit.fit import Fit, Matrix, Rows

Array = NDArray[np.float64]

BINS = 128
ROUNDS = 5  # times that every text is planted
DRAWS = 60  # resamples of the interval
STRATUM = 700  # images of a stratum, at least
STRATA = 8
VOTERS = 3  # texts of an image from which on they can outvote one of them
SECOND = 0.1  # share of the second planting
PLANTINGS = 4
HARD_IMAGES, HARD_TEXTS = 0.004, 0.0005  # right ones that look as wrong as planted ones: seen on Flickr8k
LEAST = 1e-4  # share from which probabilities are made where nothing seems wrong: they still rank
UNSURE = 0.07  # relative error of the shape of the right pairs that no resampling shows


@dataclass(frozen=True)
class Wrong:
    """For each text, the probability that its pair is wrong and what speaks for it; the number expected of all."""

    probability: Array  # (M,)
    image: Array  # (N,) that all texts of an image are wrong
    z: Matrix  # (M,) picture and text
    agreement: Matrix | None  # (M,) with the siblings; None where no image has enough
    expected: float
    low: float
    high: float


def find_wrong(fit: Fit, *, seed: int = 0) -> Wrong:
    """Judge every pair."""
    rng = np.random.default_rng(seed)
    texts, counts = np.arange(len(fit.image_of)), fit.counts
    z = fit.seen.pairs(fit.image_of, texts)
    planted = np.stack([_planted_images(fit, rng) for _ in range(ROUNDS)])
    strata = _strata(fit.strength)
    whole = _mixed(
        _middle(z, fit.image_of, counts), planted, strata, counts.astype(np.float64), HARD_IMAGES, rng
    )
    voting = np.flatnonzero(counts[fit.image_of] >= VOTERS)
    alone, agreement = np.zeros(len(texts)), None
    draws, expected = whole.draws, whole.number
    if len(voting):
        agreement = fit.sibling_z()
        others = np.stack([fit.sibling_z(_shuffled(fit, rng))[voting] for _ in range(2)])
        single = _mixed(
            agreement[voting], others, np.zeros(len(voting), int), np.ones(len(voting)), HARD_TEXTS, rng
        )
        alone[voting] = single.probability
        rest = 1 - whole.number / len(texts)  # a text of a wrong image is wrong already
        draws, expected = draws + single.draws * rest, expected + single.number * rest
    half = 1.96 * float(np.sqrt(np.var(draws) + (UNSURE * expected) ** 2))
    probability = 1 - (1 - alone) * (1 - whole.probability[fit.image_of])
    low, high = max(0.0, expected - half), min(float(len(texts)), expected + half)
    return Wrong(probability, whole.probability, z, agreement, expected, low, high)


def planted_owner(fold_of: Rows, rng: np.random.Generator) -> Rows:
    """For each image, another of its fold, each once: who gets its texts."""
    owner = np.empty(len(fold_of), np.int64)
    for fold in np.unique(fold_of):
        order = rng.permutation(np.flatnonzero(fold_of == fold))
        owner[order] = np.roll(order, 1)
    return owner


@dataclass(frozen=True)
class _Mixture:
    """A probability for each observed number, and how many texts are wrong in all."""

    probability: Array
    number: float
    draws: Array  # (DRAWS,) the same number, resampled


def _mixed(
    seen: Matrix, planted: Matrix, strata: Rows, weights: Array, hard: float, rng: np.random.Generator
) -> _Mixture:
    """Take observed numbers (n,) for a mixture in each stratum; ``planted`` is (rounds, n), weights count texts."""
    total, number, draws = float(weights.sum()), 0.0, np.zeros(DRAWS)
    parts = []
    for stratum in np.unique(strata):
        rows = np.flatnonzero(strata == stratum)
        bins = _Bins.of(seen[rows], planted[:, rows])
        share, right = bins.separated(bins.observed)
        resampled = [bins.separated(rng.poisson(bins.observed), share, 60)[0] for _ in range(DRAWS)]
        slope, texts = bins.slope(seen[rows], planted[:, rows], share, rng), float(weights[rows].sum())
        number += share / slope * texts
        draws += np.array(resampled) / slope * texts
        parts.append((rows, bins, right))
    net = max(0.0, number - hard * total)
    draws += rng.normal(0, hard * total / 2, DRAWS)  # the share of hard pairs is known by half
    probability = np.zeros(len(seen))
    for rows, bins, right in parts:  # one share for all: what is wrong does not depend on the stratum
        probability[rows] = bins.odds(max(net / total, LEAST), right, hard)(seen[rows])
    return _Mixture(probability, net, draws)


@dataclass(frozen=True)
class _Bins:
    """Observed and planted numbers, counted in bins."""

    centres: Array
    edges: Array
    observed: Array
    wrong: Array  # share of planted numbers in each bin

    @staticmethod
    def of(seen: Matrix, planted: Matrix) -> _Bins:
        low, high = min(seen.min(), planted.min()) - 1e-3, max(seen.max(), planted.max()) + 1e-3
        observed, edges = np.histogram(seen, BINS, (low, high))
        counted = np.histogram(planted, edges)[0].astype(np.float64)
        kernel = np.exp(-0.5 * (np.arange(-9, 10) / 3) ** 2)
        smooth = np.convolve(counted, kernel / kernel.sum(), "same") + 1e-3
        return _Bins((edges[1:] + edges[:-1]) / 2, edges, observed.astype(np.float64), smooth / smooth.sum())

    def separated(self, observed: NDArray[Any], share: float = 0.1, steps: int = 300) -> tuple[float, Array]:
        """The share of wrong ones, by EM, and the shape of the right ones."""
        total, share = max(float(observed.sum()), 1.0), max(share, 0.005)
        right = self._normal(np.maximum(observed - share * total * self.wrong, 0))
        for _ in range(steps):
            mix = np.maximum(share * self.wrong + (1 - share) * right, 1e-300)
            kept = observed * ((1 - share) * right / mix)
            before, share = share, float(1 - kept.sum() / total)
            right = self._normal(kept)
            if abs(share - before) < 1e-5:
                break
        return share, right

    def slope(self, seen: Matrix, planted: Matrix, share: float, rng: np.random.Generator) -> float:
        """By how much the estimate grows for each wrong one that is planted among the observed."""
        grown = []
        for turn in range(PLANTINGS):
            swapped = np.where(rng.random(len(seen)) < SECOND, planted[turn % len(planted)], seen)
            more, _ = self.separated(np.histogram(swapped, self.edges)[0].astype(np.float64), share)
            grown.append((more - share) / (SECOND * (1 - share)))
        return float(np.clip(np.mean(grown), 0.8, 1.5))

    def odds(self, share: float, right: Array, hard: float) -> Callable[[Matrix], Array]:
        """The probability that a number is a wrong one's; never higher for a better number."""
        right = (1 - hard) * right + hard * self.wrong
        mix = np.maximum(share * self.wrong + (1 - share) * right, 1e-300)
        falling = np.maximum.accumulate((share * self.wrong / mix)[::-1])[::-1]
        return lambda numbers: np.interp(numbers, self.centres, falling)

    def _normal(self, counts: Array) -> Array:
        """The likeliest normal shape, with a spread on each side of its peak, of counts in bins."""
        c, total = self.centres, max(float(counts.sum()), 1e-9)
        zero, one, two = (np.concatenate([[0.0], np.cumsum(counts * c**power)]) for power in range(3))
        left = np.maximum(two[:-1] - 2 * c * one[:-1] + c**2 * zero[:-1], 1e-9)
        right = np.maximum(two[-1] - 2 * c * one[-1] + c**2 * zero[-1] - left, 1e-9)
        sums = np.cbrt(left) + np.cbrt(right)
        peak = int(sums.argmin())
        spreads = [
            max(np.sqrt(side[peak] ** (2 / 3) * sums[peak] / total), c[1] - c[0]) for side in (left, right)
        ]
        shape = np.exp(-0.5 * ((c - c[peak]) / np.where(c < c[peak], *spreads)) ** 2)
        found: Array = shape / shape.sum()
        return found


def _planted_images(fit: Fit, rng: np.random.Generator) -> Matrix:
    owner = planted_owner(fit.fold_of, rng)[fit.image_of]
    return _middle(
        fit.seen.pairs(owner, np.arange(len(owner))), owner, np.bincount(owner, minlength=fit.images)
    )


def _shuffled(fit: Fit, rng: np.random.Generator) -> Rows:
    """A text of another image of the same fold in the place of each text."""
    instead = np.empty(len(fit.image_of), np.int64)
    fold_of = fit.fold_of[fit.image_of]
    for fold in np.unique(fold_of):
        rows = np.flatnonzero(fold_of == fold)
        order = rows[np.argsort(rng.permutation(fit.images)[fit.image_of[rows]], kind="stable")]
        instead[order] = np.roll(order, int(fit.counts.max()))  # further than the texts of one image
    return instead


def _middle(z: Matrix, image_of: Rows, counts: Rows) -> Matrix:
    """The mean z of each image's texts, without the least and the greatest where there are enough."""
    order = np.lexsort((z, image_of))
    starts = np.cumsum(counts) - counts
    place, many = np.arange(len(z)) - starts[image_of[order]], counts[image_of[order]]
    kept = order[(many < VOTERS) | ((place > 0) & (place < many - 1))]
    used = np.maximum(np.bincount(image_of[kept], minlength=len(counts)), 1)
    return np.asarray(np.bincount(image_of[kept], z[kept], len(counts)) / used, np.float32)


def _strata(strength: Matrix) -> Rows:
    count = int(np.clip(len(strength) // STRATUM, 1, STRATA))
    return np.argsort(np.argsort(strength)) * count // len(strength)
