"""Where scores come from: tiles of the (images, texts) matrix, computed on request and never held whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from diptych.devices import autocast
from diptych.errors import DataError
from diptych.interaction.similarity import PairScorer
from diptych.types import Ragged

Where = slice | Tensor
"""Rows or columns: a slice, or their numbers (int64, on the device of the scores)."""

LEAST = 64  # rows of either side in one product, see EmbeddingScores


class evaluating:  # noqa: N801  a context manager, used like a function
    """Put a module in evaluation mode for a while, and every submodule back as it was."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, [part for part in module.modules() if part.training]

    def __enter__(self) -> nn.Module:
        # a part that is told its mode forgets what it remembers
        return self.module.eval() if self.training else self.module

    def __exit__(self, *_: object) -> None:
        for part in self.training:
            part.training = True


class Scores(Protocol):
    """Scores of N images against M texts: all that a pair scorer or a re-ranker needs to be evaluated."""

    @property
    def kind(self) -> str:
        """What a score is, for the card of a report: ``dot``, ``matrix``, ..."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""

    @property
    def device(self) -> torch.device:
        """Where tiles are computed."""

    def tile(self, images: Where, texts: Where) -> Tensor:
        """The scores of some images against some texts, float32 or float64."""


class EmbeddingScores:
    """Dot products of encoded vectors, (N, D) and (M, D).

    Equal vectors must get equal scores, or rounding would decide ties. A matrix product gives an entry the
    same bits wherever it stands, unless the shape falls to the kernels for small matrices: short sides are
    therefore filled with zeros up to ``LEAST`` rows, and the products run in full float32, outside autocast.
    """

    kind = "dot"

    def __init__(
        self, image: Tensor, text: Tensor, encode_seconds: tuple[float, float] | None = None
    ) -> None:
        self.encode_seconds = encode_seconds
        if image.dim() != 2 or text.dim() != 2 or image.shape[1] != text.shape[1]:
            raise DataError(
                f"image vectors {tuple(image.shape)} and text vectors {tuple(text.shape)} do not go "
                "together: encode both with one model, as (N, D) and (M, D)."
            )
        if image.device != text.device:
            raise DataError(f"image vectors on {image.device}, texts on {text.device}: move them together.")
        self.shape, self.device = (len(image), len(text)), image.device
        self.image, self.text = (_precise(side.detach()) for side in (image, text))
        if self.image.dtype != self.text.dtype:
            self.image, self.text = self.image.double(), self.text.double()
        for name, side in (("image", self.image), ("text", self.text)):
            wrong = torch.nonzero(~torch.isfinite(side).all(dim=1))
            if len(wrong):
                raise DataError(
                    f"the vector of {name} {int(wrong[0])} is not finite ({len(wrong)} such {name}s): "
                    "the model has diverged, or the input of this item is broken."
                )

    def tile(self, images: Where, texts: Where) -> Tensor:
        rows, columns = self.image[images], self.text[texts]
        n, m = len(rows), len(columns)
        with full_precision(self.device):
            return (_at_least(rows) @ _at_least(columns).T)[:n, :m]


class PairScores:
    """Scores of a pair scorer, computed from the local features of both sides whenever a tile is asked for."""

    def __init__(
        self,
        scorer: PairScorer,
        images: Ragged,
        texts: Ragged,
        device: torch.device,
        precision: str = "no",
        encode_seconds: tuple[float, float] | None = None,
    ) -> None:
        # on a GPU the features of a collection are sent once, not with every tile
        self.scorer, self.images, self.texts = scorer, images.near(device), texts.near(device)
        self.device, self.precision, self.encode_seconds = device, precision, encode_seconds
        self.kind, self.shape = scorer.kind, (len(images), len(texts))

    def tile(self, images: Where, texts: Where) -> Tensor:
        rows, columns = _numbers(images, len(self.images)), _numbers(texts, len(self.texts))
        if not len(rows) or not len(columns):
            return torch.zeros(len(rows), len(columns), device=self.device)
        with torch.inference_mode(), evaluating(self.scorer), autocast(self.device, self.precision):
            return _precise(self.judged(rows, columns))

    def judged(self, rows: Tensor, columns: Tensor) -> Tensor:
        """What the scorer says of some images beside some texts, as it is."""
        found: Tensor = self.scorer(
            self.images.take(rows).to(self.device), self.texts.take(columns).to(self.device)
        )
        return found


class MatrixScores:
    """A score matrix that exists already, (N, M)."""

    kind = "matrix"

    def __init__(self, matrix: Tensor | NDArray[Any]) -> None:
        self.matrix = torch.as_tensor(matrix).detach()
        if self.matrix.dim() != 2:
            raise DataError(f"scores have shape {tuple(self.matrix.shape)}: they must be (images, texts).")
        self.shape, self.device = (self.matrix.shape[0], self.matrix.shape[1]), self.matrix.device

    def tile(self, images: Where, texts: Where) -> Tensor:
        return _precise(self.matrix[images][:, texts])


class MeanScores:
    """The mean of several scores: an ensemble."""

    def __init__(self, parts: Sequence[Scores]) -> None:
        if not parts:
            raise DataError("an ensemble needs at least one member.")
        shapes = sorted({part.shape for part in parts})
        if len(shapes) > 1:
            raise DataError(f"an ensemble scores {shapes[0]} and {shapes[1]} pairs: use the same data.")
        self.parts, self.shape, self.device = list(parts), parts[0].shape, parts[0].device
        self.kind = " + ".join(dict.fromkeys(part.kind for part in parts))

    @staticmethod
    def of(parts: Sequence[Scores]) -> Scores:
        """The mean; one member as it is."""
        return parts[0] if len(parts) == 1 else MeanScores(parts)

    def tile(self, images: Where, texts: Where) -> Tensor:
        total = self.parts[0].tile(images, texts)
        for part in self.parts[1:]:
            total = total + part.tile(images, texts)
        return total / len(self.parts)


class Fold:
    """Some images and some texts of other scores, renumbered from 0: a fold."""

    def __init__(self, scores: Scores, images: Tensor, texts: Tensor) -> None:
        self.scores, self.kind, self.device = scores, scores.kind, scores.device
        self.images, self.texts = images.to(scores.device), texts.to(scores.device)
        self.shape = len(images), len(texts)

    def tile(self, images: Where, texts: Where) -> Tensor:
        return self.scores.tile(self.images[images], self.texts[texts])


def vector_scores(
    model: Any,
    images: Any,
    texts: Any,
    *,
    image_batch_size: int | None = None,
    text_batch_size: int | None = None,
    device: torch.device | str | None = None,
    show_progress: bool = False,
) -> EmbeddingScores:
    """Scores of a model whose score is the dot product of what it encodes; each item is encoded once."""
    start = time.perf_counter()
    image = model.encode_image(images, batch_size=image_batch_size, show_progress=show_progress)
    middle = time.perf_counter()
    text = model.encode_text(texts, batch_size=text_batch_size, show_progress=show_progress)
    seconds = middle - start, time.perf_counter() - middle
    where = getattr(model, "device", torch.device("cpu")) if device is None else device
    return EmbeddingScores(image.to(where), text.to(where), encode_seconds=seconds)


def as_scores(scores: Scores | Tensor | NDArray[Any]) -> Scores:
    """``scores`` itself, or a matrix (images, texts) as scores."""
    return MatrixScores(scores) if isinstance(scores, Tensor | np.ndarray) else scores


def turned(scores: Scores) -> EmbeddingScores | None:
    """Scores of texts against images, where they are products of vectors, whose sides can change places."""
    if not isinstance(scores, EmbeddingScores):
        return None
    return EmbeddingScores(scores.text, scores.image)


def checked_tile(scores: Scores, images: Where, texts: Where) -> Tensor:
    """A tile; NaN is an error, since it would silently compare as neither above nor tied."""
    return check_scores(scores.tile(images, texts), scores.shape, images, texts)


def check_scores(part: Tensor, shape: tuple[int, int], images: Where, texts: Where) -> Tensor:
    """A tile of scores of that ``shape``, unless one is NaN."""
    # the sum is NaN if an entry is (or if +inf meets -inf), at a twentieth of the cost of isnan().any()
    if torch.isnan(part.sum()) and torch.isnan(part).any():
        row, column = torch.nonzero(torch.isnan(part))[0].tolist()
        image, text = _number(images, shape[0], row), _number(texts, shape[1], column)
        raise DataError(f"the score of image {image} and text {text} is NaN: the model has diverged.")
    return part


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No TF32, no bfloat16, no autocast: what speeds up training would decide ranks by rounding."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _precise(values: Tensor) -> Tensor:
    """Float32 or better: half precision goes to float32, whole numbers to float64."""
    if not values.is_floating_point():
        return values.double()
    return values.float() if values.element_size() < 4 else values


def _at_least(rows: Tensor) -> Tensor:
    missing = LEAST - len(rows)
    return pad(rows, (0, 0, 0, missing)) if missing > 0 else rows


def _numbers(where: Where, size: int) -> Tensor:
    return torch.arange(size)[where] if isinstance(where, slice) else where.cpu()


def _number(index: Where, size: int, place: int) -> int:
    return range(size)[index][place] if isinstance(index, slice) else int(index[place])
