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
==========  ==================================================================================================

The sums are made in one pass over images and texts, in float64, and take C² + D² numbers whatever the number of images.
One eigendecomposition S_xx = Q diag(e) Qᵀ then gives every λ: W(λ) = S_vx Q diag(1 / (e + λ)) Qᵀ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diptych.data.arrays import read_items
from diptych.data.images import ImageInput
from diptych.data.prepared import Prepared
from diptych.errors import DataError, SettingsError
from diptych.evaluation.retrieval import evaluate_scores
from diptych.ops import masked_mean, unit
from diptych.progress import track
from diptych.retriever import Retriever
from diptych.scores import EmbeddingScores
from diptych.types import Features

Array = NDArray[np.float64]

SHRINKAGES = tuple(10 ** (n / 2) for n in range(-6, 5))  # tried on the validation split
FLOORINGS = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
START_FLOORING = 1.0  # with which the first λ is chosen
ROWS = 256  # images read at a time


class NormalEquations:
    """The sums of one pass; ``add`` takes any number of images at a time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.images = 0
        self.x, self.v = np.zeros(inputs), np.zeros(outputs)
        self.xx, self.xv = np.zeros((inputs, inputs)), np.zeros((inputs, outputs))
        self.vv = np.zeros((outputs, outputs))

    def add(self, x: Array, v: Array, image_of: NDArray[np.int64]) -> None:
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

    def solved(self) -> Solutions:
        """The solutions for every λ and μ."""
        if self.images < 2:
            raise DataError(
                "ridge regression needs at least two images with texts: add some, or use a model as it is."
            )
        x, v = self.x / self.images, self.v / self.images
        spread, directions = np.linalg.eigh(self.xx - self.images * np.outer(x, x))
        text_spread, text_directions = np.linalg.eigh(self.vv - self.images * np.outer(v, v))
        crossed = directions.T @ (self.xv - self.images * np.outer(x, v))
        return Solutions(
            x, v, np.maximum(spread, 0.0), directions, crossed, np.maximum(text_spread, 0.0), text_directions
        )


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

    def weights(self, shrinkage: float) -> Array:
        """W (D, C) at λ = shrinkage · tr(S_xx) / C."""
        shrunk = _inverse(self.spread + shrinkage * self.spread.mean())
        found: Array = (self.directions @ (shrunk[:, None] * self.crossed)).T
        return found

    def metric(self, flooring: float) -> Array:
        """M (D, D) at μ = flooring · tr(S_vv) / D, scaled so that it is about 1 for a text of average spread."""
        mean = self.text_spread.mean()
        scale = np.sqrt((1 + flooring) * mean * _inverse(self.text_spread + flooring * mean))
        found: Array = (self.text_directions * scale) @ self.text_directions.T
        return found


@dataclass(frozen=True)
class Choice:
    """The λ and μ that the validation split prefers, in units of the mean spread, and their RSUM there."""

    shrinkage: float
    flooring: float
    rsum: float


def accumulate(data: Prepared, image_input: ImageInput, *, show_progress: bool = False) -> NormalEquations:
    """The sums over all pairs of prepared data, whose images and texts must be frozen features."""
    equations: NormalEquations | None = None
    for x, v, image_of in pooled_pairs(data, image_input, show_progress=show_progress):
        equations = equations or NormalEquations(x.shape[1], v.shape[1])
        equations.add(x, v, image_of)
    if equations is None:
        raise DataError(f"{data.captions.name} has no images to learn from.")
    return equations


def pooled_pairs(
    data: Prepared, image_input: ImageInput, *, show_progress: bool = False
) -> Iterator[tuple[Array, Array, NDArray[np.int64]]]:
    """Blocks of images (n, C) with their texts (m, D) and the row of each text's image; every pair once."""
    images, image_of = data.captions.images, np.asarray(data.captions.image_of, dtype=np.int64)
    unreadable: Mapping[int, str] = getattr(images, "unreadable", {})
    order = np.argsort(image_of, kind="stable")
    ends = np.searchsorted(image_of[order], np.arange(len(images) + 1))
    starts = range(0, len(images), ROWS)
    for start in track(starts, "ridge regression", len(starts), show_progress):
        stop = min(start + ROWS, len(images))
        rows = np.arange(start, stop)
        texts = order[ends[start] : ends[stop]]
        texts = texts[~np.isin(image_of[texts], list(unreadable))]
        x = _pooled(image_input(read_items(images, rows)))
        v = _pooled(data.texts.collate(texts.tolist())) if len(texts) else np.zeros((0, _width(data)))
        yield x, v, image_of[texts] - start


def choose(
    solutions: Solutions,
    validation: Prepared,
    image_input: ImageInput,
    *,
    shrinkage: float | None = None,
    flooring: float | None = None,
) -> Choice:
    """The best λ and μ by RSUM on the validation split; those that are given stay.

    One after the other: λ at a middling μ, μ at that λ, and λ once more.
    """
    pairs = list(pooled_pairs(validation, image_input))
    counts = np.cumsum([0] + [len(x) for x, _, _ in pairs])
    x = np.concatenate([x for x, _, _ in pairs]) - solutions.x
    v = np.concatenate([v for _, v, _ in pairs]) - solutions.v
    image_of = np.concatenate([of + count for (_, _, of), count in zip(pairs, counts, strict=False)])
    if not len(v):
        raise SettingsError(
            "the validation split has no texts to choose λ with: give --shrinkage and --flooring."
        )

    def judged(shrinkage: float, flooring: float) -> Choice:
        metric = solutions.metric(flooring)
        image = unit(torch.from_numpy(x @ solutions.weights(shrinkage).T @ metric).float())
        text = unit(torch.from_numpy(v @ metric).float())
        report = evaluate_scores(EmbeddingScores(image, text), image_of, bootstrap=0)
        return Choice(shrinkage, flooring, report.metrics["rsum"])

    def best(shrinkages: tuple[float, ...], floorings: tuple[float, ...]) -> Choice:
        return max((judged(s, f) for s in shrinkages for f in floorings), key=lambda found: found.rsum)

    every = SHRINKAGES if shrinkage is None else (shrinkage,)
    found = best(every, (START_FLOORING if flooring is None else flooring,))
    if flooring is None:
        found = best((found.shrinkage,), FLOORINGS)
        found = best(every, (found.flooring,))
    return found


@dataclass(frozen=True)
class Ridge:
    """Solves the linear layers of a retriever: pooled frozen features of images → vectors of a frozen text encoder.

    ``shrinkage`` and ``flooring`` (λ and μ, in units of the mean spread) are chosen on the validation split where they
    are None.
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
        """Set the image encoder's and the text encoder's ``linear``; returns λ, μ and the RSUM they were chosen by."""
        solutions = accumulate(training, retriever.image_input, show_progress=show_progress).solved()
        if self.shrinkage is not None and self.flooring is not None:
            choice = Choice(self.shrinkage, self.flooring, float("nan"))
        elif validation is None:
            raise SettingsError(
                "without a validation split nothing chooses λ and μ: give --shrinkage and --flooring."
            )
        else:
            choice = choose(
                solutions, validation, retriever.image_input,
                shrinkage=self.shrinkage, flooring=self.flooring,
            )  # fmt: skip
        metric = solutions.metric(choice.flooring)
        weights = metric @ solutions.weights(choice.shrinkage)
        _set(retriever.image.encoder.linear, weights, -weights @ solutions.x)
        _set(retriever.text.encoder.linear, metric, -metric @ solutions.v)
        return {"shrinkage": choice.shrinkage, "flooring": choice.flooring}


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
        raise DataError(
            "ridge regression reads frozen features, not pictures or words: freeze both encoders."
        )
    mean: Array = masked_mean(inputs.values.float(), inputs.mask).double().numpy()
    return mean


def _width(data: Prepared) -> int:
    return int(data.texts.collate([0]).values.shape[-1])


def _inverse(values: Array) -> Array:
    """1 / values, and 0 where a value is 0: directions without any spread stay out."""
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)
