"""Where scores come from: tiles of the (images, texts) matrix, computed on request and never held whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from diptych.errors import DataError

Where = slice | Tensor
"""Rows or columns: a slice, or their numbers (int64, on the device of the scores)."""

LEAST = 64  # rows of either side in one product, see EmbeddingScores


class Scores(Protocol):
    """Scores of N images against M texts: all that a pair scorer or a re-ranker needs to be evaluated."""

    @property
    def kind(self) -> str:
        """What a score is, for the card of a report: ``dot``, ``matrix``, ..."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tiles are computed."""
        ...

    def tile(self, images: Where, texts: Where) -> Tensor:
        """The scores of some images against some texts, float32 or float64."""
        ...


class EmbeddingScores:
    """Dot products of encoded vectors, (N, D) and (M, D).

    Equal vectors must get equal scores, or rounding would decide ties. A matrix product gives an entry the
    same bits wherever it stands, unless the shape falls to the kernels for small matrices: short sides are
    therefore filled with zeros up to ``LEAST`` rows, and the products run in full float32, outside autocast.
    """

    kind = "dot"

    def __init__(self, image: Tensor, text: Tensor) -> None:
        if image.dim() != 2 or text.dim() != 2 or image.shape[1] != text.shape[1]:
            raise DataError(
                f"image vectors {tuple(image.shape)} and text vectors {tuple(text.shape)} do not go "
                "together: encode both with one model, as (N, D) and (M, D)."
            )
        if image.device != text.device:
            raise DataError(
                f"image vectors are on {image.device}, text vectors on {text.device}: move them together."
            )
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

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return len(self.image), len(self.text)

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self.image.device

    def tile(self, images: Where, texts: Where) -> Tensor:
        """``image[images] @ text[texts].T``."""
        rows, columns = self.image[images], self.text[texts]
        n, m = len(rows), len(columns)
        with full_precision(self.device):
            return (_at_least(rows) @ _at_least(columns).T)[:n, :m]


class MatrixScores:
    """A score matrix that exists already, (N, M)."""

    kind = "matrix"

    def __init__(self, matrix: Tensor | NDArray[Any]) -> None:
        self.matrix = torch.as_tensor(matrix).detach()
        if self.matrix.dim() != 2:
            raise DataError(f"scores have shape {tuple(self.matrix.shape)}: they must be (images, texts).")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the matrix is."""
        return self.matrix.device

    def tile(self, images: Where, texts: Where) -> Tensor:
        """A part of the matrix."""
        return _precise(self.matrix[images][:, texts])


class MeanScores:
    """The mean of several scores: an ensemble."""

    def __init__(self, parts: Sequence[Scores]) -> None:
        if not parts:
            raise DataError("an ensemble needs at least one member.")
        shapes = sorted({part.shape for part in parts})
        if len(shapes) > 1:
            raise DataError(
                f"the members of an ensemble score {shapes[0]} and {shapes[1]} pairs: use the same data."
            )
        self.parts = list(parts)

    @property
    def kind(self) -> str:
        """The kind of the members."""
        return " + ".join(dict.fromkeys(part.kind for part in self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return self.parts[0].shape

    @property
    def device(self) -> torch.device:
        """The device of the members."""
        return self.parts[0].device

    def tile(self, images: Where, texts: Where) -> Tensor:
        """Mean over the members."""
        total = self.parts[0].tile(images, texts)
        for part in self.parts[1:]:
            total = total + part.tile(images, texts)
        return total / len(self.parts)


class Fold:
    """Some images and some texts of other scores, renumbered from 0: a fold."""

    def __init__(self, scores: Scores, images: Tensor, texts: Tensor) -> None:
        self.scores = scores
        self.images, self.texts = images.to(scores.device), texts.to(scores.device)

    @property
    def kind(self) -> str:
        """The kind of the scores below."""
        return self.scores.kind

    @property
    def shape(self) -> tuple[int, int]:
        """(images chosen, texts chosen)."""
        return len(self.images), len(self.texts)

    @property
    def device(self) -> torch.device:
        """The device of the scores below."""
        return self.scores.device

    def tile(self, images: Where, texts: Where) -> Tensor:
        """The same tile by the numbers of the scores below."""
        return self.scores.tile(self.images[images], self.texts[texts])


def as_scores(scores: Scores | Tensor | NDArray[Any]) -> Scores:
    """``scores`` itself, or a matrix (images, texts) as scores."""
    return MatrixScores(scores) if isinstance(scores, Tensor | np.ndarray) else scores


def checked_tile(scores: Scores, images: Where, texts: Where) -> Tensor:
    """A tile; NaN is an error, since it would silently compare as neither above nor tied."""
    part = scores.tile(images, texts)
    # the sum is NaN if an entry is (or if +inf meets -inf), at a twentieth of the cost of isnan().any()
    if torch.isnan(part.sum()) and torch.isnan(part).any():
        row, column = torch.nonzero(torch.isnan(part))[0].tolist()
        image, text = _number(images, scores.shape[0], row), _number(texts, scores.shape[1], column)
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


def _number(index: Where, size: int, place: int) -> int:
    return range(size)[index][place] if isinstance(index, slice) else int(index[place])
