"""Views outside the score for image–image and text–text similarity: uni-modal heads, and the encoders' own vectors."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from diptych import ops
from diptych.aggregators import First
from diptych.aggregators.pooling import Aggregator
from diptych.branches.branch import Branch
from diptych.parts import part
from diptych.types import Batch, Embeddings, Features

SPREAD = 0.02  # standard deviation of the weights behind a LayerNorm (CUSA's CLIP)


@part
class UniModalHeads(Branch):
    """One fully connected layer per modality, a_i = unit(W f_i + b): CUSA's uni-modal heads.

    ===================  =================================================================================
    f (B, D)             the tower's vector, or that of an aggregator of its own over the local features
                         (``image_aggregator``, ``text_aggregator``)
    W (D', D)            ``dim`` is D'; ``image_dim`` and ``text_dim`` are D of each side, by default D'
    LayerNorm            ``layer_norm``: LayerNorm(D) before the layer, weights N(0, 0.02²), as in CUSA's CLIP;
                         else Xavier weights and zero bias, as in its SGRAF
    ===================  =================================================================================

    The weight is 0: the heads are the view "uni" (``encode_image(…, view="uni")``), and no part of the score.
    """

    def __init__(
        self,
        dim: int,
        image_dim: int | None = None,
        text_dim: int | None = None,
        layer_norm: bool = False,
        image_aggregator: Aggregator | None = None,
        text_aggregator: Aggregator | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.image_aggregator, self.text_aggregator = image_aggregator, text_aggregator
        self.image_head = _head(image_dim or dim, dim, layer_norm)
        self.text_head = _head(text_dim or dim, dim, layer_norm)

    def image(self, vector: Tensor, features: Features) -> Tensor:
        """a (B, D')."""
        return _seen(self.image_head, self.image_aggregator, vector, features)

    def text(self, vector: Tensor, features: Features) -> Tensor:
        """b (B, D')."""
        return _seen(self.text_head, self.text_aggregator, vector, features)

    def forward(self, seen: Embeddings, batch: Batch) -> Embeddings:
        """Both sides, which are independent of each other."""
        assert seen.image_features is not None
        assert seen.text_features is not None
        image = self.image(seen.image, seen.image_features)
        return Embeddings(image, self.text(seen.text, seen.text_features))


class _Head(nn.Linear):
    """A linear layer that adds its bias apart: with the bias in it, cuBLAS takes twice as long for a float32 batch."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) + self.bias


def _seen(head: nn.Module, aggregator: Aggregator | None, vector: Tensor, features: Features) -> Tensor:
    seen = vector if aggregator is None else aggregator(features)
    return ops.unit(head(seen).float())


def _head(width: int, dim: int, layer_norm: bool) -> nn.Module:
    if not layer_norm:
        return ops.xavier_linear(width, dim, kind=_Head)
    head = _Head(width, dim)
    nn.init.normal_(head.weight, std=SPREAD)
    return nn.Sequential(nn.LayerNorm(width), head)


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
