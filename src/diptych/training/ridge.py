"""Ridge regression from frozen image features to frozen text vectors: a model in one linear solve.

::

    min over W of  Σ_i ‖(v_i − v̄) − W (x_i − x̄)‖² + λ ‖W‖²
    W = S_vx (S_xx + λ I)⁻¹,   S_xx = Σ_i (x_i − x̄)(x_i − x̄)ᵀ,   S_vx = Σ_i (v_i − v̄)(x_i − x̄)ᵀ
    score(x, v) = cos(M W (x − x̄), M (v − v̄)),   M² ∝ (S_vv + μ I)⁻¹

==========  ==================================================================================================
x_i         what a frozen backbone sees in image i, averaged over its cells (C numbers)
v_i         the mean over the texts t of image i of v_t, what a frozen text encoder makes of t, averaged over
            its tokens (D numbers): an image counts once, however many texts it has
x̄, v̄        their means over the images
λ           ``shrinkage`` · tr(S_xx) / C: 1 shrinks a direction of average spread by half
M           evens out the spread of the texts (S_vv = Σ_t (v_t − v̄)(v_t − v̄)ᵀ / texts of the image), so that what
            every text of the collection shares does not drown what tells them apart
μ           ``flooring`` · tr(S_vv) / D: a large one leaves the texts as they are
n(x), a     with an encoder that names what it sees (``NamedGrid``): the image's vector becomes
            unit(M W (x − x̄)) + a · unit(M (n(x) − n̄)), n(x) the mean of the names' vectors, n̄ its mean over the
            images, a the ``share``
==========  ==================================================================================================

The sums are made in one pass over images and texts, in float64, and take C² + D² numbers whatever the number of images.
One eigendecomposition S_xx = Q diag(e) Qᵀ then gives every λ: W(λ) = S_vx Q diag(1 / (e + λ)) Qᵀ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diptych.data.arrays import ranges, read_items
from diptych.data.images import ImageInput
from diptych.encoders.class_words import NamedGrid
from diptych.errors import DataError, SettingsError
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.retrieval import evaluate_scores
from diptych.model.retriever import Retriever
from diptych.model.scores import EmbeddingScores
from diptych.ops import masked_mean
from diptych.progress import track
from diptych.types import Features, as_inputs

Array = NDArray[np.float64]
Names = Callable[[Array], Array]  # pooled images (n, C) → the mean vectors of their names (n, D)

SHRINKAGES = tuple(10 ** (n / 2) for n in range(-6, 5))  # tried on the validation split
FLOORINGS = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
START_FLOORING = 1.0  # with which the first λ is chosen
ROWS = 256  # images read at a time


class NormalEquations:
    """The sums of one pass; ``add`` takes any number of images at a time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.images = 0
        self.x, self.v = np.zeros(inputs), np.zeros(outputs)
        self.xx, self.xv = np.zeros((inputs, inputs)), np.zeros((inputs, outputs))
        self.vv = np.zeros((outputs, outputs))
        self.named = np.zeros(outputs)

    def add(self, x: Array, v: Array, image_of: NDArray[np.int64], names: Names | None = None) -> None:
        """Images (n, C), texts (m, D), and the row in x of each text (m,); images without a text do not count."""
        texts = np.bincount(image_of, minlength=len(x))
        shared = v / texts[image_of][:, None]  # each image's texts count as one
        means = np.zeros((len(x), v.shape[1]))
        np.add.at(means, image_of, shared)
        seen = x[texts > 0]
        self.images += len(seen)
        self.x += seen.sum(axis=0)
        self.v += means.sum(axis=0)
        self.xx += seen.T @ seen
        self.xv += x.T @ means
        self.vv += shared.T @ v
        if names is not None:
            self.named += names(seen).sum(axis=0)

    @staticmethod
    def summed(parts: Sequence[NormalEquations]) -> NormalEquations:
        """The sums over several passes."""
        total = NormalEquations(len(parts[0].x), len(parts[0].v))
        for part in parts:
            total._gain(part, 1)
        return total

    def without(self, part: NormalEquations) -> NormalEquations:
        """The sums over all images but those of one part."""
        rest = NormalEquations.summed([self])
        rest._gain(part, -1)
        return rest

    def weights(self, shrinkage: float) -> Array:
        """W (D, C) at one λ, by a solve instead of the eigendecomposition that gives every λ."""
        x, v = self.x / self.images, self.v / self.images
        spread = self.xx - self.images * np.outer(x, x)
        least = 1e-9  # pictures that are all the same have no spread
        spread[np.diag_indices_from(spread)] += max(shrinkage * np.trace(spread) / len(x), least)
        found = np.linalg.solve(spread, self.xv - self.images * np.outer(x, v))
        return np.asarray(found.T, np.float64)

    def _gain(self, part: NormalEquations, sign: int) -> None:
        self.images += sign * part.images
        for name in ("x", "v", "xx", "xv", "vv", "named"):
            setattr(self, name, getattr(self, name) + sign * getattr(part, name))

    def solve(self) -> Solutions:
        """The solutions for every λ and μ."""
        if self.images < 2:
            raise DataError("ridge regression needs two or more images with texts: add some.")
        x, v = self.x / self.images, self.v / self.images
        spread, directions = np.linalg.eigh(self.xx - self.images * np.outer(x, x))
        text_spread, text_directions = np.linalg.eigh(self.vv - self.images * np.outer(v, v))
        crossed = directions.T @ (self.xv - self.images * np.outer(x, v))
        return Solutions(
            x, v, np.maximum(spread, 0.0), directions, crossed,
            np.maximum(text_spread, 0.0), text_directions, self.named / self.images,
        )  # fmt: skip


@dataclass(frozen=True)
class Solutions:
    """W(λ) and M(μ) for every λ and μ, from one eigendecomposition each."""

    x: Array  # (C,) x̄
    v: Array  # (D,) v̄
    spread: Array  # (C,) eigenvalues e of S_xx
    directions: Array  # (C, C) Q, one column each
    crossed: Array  # (C, D) Qᵀ S_xv
    text_spread: Array  # (D,)
    text_directions: Array  # (D, D)
    named: Array  # (D,) n̄

    def weights(self, shrinkage: float) -> Array:
        """W (D, C) at λ = shrinkage · tr(S_xx) / C."""
        found: Array = (self.directions * self.shrunk(shrinkage) @ self.crossed).T
        return found

    def shrunk(self, shrinkage: float) -> Array:
        """1 / (e + λ) (C,)."""
        return _inverse(self.spread + shrinkage * self.spread.mean())

    def metric(self, flooring: float) -> Array:
        """M (D, D) at μ = flooring · tr(S_vv) / D, scaled so that it is about 1 for a text of average spread."""
        mean = self.text_spread.mean()
        scale = np.sqrt((1 + flooring) * mean * _inverse(self.text_spread + flooring * mean))
        found: Array = (self.text_directions * scale) @ self.text_directions.T
        return found


@dataclass(frozen=True)
class Choice:
    """The λ, μ (in units of the mean spread) and share of names that the validation split prefers; their RSUM there."""

    shrinkage: float
    flooring: float
    share: float = 0.0
    rsum: float = math.nan


def accumulate(
    data: Prepared, image_input: ImageInput, names: Names | None = None, *, show_progress: bool = False
) -> NormalEquations:
    """The sums over all pairs of prepared data, whose images and texts must be frozen features."""
    equations: NormalEquations | None = None
    for x, v, image_of in pooled_pairs(data, image_input, show_progress=show_progress):
        equations = equations or NormalEquations(x.shape[1], v.shape[1])
        equations.add(x, v, image_of, names)
    if equations is None:
        raise DataError(f"{data.captions.name} has no images to learn from: check its path.")
    return equations


def pooled_pairs(
    data: Prepared, image_input: ImageInput, *, show_progress: bool = False
) -> Iterator[tuple[Array, Array, NDArray[np.int64]]]:
    """Blocks of images (n, C) with their texts (m, D) and the row of each text's image; every pair once."""
    images, image_of = data.captions.images, np.asarray(data.captions.image_of, dtype=np.int64)
    unreadable: Mapping[int, str] = getattr(images, "unreadable", {})
    order = np.argsort(image_of, kind="stable")
    ends = np.searchsorted(image_of[order], np.arange(len(images) + 1))
    for rows in track(ranges(0, len(images), ROWS), "ridge regression", show=show_progress):
        texts = order[ends[rows.start] : ends[rows.stop]]
        texts = texts[~np.isin(image_of[texts], list(unreadable))]
        x = _pooled(as_inputs(image_input(read_items(images, np.asarray(rows)))))
        found = as_inputs(data.texts.collate(texts.tolist())) if len(texts) else None
        v = np.zeros((0, data.texts.collate([0]).values.shape[-1])) if found is None else _pooled(found)
        yield x, v, image_of[texts] - rows.start


def choose(
    solutions: Solutions,
    validation: Prepared,
    image_input: ImageInput,
    names: Names | None = None,
    *,
    shrinkage: float | None = None,
    flooring: float | None = None,
) -> Choice:
    """The best λ, μ and share of names by RSUM on the validation split; those that are given stay.

    One after the other: λ at a middling μ, μ at that λ, λ again, the share, and λ once more.
    """
    pairs = list(pooled_pairs(validation, image_input))
    counts = np.cumsum([0] + [len(x) for x, _, _ in pairs])
    x = np.concatenate([x for x, _, _ in pairs])
    v = np.concatenate([v for _, v, _ in pairs]) - solutions.v
    image_of = np.concatenate([of + count for (_, _, of), count in zip(pairs, counts, strict=False)])
    if not len(v):
        raise SettingsError("no validation text to choose λ with: give --shrinkage and --flooring.")
    named = None if names is None else names(x) - solutions.named
    rotated = (x - solutions.x) @ solutions.directions  # (n, C)

    def choice(shrinkage: float, flooring: float, share: float) -> Choice:
        metric = solutions.metric(flooring)
        image = _unit(rotated * solutions.shrunk(shrinkage) @ (solutions.crossed @ metric))
        if named is not None:
            image = _unit(image + share * _unit(named @ metric))
        text = _unit(v @ metric)
        scores = EmbeddingScores(torch.from_numpy(image).float(), torch.from_numpy(text).float())
        rsum = evaluate_scores(scores, image_of, bootstrap=0).metrics["rsum"]
        return Choice(shrinkage, flooring, share, rsum)

    def best(shrinkages: Sequence[float], floorings: Sequence[float], shares: Sequence[float]) -> Choice:
        tried = (choice(*values) for values in itertools.product(shrinkages, floorings, shares))
        return max(tried, key=lambda found: found.rsum)

    every = SHRINKAGES if shrinkage is None else (shrinkage,)
    found = best(every, [START_FLOORING if flooring is None else flooring], [0.0])
    if flooring is None:
        found = best([found.shrinkage], FLOORINGS, [0.0])
        found = best(every, [found.flooring], [0.0])
    if named is not None:
        found = best([found.shrinkage], [found.flooring], SHARES)
        found = best(every, [found.flooring], [found.share])
    return found


@dataclass(frozen=True)
class Ridge:
    """Solves the linear layers of a retriever: pooled frozen features of images → vectors of a frozen text encoder.

    ``shrinkage`` and ``flooring`` (λ and μ, in units of the mean spread) are chosen on the validation split where they
    are None. An image encoder that names what it sees gets its share of names in the same way.
    """

    shrinkage: float | None = None
    flooring: float | None = None

    def __call__(
        self,
        retriever: Retriever,
        training: Prepared,
        validation: Prepared | None,
        *,
        show_progress: bool = False,
    ) -> Mapping[str, float]:
        """Set the layers ``linear`` of both encoders; returns λ, μ and the share of names."""
        image, text = retriever.image.encoder, retriever.text.encoder
        names = names_of(image) if isinstance(image, NamedGrid) else None
        solutions = accumulate(training, retriever.image_input, names, show_progress=show_progress).solve()
        if validation is not None:
            choice = choose(
                solutions, validation, retriever.image_input, names,
                shrinkage=self.shrinkage, flooring=self.flooring,
            )  # fmt: skip
        elif self.shrinkage is None or self.flooring is None:
            raise SettingsError("no validation split chooses λ and μ: give --shrinkage and --flooring.")
        else:
            choice = Choice(self.shrinkage, self.flooring)
        metric = solutions.metric(choice.flooring)
        weights = metric @ solutions.weights(choice.shrinkage)
        _set(image.linear, weights, -weights @ solutions.x)
        _set(text.linear, metric, -metric @ solutions.v)
        if isinstance(image, NamedGrid):
            words = image.words.weight.detach().double().cpu().numpy()
            _set(image.words, metric @ words, -metric @ solutions.named)
            image.share.fill_(choice.share)
        return {"shrinkage": choice.shrinkage, "flooring": choice.flooring, "share": choice.share}


def names_of(encoder: NamedGrid) -> Names:
    """The mean vectors of the names that an encoder sees in pooled images, in the space of the texts."""

    @torch.no_grad()
    def named(x: Array) -> Array:
        device = encoder.classifier.weight.device
        shares = encoder.probabilities(torch.from_numpy(x).float().to(device))
        found: Array = (shares @ encoder.words.weight.T).double().cpu().numpy()
        return found

    return named


def _set(linear: Tensor | nn.Module, weight: Array, bias: Array) -> None:
    assert isinstance(linear, nn.Linear)
    if linear.weight.shape != weight.shape:
        raise SettingsError(
            f"ridge regression maps {weight.shape[1]} to {weight.shape[0]} numbers, the layer {linear.in_features} to "
            f"{linear.out_features}: build the model with that width."
        )
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight))
        linear.bias.copy_(torch.from_numpy(bias))


def _pooled(inputs: Tensor | Features) -> Array:
    """The mean of each set (n, L, C) → (n, C)."""
    if not isinstance(inputs, Features) or inputs.is_ids:
        raise DataError("ridge regression reads features, not pictures or words: freeze both encoders.")
    mean: Array = masked_mean(inputs.values.float(), inputs.mask).double().numpy()
    return mean


def _unit(rows: Array) -> Array:
    """Rows of unit length; a zero row stays zero."""
    scaled: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)
    return scaled


def _inverse(values: Array) -> Array:
    """1 / values, and 0 where a value is 0: directions without any spread stay out."""
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)
