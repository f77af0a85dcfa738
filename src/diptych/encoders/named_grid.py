"""A linear layer on a backbone's cells, and beside it the names of what a classifier sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diptych.encoders.backbone import Backbone
from diptych.encoders.class_words import TEMPERATURE, stored_words
from diptych.encoders.cnn import Grid
from diptych.encoders.lite0 import Lite0, published_classifier
from diptych.errors import SettingsError
from diptych.ops import masked_mean, unit
from diptych.parts import part
from diptych.types import Features, Inputs


@part
class NamedGrid(Grid):
    """Pixels (B, 3, H, W), or cells (B, R, C), → Features (B, 2, dim): what was learned of a picture, and its names.

    ::

        f(x) = ( unit(W x + b),  a · unit(Σ_c p_c s_c + d) ),   p = softmax(classifier(x) / τ),   x = mean of the cells

    ==========  =================================================================================
    W, b        ``linear``, learned from captions
    s_c, d      ``words``, the vectors of the classes' names in the same space, and their centre
    a           ``share``: 0 leaves the names out
    τ           ``class_temperature``
    ==========  =================================================================================

    The aggregator ``Mean`` adds both up. Captions of a few hundred pictures name few things; the classifier names a
    thousand. The backbone and the classifier are frozen, and so are the names.
    """

    share: Tensor

    def __init__(
        self, backbone: Backbone, classes: int, dim: int, class_temperature: float = TEMPERATURE
    ) -> None:
        super().__init__(backbone, dim, drop=0.0)
        if class_temperature <= 0:
            raise SettingsError(f"class_temperature={class_temperature} must be above 0.")
        self.class_temperature = class_temperature
        self.classifier = nn.Linear(backbone.channels, classes).requires_grad_(False)
        self.words = nn.Linear(classes, dim).requires_grad_(False)
        self.register_buffer("share", torch.zeros(()))

    def forward(self, inputs: Inputs) -> Features:
        """Features (B, 2, dim)."""
        cells = inputs if isinstance(inputs, Features) else Features.whole(self.backbone(inputs))
        mean = Features.whole(masked_mean(cells.values.float(), cells.mask)[:, None])  # (B, 1, C)
        learned = unit(super().forward(mean).values[:, 0].float())
        named = unit(self.words(self.probabilities(mean.values[:, 0])).float())
        return Features.whole(torch.stack([learned, self.share * named], dim=1))

    def probabilities(self, means: Tensor) -> Tensor:
        """What the classifier sees in pooled cells (B, C): shares of the classes (B, classes)."""
        logits: Tensor = self.classifier(means)
        return (logits.float() / self.class_temperature).softmax(dim=1)


def with_names(backbone: Lite0) -> NamedGrid:
    """EfficientNet-Lite0 with ImageNet's class names as all-MiniLM-L6-v2 reads them; their share is 0 to begin with."""
    (weight, bias), (words, _) = published_classifier(), stored_words()
    encoder = NamedGrid(backbone, *words.shape)
    with torch.no_grad():
        encoder.classifier.weight.copy_(weight)
        encoder.classifier.bias.copy_(bias)
        encoder.words.weight.copy_(words.T)
        encoder.words.bias.zero_()
    return encoder
