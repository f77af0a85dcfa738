"""From the names in settings to encoders and inputs: the one place where an encoder is chosen by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych import aggregators
from diptych.aggregators import Aggregator
from diptych.data.captions import Captions, first_readable, holds_features
from diptych.data.concepts import word_vectors
from diptych.data.images import ImageInput, PixelInput, RegionInput
from diptych.data.text import TextInput, WordInput, WordPieceInput
from diptych.data.vocabulary import build_vocabulary, read_vocabulary
from diptych.encoders.backbones import HubBackbone, TimmBackbone
from diptych.encoders.bigru import BiGRU, UniGRU
from diptych.encoders.cnn import PrecomputedGrid, over_cells
from diptych.encoders.encoder import Backbone, Encoder
from diptych.encoders.known_names import known_name
from diptych.encoders.pretrained import minilm_folder
from diptych.encoders.regions import Regions
from diptych.encoders.transformer import TransformerText
from diptych.errors import SettingsError
from diptych.model.retriever import Retriever
from diptych.names import PREFIXES, Registry
from diptych.registries import (
    BACKBONES,
    IMAGE_ENCODERS,
    IMAGE_TEACHERS,
    TEXT_ENCODERS,
    TEXT_TEACHERS,
)
from diptych.settings import EncoderSettings
from diptych.targets.teachers import ImageTeacher, Space, TextTeacher

GRUS = ("bigru", "gru")


def image_side(
    settings: EncoderSettings, captions: Captions, drop: float, auto: str = "regions"
) -> tuple[Encoder, ImageInput]:
    """The image encoder and the input it reads; ``auto`` is what the name auto means for stored features."""
    stored = holds_features(captions.images)
    name = known_name(settings.image_encoder)
    if name == "auto":
        name = auto if stored else "lite0"
    if name in ("regions", "grid"):
        if not stored:
            raise SettingsError(
                f"--image_encoder {name} reads stored features, {captions.name} holds pictures: "
                "use --image_encoder lite0, or run 'diptych extract' first."
            )
        if settings.train_backbone:
            raise SettingsError(
                f"{captions.name} holds stored features, so there is no backbone to train: leave out --train_backbone."
            )
        if settings.unit_input and name != "grid":
            raise SettingsError("--unit_input is for stored CNN vectors: give --image_encoder grid too.")
        width = stored_width(captions)
        encoder: Encoder = (
            Regions(width, settings.dim, drop=drop)
            if name == "regions"
            else PrecomputedGrid(width, settings.dim, drop=drop, unit_input=settings.unit_input)
        )
        return encoder, RegionInput(width)
    if _is_plugin(IMAGE_ENCODERS, name):
        return _plugin_image_side(settings, captions, drop)
    if stored:
        raise SettingsError(
            f"--image_encoder {name} reads pictures, {captions.name} holds features: use regions or grid."
        )
    if settings.unit_input:
        raise SettingsError("--unit_input is for stored CNN vectors: leave it out for pictures.")
    network = backbone(name, settings.image_size, IMAGE_ENCODERS)
    encoder = over_cells(network, settings.dim, drop, settings.train_backbone)
    return encoder, PixelInput(**network.pixel_format)


def _plugin_image_side(
    settings: EncoderSettings, captions: Captions, drop: float
) -> tuple[Encoder, ImageInput]:
    """An encoder from another package and its input; stored features tell it their ``width``."""
    name, given = settings.image_encoder, {}
    if holds_features(captions.images):
        given = {"width": stored_width(captions)}
    made = IMAGE_ENCODERS.make(name, settings, size=settings.image_size, **given)
    encoder = over_cells(made, settings.dim, drop, settings.train_backbone)
    if given and encoder is made:
        return encoder, RegionInput(given["width"])
    if given or not hasattr(made, "pixel_format"):
        reads, holds = ("pictures", "features") if given else ("stored features", "pictures")
        raise SettingsError(
            f"--image_encoder {name} reads {reads}, {captions.name} holds {holds}: give another encoder or data set."
        )
    return encoder, PixelInput(**made.pixel_format)


def stored_width(captions: Captions) -> int:
    """Numbers in a row of the stored features."""
    return int(np.asarray(first_readable(captions.images)).shape[-1])


def check_pictures(captions: Captions, model: str) -> None:
    """Refuse stored features where a model reads pictures."""
    if holds_features(captions.images):
        raise SettingsError(
            f"{model} reads pictures, {captions.name} holds features: give the data set with its pictures."
        )


def backbone(name: str, image_size: int = 224, registry: Registry = BACKBONES) -> Backbone:
    """An image backbone by name: hf:ID, timm:NAME, what the package knows, a folder, or a plugin's."""
    name = known_name(name)
    if name.startswith("timm:"):
        return TimmBackbone(name, size=image_size)
    if name.startswith("hf:") or (name not in registry.own and Path(name).is_dir()):
        return HubBackbone(name.removeprefix("hf:"), size=image_size)
    made: Backbone = registry.make(name, size=image_size)
    return made


def text_side(
    settings: EncoderSettings,
    captions: Captions,
    drop: float,
    word_dropout: float = 0.0,
    max_length: int | None = None,
) -> tuple[Encoder, TextInput]:
    """The text encoder and the input it reads; ``word_dropout`` is that of the words a BiGRU embeds.

    Texts are cut at ``max_length`` tokens, and at what a transformer can read.
    """
    name = known_name(settings.text_encoder)
    if name in GRUS:
        words = _vocabulary(settings, captions)
        size, width = len(words), settings.word_dim
        encoder: BiGRU | UniGRU = (
            BiGRU(size, width, settings.dim, dropout=word_dropout)
            if name == "bigru"
            else UniGRU(size, width, settings.dim)
        )
        if settings.word_vectors:
            matrix, found = word_vectors(words, settings.word_vectors, settings.word_dim)
            encoder.load_word_vectors(torch.from_numpy(matrix), torch.from_numpy(found))
        return encoder, WordInput(words, augment=drop, max_length=max_length)
    if _is_plugin(TEXT_ENCODERS, name):
        words = _vocabulary(settings, captions)
        own_encoder: Encoder = TEXT_ENCODERS.make(name, settings, words=len(words))
        return own_encoder, WordInput(words, augment=drop, max_length=max_length)
    source = text_source(name)
    frozen = not settings.train_text
    text = TransformerText(source, settings.dim, trainable=settings.train_text, drop=drop if frozen else 0.0)
    pieces = WordPieceInput(source, augment=0.0 if frozen else drop)
    if max_length is not None and max_length < pieces.max_length:
        pieces = WordPieceInput(source, pieces.augment, max_length)
    return text, pieces


def image_teacher(
    name: str, image_size: int = 224, space: Space = "pooled", project: int = 0
) -> ImageTeacher:
    """An image teacher by the name of its backbone."""
    network = backbone(name, image_size, IMAGE_TEACHERS)
    return ImageTeacher(network, PixelInput(**network.pixel_format), space, project)


def text_teacher(name: str, project: int = 0) -> TextTeacher:
    """A text teacher by the name of its transformer."""
    if name in GRUS:
        raise SettingsError(f"'{name}' is not pretrained and cannot teach: use {TEXT_TEACHERS.choices}.")
    name = known_name(name)
    if name != "minilm" and not name.startswith("hf:") and not Path(name).is_dir():
        teacher: TextTeacher = TEXT_TEACHERS.make(name, project=project)
        return teacher
    source = text_source(name)
    encoder = TransformerText(source, trainable=False, projection=False)
    return TextTeacher(encoder, WordPieceInput(source, augment=0.0), project)


def kmax(settings: Any) -> Aggregator:
    """KMax with the k that the settings ask for."""
    return aggregators.KMax(getattr(settings, "pool_k", 2))


def gpo(settings: Any, dim: int) -> Aggregator:
    """GPO with the generator the settings ask for; a recipe without such settings has the paper's."""
    sequence = getattr(settings, "gpo_sequence", "bigru")
    outputs = dim if getattr(settings, "gpo_per_dimension", False) else 1
    if getattr(settings, "gpo_data_dependent", False):
        if sequence != "bigru":
            raise SettingsError("--gpo_data_dependent works only with --gpo_sequence bigru: leave one out.")
        return aggregators.GPO(aggregators.SortedRowBiGRU(dim, outputs=outputs))
    generators = {
        "bigru": aggregators.CosSinBiGRU,
        "transformer": aggregators.CosSinTransformer,
        "mlp": aggregators.CosSinMLP,
    }
    return aggregators.GPO(generators[sequence](outputs=outputs))


def _is_plugin(registry: Registry, name: str) -> bool:
    """Whether a name is that of another package: neither one of this package, nor hf:ID and the like, nor a folder."""
    if name in registry.own or name.startswith(PREFIXES) or Path(name).is_dir():
        return False
    registry.check(name)
    return True


def multipliers(retriever: Retriever, settings: EncoderSettings) -> dict[str, float]:
    """Learning-rate factors of the pretrained parts that are trained."""
    factors = {"image": settings.backbone_multiplier, "text": settings.text_multiplier}
    return {name: factors[name.partition(".")[0]] for name in _pretrained(retriever)}


def train_from(retriever: Retriever) -> dict[str, int]:
    """The image backbone waits one epoch, so that the new layers do not spoil it."""
    return {name: 1 for name in _pretrained(retriever) if name.startswith("image.")}


def _pretrained(retriever: Retriever) -> list[str]:
    """Prefixes of the parameters that start from pretrained weights and are trained."""
    sides = {"image": retriever.image.encoder, "text": retriever.text.encoder}
    return [f"{side}.encoder.{name}" for side, encoder in sides.items() for name in encoder.pretrained()]


def _vocabulary(settings: EncoderSettings, captions: Captions) -> list[str]:
    if not settings.vocabulary:
        return build_vocabulary(captions.texts, settings.min_count)
    return read_vocabulary(settings.vocabulary)


def text_source(name: str) -> str:
    """The folder or hub id of a text transformer by name: minilm, hf:ID or a folder."""
    name = known_name(name)
    if name == "minilm":
        return minilm_folder()
    if name.startswith("hf:"):
        return name.removeprefix("hf:")
    if Path(name).is_dir():
        return name
    raise TEXT_ENCODERS.unknown(name)
