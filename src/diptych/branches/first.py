"""The encoders' own first vectors as a view: what a model without uni-modal heads is compared by."""

from __future__ import annotations

from torch import Tensor

from diptych import ops
from diptych.aggregators import First
from diptych.branches.branch import Branch
from diptych.parts import part
from diptych.types import Features


@part
class FirstVectors(Branch):
    """unit(f), f the first local feature: a dual encoder's pooled vector before any head. It has no weights.

    CUSA's rows without USA measure uni-modal similarity with it. ``dim`` is the width of f, ``text_dim`` that of a
    text's where it differs.
    """

    def __init__(self, dim: int, text_dim: int | None = None) -> None:
        super().__init__()
        self.dim, self._text_dim, self.first = dim, text_dim, First()

    @property
    def text_dim(self) -> int:
        """Width of a text's f."""
        return self._text_dim or self.dim

    def image(self, vector: Tensor, features: Features) -> Tensor:
        """Unit rows (B, dim) of images."""
        return ops.unit(self.first(features).float())

    def text(self, vector: Tensor, features: Features) -> Tensor:
        """Unit rows (B, text_dim) of texts."""
        return ops.unit(self.first(features).float())
