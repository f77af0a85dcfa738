"""A dual encoder without training: what a classifier sees in a picture, said in the words of a sentence encoder.

ConSE (Norouzi et al., ICLR 2014) places a picture where the names of its likely classes lie. Here the classifier is
EfficientNet-Lite0 on ImageNet's 1,000 classes and the sentence encoder is all-MiniLM-L6-v2 (extra ``demo``).
``NamedGrid`` puts such names beside a linear layer that was trained on captions.
"""

from __future__ import annotations

from importlib import resources

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from diptych.data.images import PixelInput
from diptych.data.text import WordPieceInput
from diptych.encoders.cnn import Grid
from diptych.encoders.dual_side import DualImageSide, DualSide
from diptych.encoders.encoder import Backbone, check_stored, text_inputs
from diptych.encoders.lite0 import Lite0, published_classifier
from diptych.encoders.pretrained import minilm_folder
from diptych.encoders.transformer import TransformerText
from diptych.errors import positive
from diptych.ops import masked_mean, unit
from diptych.parts import part
from diptych.types import Features, Inputs

TEMPERATURE = 2.0  # of the softmax over the classes; chosen, with the prompt, on Flickr8k's validation images
START_SCALE = 2.6593  # ln(1 / 0.07), from which CLIP too started; used when the model is trained


@part
class ClassWords(DualImageSide):
    """Pixels (B, 3, H, W) → Features (B, 1, dim): the mean of the classes' word vectors, by their probability.

    f(x) = Σ_c p_c · (s_c − s̄),   p = softmax((W · mean of the cells + b) / τ)        (after ConSE, eq. 4)

    | paper | here |
    |---|---|
    | p_0(y given x) | softmax of ``classifier`` at τ = ``class_temperature`` |
    | s(y) | row of ``words``, less their mean s̄ |
    | T | all classes: a softer softmax does the work of the cut |

    Without the centre s̄, which ``SentenceVector`` subtracts from the texts, every mean of many classes points the same
    way.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        dim: int,
        class_temperature: float = TEMPERATURE,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.class_temperature = dim, positive(class_temperature, "class_temperature")
        self.backbone = backbone
        self.classifier = nn.Linear(backbone.channels, classes)
        self.words = nn.Parameter(torch.zeros(classes, dim))
        self.keep_scale(START_SCALE, 0.0)
        self.let_train(trainable)

    def forward(self, inputs: Inputs) -> Features:
        if isinstance(inputs, Features):
            return check_stored(inputs, self.dim, "vectors")
        logits: Tensor = self.classifier(self.backbone(inputs).mean(dim=1))  # (B, classes)
        vectors = (logits / self.class_temperature).softmax(dim=1) @ self.words  # (B, dim)
        return Features.whole(vectors[:, None])


@part
class SentenceVector(DualSide):
    """Token ids (B, W) → Features (B, 1, dim): the unit mean of a transformer's states, less a ``centre``."""

    centre: Tensor

    def __init__(self, encoder: TransformerText, trainable: bool = True) -> None:
        super().__init__()
        self.dim, self.encoder = encoder.dim, encoder
        self.register_buffer("centre", torch.zeros(self.dim))
        self.let_train(trainable)

    def forward(self, inputs: Inputs) -> Features:
        texts = text_inputs(inputs)
        if not texts.is_ids:
            return check_stored(texts, self.dim, "vectors")
        states: Features = self.encoder(texts)
        sentence = unit(masked_mean(states.values, states.mask))  # (B, dim)
        return Features.whole((sentence - self.centre)[:, None])

    def packs(self, device: torch.device) -> bool:
        return self.encoder.packs(device)


def stored_words() -> tuple[Tensor, Tensor]:
    """The class vectors (1000, 384), centred, and their centre (384,), as MiniLM gives them for "a photo of a …".

    They are stored, in 8 bits, not computed: the last bits of a computation differ between machines, and with them the
    fingerprint by which an index knows its model. ``imagenet_classes.txt`` names the classes, in the same order.
    """
    with resources.as_file(resources.files("diptych.encoders") / "imagenet_classes.safetensors") as file:
        stored = load_file(file)
    return stored["words"].float() * stored["scale"], stored["centre"]


def load_class_words() -> tuple[ClassWords, SentenceVector, PixelInput, WordPieceInput]:
    """Both sides and their inputs, from installed packages."""
    folder, backbone, (words, centre) = minilm_folder(), Lite0(), stored_words()
    text = SentenceVector(TransformerText(folder, projection=False))
    image = ClassWords(backbone, *words.shape)
    _take_classifier(image.classifier)
    with torch.no_grad():
        image.words.copy_(words)
        text.centre.copy_(centre)
    return image, text, PixelInput(**backbone.pixel_format), WordPieceInput(folder, augment=0.0)


@torch.no_grad()
def _take_classifier(layer: nn.Linear) -> None:
    for parameter, published in zip((layer.weight, layer.bias), published_classifier(), strict=True):
        parameter.copy_(published)


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
        self.class_temperature = positive(class_temperature, "class_temperature")
        self.classifier = nn.Linear(backbone.channels, classes).requires_grad_(False)
        self.words = nn.Linear(classes, dim).requires_grad_(False)
        self.register_buffer("share", torch.zeros(()))

    def forward(self, inputs: Inputs) -> Features:
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
    words, _ = stored_words()
    encoder = NamedGrid(backbone, *words.shape)
    _take_classifier(encoder.classifier)
    with torch.no_grad():
        encoder.words.weight.copy_(words.T)
        encoder.words.bias.zero_()
    return encoder
