"""Tokens → label scores: the head of label-wise retrieval, one for both modalities."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diptych import ops
from diptych.aggregators.pooling import Aggregator
from diptych.errors import SettingsError
from diptych.parts import part
from diptych.types import Features


@part
class LabelHead(Aggregator):
    """p = mean_t q_t with q_t = l2(sigmoid(W h_t + b)), (B, L, dim) → (B, C).

    ==============  ==========================================================================================
    W (C, dim), b   ``linear``; the paper's model gives both towers the same head
    h_t             the tokens of the shared encoder
    l2              ``unit_tokens``; without it p is the mean of the sigmoids, what the BCE loss reads
    C               ``classes``: as many as there are labels
    ==============  ==========================================================================================

    p is the label prediction of an item and, as the aggregator of a tower, its retrieval embedding.
    """

    def __init__(self, dim: int, classes: int, unit_tokens: bool = True) -> None:
        super().__init__()
        if classes < 1:
            raise SettingsError("a label head needs at least one label: the training data have none.")
        self.classes, self.unit_tokens = classes, unit_tokens
        self.linear = ops.xavier_linear(dim, classes)

    def dim_of(self, encoder_dim: int) -> int:
        return self.classes

    def forward(self, features: Features) -> Tensor:
        valid = features.mask[..., None]
        # (B, L, C)
        tokens = torch.sigmoid(ops.at_least_float32(self.linear(features.values.masked_fill(~valid, 0))))
        return ops.masked_mean(ops.unit(tokens) if self.unit_tokens else tokens, features.mask)


@part
class CommonLayer(nn.Module):
    """One linear layer that both sides of DSCMR share: (B, input_dim) → (B, dim)."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = nn.Linear(input_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@part
class CommonSpace(Aggregator):
    """DSCMR's common representation: u = common(ReLU(W · mean_t h_t + b)), (B, L, dim) → (B, D).

    ``own`` is the side's own layer dim → 2048, ``common`` the layer 2048 → 1024 that both sides share. DSCMR reads one
    feature vector per item; here it is the mean of the tokens of the front end.
    """

    def __init__(self, dim: int, common: CommonLayer, hidden: int = 2048) -> None:
        super().__init__()
        self.own, self.common = nn.Linear(dim, hidden), common

    def dim_of(self, encoder_dim: int) -> int:
        return self.common.dim

    def forward(self, features: Features) -> Tensor:
        pooled = ops.masked_mean(ops.at_least_float32(features.values), features.mask)
        u: Tensor = self.common(torch.relu(self.own(pooled)))
        return u


@part
class ClassScores(Aggregator):
    """DSCMR's label scores: p = classifier(u), (B, L, dim) → (B, C), without an activation."""

    def __init__(self, space: CommonSpace, classifier: CommonLayer) -> None:
        super().__init__()
        self.space, self.classifier = space, classifier

    def dim_of(self, encoder_dim: int) -> int:
        return self.classifier.dim

    def forward(self, features: Features) -> Tensor:
        p: Tensor = self.classifier(self.space(features))
        return p
