"""How well pictures and texts fit each other: out-of-fold ridge regression on frozen features.

::

    p_i = unit(W_f (x_i − x̄_f)),  W_f solved without the fold f of image i        u_t = unit(v_t − v̄)
    z(i, t) = ½ (p_i·u_t − μ_i) / σ_i + ½ (p_i·u_t − μ_t) / σ_t

μ_i, σ_i are the mean and spread of p_i·u over all texts u (the background of the picture), μ_t, σ_t those of p·u_t over
all pictures p (the background of the text): a picture of a crowd fits everything a little, and so does "a man". Both
follow from the mean and covariance of the other side, so no pair is sampled.

The agreement of a text with other texts is the same z, with the mean of these texts in the place of p_i.

Wrong pairs: a probability for each, and how many there are, by comparison with errors that are planted.

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

from diptych.training.ridge import NormalEquations

Rows = NDArray[np.int64]
Matrix = NDArray[np.float32]

FOLDS = 5
SHRINKAGE = 0.3  # λ in units of the mean spread of a feature
CHUNK = 512  # texts compared with all pictures at a time


@dataclass(frozen=True)
class Side:
    """Unit rows (n, D), with the mean and spread of their products with all rows of the other side."""

    rows: Matrix
    mean: Matrix  # (n,)
    spread: Matrix  # (n,)

    @staticmethod
    def against(rows: Matrix, others: Matrix) -> Side:
        """The background of rows in the other side's rows."""
        centre = others.mean(axis=0)
        covariance = (others.T @ others) / len(others) - np.outer(centre, centre)
        variance = np.einsum("nd,nd->n", rows @ covariance, rows)
        return Side(rows, rows @ centre, np.sqrt(np.maximum(variance, 1e-12)))

    def z(self, products: Matrix, which: Rows | slice) -> Matrix:
        """Products with these rows, in units of their background."""
        found: Matrix = (products - self.mean[which]) / self.spread[which]
        return found


@dataclass(frozen=True)
class Sides:
    """Two sides whose rows are compared: pictures with texts, or groups of texts with texts."""

    one: Side
    text: Side

    @staticmethod
    def of(one: Matrix, texts: Matrix) -> Sides:
        """Both sides, each with its background in the other."""
        return Sides(Side.against(one, texts), Side.against(texts, one))

    def pairs(self, which: Rows, texts: Rows) -> Matrix:
        """z (P,) of pairs."""
        products = np.einsum("pd,pd->p", self.one.rows[which], self.text.rows[texts])
        return np.asarray((self.one.z(products, which) + self.text.z(products, texts)) / 2, np.float32)

    def block(self, texts: slice) -> Matrix:
        """z (n, N) of some texts with everything."""
        products = self.text.rows[texts] @ self.one.rows.T
        found: Matrix = self.one.z(products, slice(None)) + self.text.z(products.T, texts).T
        found /= 2
        return found


@dataclass(frozen=True)
class Fit:
    """Pictures and texts that can be compared; ``fold_of`` (N,) are the folds that predictions left out."""

    seen: Sides  # pictures with texts
    said: Sides  # all texts of a picture with texts
    image_of: Rows  # (M,)
    fold_of: Rows  # (N,)
    strength: Matrix  # (N,) the length of a prediction: how sure the picture makes it

    @property
    def images(self) -> int:
        """How many images there are."""
        return len(self.fold_of)

    @property
    def counts(self) -> Rows:
        """Texts of each image (N,)."""
        return np.bincount(self.image_of, minlength=self.images)

    def sibling_z(self, instead: Rows | None = None) -> Matrix:
        """Agreement (M,) of each text, or of another ``instead`` of it, with the other texts of its image."""
        text = self.said.text
        chosen = np.arange(len(self.image_of)) if instead is None else instead
        rest = _sums(text.rows, self.image_of, self.images)[self.image_of] - text.rows
        rest /= np.maximum(np.linalg.norm(rest, axis=1, keepdims=True), 1e-6)
        products = np.einsum("md,md->m", rest, text.rows[chosen])
        found = (self.said.one.z(products, self.image_of) + text.z(products, chosen)) / 2
        return np.asarray(found, np.float32)


def fitted(x: NDArray[Any], v: NDArray[Any], image_of: Rows, *, seed: int = 0) -> Fit:
    """The fit of features of images (N, C) and vectors of texts (M, D) by ridge regression in folds."""
    fold_of = np.random.default_rng(seed).permutation(len(x)) % FOLDS
    parts = [NormalEquations(x.shape[1], v.shape[1]) for _ in range(FOLDS)]
    for fold, part in enumerate(parts):
        images, texts = np.flatnonzero(fold_of == fold), np.flatnonzero(fold_of[image_of] == fold)
        part.add(
            x[images].astype(np.float64),
            v[texts].astype(np.float64),
            np.searchsorted(images, image_of[texts]),
        )
    total = NormalEquations.summed(parts)
    predicted = np.zeros((len(x), v.shape[1]), np.float32)
    for fold, part in enumerate(parts):
        images, rest = np.flatnonzero(fold_of == fold), total.without(part)
        predicted[images] = (x[images] - rest.x / rest.images) @ rest.weights(SHRINKAGE).T
    return compared(predicted, v - total.v / total.images, image_of, fold_of)


def compared(images: NDArray[Any], texts: NDArray[Any], image_of: Rows, fold_of: Rows) -> Fit:
    """The fit of vectors of images and of texts that lie in one space already, both centred."""
    u = _unit(np.asarray(texts, np.float32))
    groups = _unit(_sums(u, image_of, len(images)))
    p = np.asarray(images, np.float32)
    strength = np.linalg.norm(p, axis=1)
    return Fit(Sides.of(_unit(p), u), Sides.of(groups, u), np.asarray(image_of), fold_of, strength)


def _sums(rows: Matrix, group_of: Rows, groups: int) -> Matrix:
    """The sum of the rows of each group (groups, D)."""
    order = np.argsort(group_of, kind="stable")
    starts = np.searchsorted(group_of[order], np.arange(groups + 1))
    running = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows[order], axis=0, dtype=np.float64)])
    return np.asarray(running[starts[1:]] - running[starts[:-1]], np.float32)


def _unit(rows: Matrix) -> Matrix:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8), np.float32)


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
