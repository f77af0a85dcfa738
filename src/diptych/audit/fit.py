"""How well pictures and texts fit each other: out-of-fold ridge regression on frozen features.

::

    p_i = unit(W_f (x_i − x̄_f)),  W_f solved without the fold f of image i        u_t = unit(v_t − v̄)
    z(i, t) = ½ (p_i·u_t − μ_i) / σ_i + ½ (p_i·u_t − μ_t) / σ_t

μ_i, σ_i are the mean and spread of p_i·u over all texts u (the background of the picture), μ_t, σ_t those of p·u_t over
all pictures p (the background of the text): a picture of a crowd fits everything a little, and so does "a man". Both
follow from the mean and covariance of the other side, so no pair is sampled.

The agreement of a text with other texts is the same z, with the mean of these texts in the place of p_i.
"""

from __future__ import annotations

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
