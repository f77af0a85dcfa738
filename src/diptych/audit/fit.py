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
ones look like is not, for the data hold errors: the observed numbers are a mixture (``audit.mixture``). The conditions
of an image are the strength of its prediction, since a picture that tells little fits its own texts little, and the
spread of its texts' products with all pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.audit.mixture import Array, Mixture
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
class SidePair:
    """Two sides whose rows are compared: pictures with texts, or groups of texts with texts."""

    one: Side
    text: Side

    @staticmethod
    def of(one: Matrix, texts: Matrix) -> SidePair:
        """Both sides, each with its background in the other."""
        return SidePair(Side.against(one, texts), Side.against(texts, one))

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

    pictures: SidePair  # with texts
    siblings: SidePair  # all texts of a picture, with texts
    image_of: Rows  # (M,)
    fold_of: Rows  # (N,)
    strength: Matrix  # (N,) the length of a prediction: how sure the picture makes it

    @property
    def images(self) -> int:
        return len(self.fold_of)

    @property
    def counts(self) -> Rows:
        """Texts of each image (N,)."""
        return np.bincount(self.image_of, minlength=self.images)

    def sibling_z(self, instead: Rows | None = None) -> Matrix:
        """Agreement (M,) of each text, or of another ``instead`` of it, with the other texts of its image."""
        text = self.siblings.text
        texts = np.arange(len(self.image_of)) if instead is None else instead
        rest = _sums(text.rows, self.image_of, self.images)[self.image_of] - text.rows
        rest /= np.maximum(np.linalg.norm(rest, axis=1, keepdims=True), 1e-6)
        products = np.einsum("md,md->m", rest, text.rows[texts])
        found = (self.siblings.one.z(products, self.image_of) + text.z(products, texts)) / 2
        return np.asarray(found, np.float32)


def fit_features(x: NDArray[Any], v: NDArray[Any], image_of: Rows, *, seed: int = 0) -> Fit:
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
    return Fit(SidePair.of(_unit(p), u), SidePair.of(groups, u), np.asarray(image_of), fold_of, strength)


def _sums(rows: Matrix, group_of: Rows, groups: int) -> Matrix:
    """The sum of the rows of each group (groups, D)."""
    order = np.argsort(group_of, kind="stable")
    starts = np.searchsorted(group_of[order], np.arange(groups + 1))
    running = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows[order], axis=0, dtype=np.float64)])
    return np.asarray(running[starts[1:]] - running[starts[:-1]], np.float32)


def _unit(rows: Matrix) -> Matrix:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8), np.float32)


ROUNDS, TEXT_ROUNDS = 5, 2  # times that all texts of an image, and every text, are planted
VOTERS = 3  # texts of an image from which on they can outvote one of them


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
    planted = [_of_images(fit, planted_owner(fit.fold_of, rng)) for _ in range(ROUNDS)]
    whole = Mixture(_of_images(fit, np.arange(fit.images)), np.concatenate(planted))
    share, low, high = whole.share()
    # not of the share: where that is 0, probabilities rank all the same
    image = whole.probability((low + high) / 2)
    voting = np.flatnonzero(counts[fit.image_of] >= VOTERS)
    alone, agreement = np.zeros(len(texts)), None
    if len(voting):
        agreement = fit.sibling_z()
        others = [fit.sibling_z(_shuffled(fit, rng))[voting] for _ in range(TEXT_ROUNDS)]
        single = Mixture(agreement[voting, None], np.concatenate(others)[:, None])
        found = single.share()
        alone[voting] = single.probability((found[1] + found[2]) / 2)
        rest = (1 - share) * len(voting) / len(texts)  # a text of a wrong image is wrong already
        more, least, most = (rest * value for value in found)
        low = share + more - np.hypot(share - low, more - least)
        high = share + more + np.hypot(high - share, most - more)
        share += more
    probability = 1 - (1 - alone) * (1 - image[fit.image_of])
    z = fit.pictures.pairs(fit.image_of, texts)
    expected, low, high = (float(np.clip(value, 0, 1)) * len(texts) for value in (share, low, high))
    return Wrong(probability, image, z, agreement, expected, low, high)


def planted_owner(fold_of: Rows, rng: np.random.Generator) -> Rows:
    """For each image, another of its fold, each once: who gets its texts."""
    owner = np.empty(len(fold_of), np.int64)
    for fold in np.unique(fold_of):
        order = rng.permutation(np.flatnonzero(fold_of == fold))
        owner[order] = np.roll(order, 1)
    return owner


def _of_images(fit: Fit, owner: Rows) -> Matrix:
    """The middle z (N, 3) of images with the texts that ``owner`` gives them, with its conditions."""
    image, counts = owner[fit.image_of], fit.counts[np.argsort(owner)]
    z = _middle(fit.pictures.pairs(image, np.arange(len(image))), image, counts)
    spread = np.bincount(image, np.log(fit.pictures.text.spread), len(counts)) / counts
    return np.column_stack([z, np.log(np.maximum(fit.strength, 1e-8)), spread])


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
