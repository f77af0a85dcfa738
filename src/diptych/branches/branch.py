"""What a branch is: a second view of both sides, in the score or beside it.

Views outside the score for image–image and text–text similarity: uni-modal heads, and the encoders' own vectors.

The hash head: a further view of each side whose signs are binary codes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from diptych import ops
from diptych.aggregators import First
from diptych.aggregators.pooling import Aggregator, make_head
from diptych.data.labels import Signs, checked_bits, checked_centres, hash_centres, tie_vector
from diptych.errors import SettingsError
from diptych.parts import part
from diptych.types import Batch, Embeddings, Features


class Branch(nn.Module):
    """A second view of both sides, mixed into the score: S = (1 − weight)·S + weight·S_branch.

    Each method maps the tower's vector (B, D) and local features to the branch's unit vector (B, ``dim``). A branch
    of weight 0 is a view beside the score: it is seen in training and by ``encode_image(…, view=name)``, and changes
    neither the vectors nor the score of the model.
    """

    weight: float = 0.0
    dim: int

    @property
    def text_dim(self) -> int:
        """Length of a text's vector, where a view beside the score gives its sides different ones."""
        return self.dim

    def image(self, vector: Tensor, features: Features) -> Tensor:
        raise NotImplementedError

    def text(self, vector: Tensor, features: Features) -> Tensor:
        """The text side of the branch; by default it is made as the image's."""
        return self.image(vector, features)

    def forward(self, seen: Embeddings, batch: Batch) -> Embeddings:
        """Both sides of a training step; a branch that shares work between them, or looks at more, overrides it."""
        images, texts = seen.local_features()
        return Embeddings(self.image(seen.image, images), self.text(seen.text, texts))


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
        return _view_of(self.image_head, self.image_aggregator, vector, features)

    def text(self, vector: Tensor, features: Features) -> Tensor:
        return _view_of(self.text_head, self.text_aggregator, vector, features)


class _Head(nn.Linear):
    """A linear layer that adds its bias apart: with the bias in it, cuBLAS takes twice as long for a float32 batch."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) + self.bias


def _view_of(head: nn.Module, aggregator: Aggregator | None, vector: Tensor, features: Features) -> Tensor:
    seen = vector if aggregator is None else aggregator(features)
    return ops.unit(head(seen).float())


def _head(width: int, dim: int, layer_norm: bool) -> nn.Module:
    if layer_norm:  # CUSA's CLIP
        return make_head(width, dim, norm=True, kind=_Head)
    return ops.xavier_linear(width, dim, kind=_Head)


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
        return self._text_dim or self.dim

    def image(self, vector: Tensor, features: Features) -> Tensor:
        return ops.unit(self.first(features).float())


@part
class HashHead(Branch):
    """Codes h = tanh(W₃ ReLU(W₂ drop(ReLU(W₁ z)))) within (−1, 1)^K; the bits are h ≥ 0.

    ==================  ====================================================================================
    z (B, D)            the mean of a side's local features (MEAN pooling), not normalised
    W₁, W₂ (D, D)       ``layers``
    W₃ (K, D)           ``layers``, K = ``bits``
    dropout 0.5         ``dropout``, after the first ReLU
    centres (C, K)      ``centres``, made for ``classes`` with ``seed``; they travel with the model
    ==================  ====================================================================================

    One head serves both sides: with a shared encoder their features lie in one space, and a text gets a code as well.
    Its weight in the score is 0: it changes neither the vectors nor the score of the model.
    """

    centres: Tensor
    ties: Tensor

    def __init__(
        self, dim: int = 1024, bits: int = 64, classes: int = 1, dropout: float = 0.5, seed: int = 0
    ) -> None:
        super().__init__()
        if dim < 1 or not 0 <= dropout < 1:
            raise SettingsError(f"a hash head needs dim ≥ 1 and 0 ≤ dropout < 1, not {dim} and {dropout}.")
        self.dim = self.bits = checked_bits(bits)
        inner = [nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim), nn.ReLU()]
        self.layers = nn.Sequential(*inner, nn.Linear(dim, bits), nn.Tanh())
        self.register_buffer("centres", torch.from_numpy(hash_centres(classes, bits, seed)))
        self.register_buffer("ties", torch.from_numpy(tie_vector(bits, seed)))

    def use_centres(self, centres: Signs) -> None:
        """Take centres from elsewhere (CSQ's files) in the place of the made ones; a file may hold more classes."""
        signs = checked_centres(centres, "the file of hash centres")
        classes, bits = self.centres.shape
        if len(signs) < classes or signs.shape[1] != bits:
            raise SettingsError(
                f"the hash centres are of {signs.shape[0]} classes and {signs.shape[1]} bits, but "
                f"{self.centres.shape[0]} classes and {self.centres.shape[1]} bits are needed: choose the file for "
                "these, or leave it out."
            )
        self.centres.copy_(torch.from_numpy(np.ascontiguousarray(signs[:classes])))

    def image(self, vector: Tensor, features: Features) -> Tensor:
        pooled = ops.masked_mean(ops.at_least_float32(features.values), features.mask)
        codes: Tensor = self.layers(pooled)
        return codes
