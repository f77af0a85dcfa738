"""Ridge regression from frozen image features to the vectors of a frozen text encoder, solved in closed form.

No step is made unless ``--epochs`` asks for some: what the linear solve finds is the model. With epochs, training
starts from that solution, and the best of both on the validation split is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.data.captions import Captions, holds_features
from diptych.data.images import ImageInput, PixelInput, RegionInput
from diptych.data.text import WordPieceInput
from diptych.encoders.class_words import with_names
from diptych.encoders.cnn import Grid, PrecomputedGrid
from diptych.encoders.encoder import Encoder
from diptych.encoders.lite0 import Lite0
from diptych.encoders.pretrained import load_config
from diptych.encoders.transformer import TransformerText
from diptych.errors import SettingsError
from diptych.model import named
from diptych.objectives.contrastive import InfoNCE
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import join_towers
from diptych.registries import BACKBONES
from diptych.settings import HostSettings, defaults, setting
from diptych.training.method import Method
from diptych.training.ridge import Ridge

TRANSFORMERS = "minilm (extra 'demo'), hf:ID or a model folder"
STORED = ("auto", "grid")  # names of an image encoder that reads stored features


@dataclass(frozen=True)
@defaults(image_pool="mean", text_pool="mean")
class Settings(HostSettings):
    """One linear solve; λ and μ are chosen on the validation split."""

    INHERITED = ()

    image_encoder: str = setting(
        "auto", "frozen image features (auto: grid for stored ones, lite0 for pictures)", names=BACKBONES
    )
    text_encoder: str = setting("minilm", f"frozen text encoder: {TRANSFORMERS}")
    image_size: int = setting(224, "pixels of the square image the backbone reads", low=32)
    names: bool = setting(True, "add the names of what Lite0 sees, where lite0 and minilm are the encoders")
    shrinkage: float = setting(0.0, "λ in units of a feature's mean spread (0: chosen on validation)", low=0)
    flooring: float = setting(
        0.0, "μ, which evens out the spread of texts, in units of its mean (0: chosen on validation)", low=0
    )
    temperature: float = setting(0.05, "temperature InfoNCE starts from and learns", low=0.01, high=1)
    epochs: int = setting(0, "passes over the training texts after the solve, with InfoNCE", low=0)


@dataclass(frozen=True)
@defaults(epochs=30, learning_rate=1e-5, schedule="cosine", patience=5)
class PhotoSettings(Settings):
    """What measured best on a few hundred to a few thousand captioned pictures: ridge, then up to 30 epochs.

    The encoders stay frozen. Training starts from the solution with a small learning rate and stops by itself; the
    solution is kept where training does not beat it on the validation split (docs/results-small-data.md).
    """


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    if settings.text_encoder in named.GRUS:
        raise SettingsError(
            f"--text_encoder {settings.text_encoder} is not pretrained, so there are no vectors to "
            f"regress to: use {TRANSFORMERS}."
        )
    source = named.text_source(settings.text_encoder)
    dim = int(load_config(source).hidden_size)
    image, image_input = image_side(settings, captions, dim)
    text = TransformerText(source, dim, trainable=False)
    retriever = join_towers(settings, image, text, image_input, WordPieceInput(source, augment=0.0))
    return Method(retriever, InfoNCE(settings.temperature, learned=True), solver=_solver(settings))


def _solver(settings: Settings) -> Ridge | None:
    """The closed form, which knows means and nothing on top of them; a model with more than that is trained alone."""
    if (settings.image_pool, settings.text_pool, settings.depth) == ("mean", "mean", 0):
        return Ridge(settings.shrinkage or None, settings.flooring or None)
    if not settings.epochs:
        raise SettingsError(
            "the closed form is for --image_pool mean, --text_pool mean and --depth 0: give --epochs as well, and the "
            "model is trained instead."
        )
    return None


def image_side(settings: Settings, captions: Captions, dim: int) -> tuple[Encoder, ImageInput]:
    """A linear layer on frozen cells: stored ones, or those of a backbone."""
    name = settings.image_encoder
    if holds_features(captions.images):
        if name not in STORED:
            raise SettingsError(f"--image_encoder {name} reads pictures, {captions.name} has none: use grid.")
        width = named.stored_width(captions)
        return PrecomputedGrid(width, dim, drop=0.0), RegionInput(width)
    if name == "grid":
        raise SettingsError(f"--image_encoder grid reads features, {captions.name} has pictures: use lite0.")
    name = "lite0" if name == "auto" else name
    if settings.names and (name, settings.text_encoder) == ("lite0", "minilm"):
        encoder = with_names(Lite0(size=settings.image_size))
        return encoder, PixelInput(**encoder.backbone.pixel_format)
    network = named.backbone(name, settings.image_size)
    return Grid(network, dim, drop=0.0), PixelInput(**network.pixel_format)


RECIPE = Recipe("ridge", "Ridge regression in closed form, image to text", Settings, build)
PHOTOS = Recipe("photos", "Your own photos: ridge, then a few epochs", PhotoSettings, build)
