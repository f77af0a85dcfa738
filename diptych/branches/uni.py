"""Uni-modal heads (CUSA): a view for comparing images with images and texts with texts, beside the score."""

from __future__ import annotations

from torch import Tensor

from diptych.aggregators.head import Head
from diptych.branches.branch import Branch
from diptych.ops import unit
from diptych.parts import part
from diptych.types import Features


@part
class UniHeads(Branch):
    """One head per modality on the first local feature: a = unit(head_I(f_I)), b = unit(head_T(f_T)).

    ================  ==============================================================================
    CUSA              argument
    ================  ==============================================================================
    a_i, b_i          ``encode_image(…, view="uni")``, ``encode_text(…, view="uni")``
    CLIP              ``norm``: LayerNorm(d) → Linear(d → d) on the unnormalised output f
    X2-VLM            no ``norm``: Linear(768 → 256) on the first token of each encoder
    ================  ==============================================================================

    The weight is 0: the heads change neither the vectors nor the score of the model.
    """

    def __init__(self, image_dim: int, text_dim: int, dim: int, norm: bool = True) -> None:
        super().__init__()
        self.weight, self.dim = 0.0, dim
        self.image_head, self.text_head = Head(image_dim, dim, norm), Head(text_dim, dim, norm)

    def image(self, vector: Tensor, features: Features) -> Tensor:
        """Unit rows (B, dim) of images."""
        return unit(self.image_head(features).float())

    def text(self, vector: Tensor, features: Features) -> Tensor:
        """Unit rows (B, dim) of texts."""
        return unit(self.text_head(features).float())
