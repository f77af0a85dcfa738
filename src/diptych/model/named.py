"""From the names in settings to encoders and inputs: the one place where an encoder is chosen by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from diptych import aggregators
from diptych.aggregators import Aggregator
from diptych.data.captions import Captions
from diptych.data.glove import word_vectors
from diptych.data.images import ImageInput, PixelInput, RegionInput
from diptych.data.readable import first_readable
from diptych.data.text import TextInput, WordInput, WordPieceInput
from diptych.data.vocabulary import build_vocabulary, read_vocabulary
from diptych.encoders.backbone import Backbone
from diptych.encoders.bigru import BiGRU, UniGRU
from diptych.encoders.cnn import Grid, PrecomputedGrid
from diptych.encoders.encoder import Encoder
from diptych.encoders.hub import HubBackbone
from diptych.encoders.lite0 import Lite0
from diptych.encoders.pretrained import minilm_folder
from diptych.encoders.regions import Regions
from diptych.encoders.timm_models import TimmBackbone
from diptych.encoders.transformer import TransformerText
from diptych.errors import SettingsError
from diptych.model.retriever import Retriever, Tower
from diptych.settings import TEACHERS
from diptych.targets.teachers import ImageTeacher, Space, TextTeacher

IMAGE_HELP = (
    "regions or grid (stored features), lite0 (EfficientNet-Lite0), hf:ID, timm:NAME, a model folder, "
    "or auto: regions for stored features, lite0 for pictures"
)
TEXT_HELP = (
    "bigru, gru (one way, last state), minilm (all-MiniLM-L6-v2, extra 'demo'), hf:ID, or a model folder"
)

GRUS = ("bigru", "gru")


class Choices(Protocol):
    """The settings these functions read; every recipe that uses them has these fields."""

    # read-only, so that frozen settings fit
    @property
    def image_encoder(self) -> str: ...
    @property
    def text_encoder(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def image_size(self) -> int: ...
    @property
    def unit_input(self) -> bool: ...
    @property
    def train_backbone(self) -> bool: ...
    @property
    def backbone_multiplier(self) -> float: ...
    @property
    def train_text(self) -> bool: ...
    @property
    def text_multiplier(self) -> float: ...
    @property
    def word_dim(self) -> int: ...
    @property
    def word_vectors(self) -> str: ...
    @property
    def vocabulary(self) -> str: ...
    @property
    def min_count(self) -> int: ...


class PoolingSettings(Protocol):
    """The settings that choose an aggregator."""

    @property
    def dim(self) -> int: ...
    @property
    def pool_k(self) -> int: ...
    @property
    def gpo_sequence(self) -> str: ...
    @property
    def gpo_per_dimension(self) -> bool: ...
    @property
    def gpo_data_dependent(self) -> bool: ...


def image_side(settings: Choices, captions: Captions, drop: float) -> tuple[Encoder, ImageInput]:
    """The image encoder and the input it reads."""
    first = first_readable(captions.images)
    stored = isinstance(first, np.ndarray)
    name = settings.image_encoder
    if name == "auto":
        name = "regions" if stored else "lite0"
    if name in ("regions", "grid"):
        if not isinstance(first, np.ndarray):
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
        width = int(first.shape[-1])
        encoder: Encoder = (
            Regions(width, settings.dim, drop=drop)
            if name == "regions"
            else PrecomputedGrid(width, settings.dim, drop=drop, unit_input=settings.unit_input)
        )
        return encoder, RegionInput(width)
    if stored:
        raise SettingsError(
            f"--image_encoder {name} reads pictures, {captions.name} holds features: use regions or grid."
        )
    if settings.unit_input:
        raise SettingsError("--unit_input is for stored CNN vectors: leave it out for pictures.")
    network = backbone(name, settings.image_size)
    return Grid(network, settings.dim, drop=drop, trainable=settings.train_backbone), PixelInput(
        **network.pixel_format
    )


def check_pictures(captions: Captions, model: str) -> None:
    """Refuse stored features where a model reads pictures."""
    if len(captions.images) and isinstance(first_readable(captions.images), np.ndarray):
        raise SettingsError(
            f"{model} reads pictures, {captions.name} holds features: give the data set with its pictures."
        )


def backbone(
    name: str, image_size: int = 224, role: str = "image encoder", known: str = IMAGE_HELP
) -> Backbone:
    """An image backbone by name: lite0, hf:ID, timm:NAME or a folder. An error calls it by its ``role``."""
    if name == "lite0":
        return Lite0(size=image_size)
    if name.startswith("timm:"):
        return TimmBackbone(name, size=image_size)
    if name.startswith("hf:") or Path(name).is_dir():
        return HubBackbone(name.removeprefix("hf:"), size=image_size)
    raise SettingsError(f"there is no {role} '{name}': use {known}.")


def text_side(
    settings: Choices,
    captions: Captions,
    drop: float,
    word_dropout: float = 0.0,
    max_length: int | None = None,
) -> tuple[Encoder, TextInput]:
    """The text encoder and the input it reads; ``word_dropout`` is that of the words a BiGRU embeds.

    Texts are cut at ``max_length`` tokens, and at what a transformer can read.
    """
    name = settings.text_encoder
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
    source = text_source(name)
    frozen = not settings.train_text
    text = TransformerText(source, settings.dim, trainable=settings.train_text, drop=drop if frozen else 0.0)
    own = WordPieceInput(source, augment=0.0 if frozen else drop)
    if max_length is not None and max_length < own.max_length:
        own = WordPieceInput(source, own.augment, max_length)
    return text, own


def image_teacher(
    name: str, image_size: int = 224, space: Space = "pooled", project: int = 0
) -> ImageTeacher:
    """An image teacher by the name of its backbone."""
    network = backbone(name, image_size, "image teacher", "lite0, hf:ID, timm:NAME or a model folder")
    return ImageTeacher(network, PixelInput(**network.pixel_format), space, project)


def text_teacher(name: str, project: int = 0) -> TextTeacher:
    """A text teacher by the name of its transformer."""
    if name in GRUS:
        raise SettingsError(f"'{name}' is not pretrained and cannot teach: use {TEACHERS}.")
    if name != "minilm" and not name.startswith("hf:") and not Path(name).is_dir():
        raise SettingsError(f"there is no text teacher '{name}': use {TEACHERS}.")
    source = text_source(name)
    encoder = TransformerText(source, trainable=False, projection=False)
    return TextTeacher(encoder, WordPieceInput(source, augment=0.0), project)


def pooled(encoder: Encoder, pool: str, settings: PoolingSettings) -> Tower:
    """A tower with the aggregator of that name."""
    if pool == "gpo":
        return Tower(encoder, gpo(settings))
    kinds: dict[str, Aggregator] = {
        "mean": aggregators.Mean(),
        "max": aggregators.Max(),
        "kmax": aggregators.KMax(settings.pool_k),
        "first": aggregators.First(),
        "gem": aggregators.GeM(),
    }
    return Tower(encoder, kinds[pool])


def gpo(settings: PoolingSettings) -> Aggregator:
    """GPO with the generator the settings ask for."""
    outputs = settings.dim if settings.gpo_per_dimension else 1
    if settings.gpo_data_dependent:
        if settings.gpo_sequence != "bigru":
            raise SettingsError(
                "--gpo_data_dependent works only with --gpo_sequence bigru: leave one of them out."
            )
        return aggregators.GPO(aggregators.SortedRowBiGRU(settings.dim, outputs=outputs))
    generators = {
        "bigru": aggregators.CosSinBiGRU,
        "transformer": aggregators.CosSinTransformer,
        "mlp": aggregators.CosSinMLP,
    }
    return aggregators.GPO(generators[settings.gpo_sequence](outputs=outputs))


def multipliers(retriever: Retriever, settings: Choices) -> dict[str, float]:
    """Learning-rate factors of the pretrained parts that are trained."""
    factors = {"image": settings.backbone_multiplier, "text": settings.text_multiplier}
    return {name: factors[name.partition(".")[0]] for name in _pretrained(retriever)}


def train_from(retriever: Retriever, settings: Choices) -> dict[str, int]:
    """The image backbone waits one epoch, so that the new layers do not spoil it."""
    return {name: 1 for name in _pretrained(retriever) if name.startswith("image.")}


def _pretrained(retriever: Retriever) -> list[str]:
    """Prefixes of the parameters that start from pretrained weights and are trained."""
    sides = {"image": retriever.image.encoder, "text": retriever.text.encoder}
    return [f"{side}.encoder.{name}" for side, encoder in sides.items() for name in encoder.pretrained()]


def _vocabulary(settings: Choices, captions: Captions) -> list[str]:
    if not settings.vocabulary:
        return build_vocabulary(captions.texts, settings.min_count)
    return read_vocabulary(settings.vocabulary)


def text_source(name: str) -> str:
    """The folder or hub id of a text transformer by name: minilm, hf:ID or a folder."""
    if name == "minilm":
        return minilm_folder()
    if name.startswith("hf:"):
        return name.removeprefix("hf:")
    if Path(name).is_dir():
        return name
    raise SettingsError(f"there is no text encoder '{name}': use {TEXT_HELP}.")
