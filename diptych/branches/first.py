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

    CUSA's rows without USA measure uni-modal similarity with it. ``dim`` is the width of f on both sides.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.first = dim, First()

    def image(self, vector: Tensor, features: Features) -> Tensor:
        """Unit rows (B, dim) of images."""
        return ops.unit(self.first(features).float())

    def text(self, vector: Tensor, features: Features) -> Tensor:
        """Unit rows (B, dim) of texts."""
        return ops.unit(self.first(features).float())
