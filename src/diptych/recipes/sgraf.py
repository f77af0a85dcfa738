"""SGRAF: similarity graph reasoning (SGR) and similarity attention filtration (SAF) (Diao et al., AAAI 2021).

A pair scorer looks at the regions of an image and the words of a text together: each word and the whole pair become a
vector of similarity, over which SGR reasons and SAF filters. Global vectors come from self-attention. Hinge loss on the
hardest negative. The two are trained apart; SGRAF is the mean of their scores: ``diptych evaluate RUN_SGR RUN_SAF``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from diptych.branches.branch import Branch
from diptych.data.captions import Captions, first_readable, holds_features
from diptych.data.images import ImageInput
from diptych.data.text import TextInput
from diptych.encoders.attended import SelfAttended, TextualSelfAttention, VisualSelfAttention
from diptych.encoders.cnn import Grid
from diptych.encoders.encoder import Encoder
from diptych.interaction.sgraf import SAF, SGR
from diptych.interaction.similarity import PairScorer
from diptych.model.retriever import Retriever
from diptych.objectives.triplet import triplet
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import LocalSettings, join_towers, local_sides, method
from diptych.settings import defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(image_pool="first", text_pool="first")
class AttendedSettings(LocalSettings):
    """A self-attention on each side, whose vector sums the side up."""

    regions: int = setting(0, "most regions of an image (0: as many as the first image has)", low=0)
    attention_dropout: float = setting(0.4, "dropout in the self-attentions", low=0, high=0.95)
    word_dropout: float = setting(0.4, "dropout of embedded words (BiGRU)", low=0, high=0.95)


@dataclass(frozen=True)
class Settings(AttendedSettings):
    """SGRAF in the published numbers: Adam 2e-4 (no decay), batch 128, margin 0.2, clip 2, 1024-d, 256-d similarity."""

    epochs: int = setting(40, "passes over the training texts (Flickr30K; COCO: 20)", low=1)
    decay_epoch: int = setting(30, "epoch from which decay_factor scales the learning rate (COCO: 10)", low=0)
    similarity_dim: int = setting(256, "width of a similarity vector", low=1)
    sharpness: float = setting(9.0, "factor λ on the affinities before their softmax over regions", low=0)
    steps: int = setting(3, "steps of reasoning (SGR)", low=1)


@dataclass(frozen=True)
@defaults(epochs=30, decay_epoch=20)
class FiltrationSettings(Settings):
    """SAF as published: SGR's settings in 30 epochs, the last 10 at a tenth of the learning rate (Flickr30K)."""


def build(kind: Literal["sgr", "saf"], settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    retriever = host(kind, settings, captions)
    return method(retriever, triplet(settings), settings)


def host(
    kind: Literal["sgr", "saf"],
    settings: Settings,
    captions: Captions,
    branches: Mapping[str, Branch] | None = None,
) -> Retriever:
    """Both towers and the pair scorer; the towers' vectors are the global vectors of the self-attentions."""
    dim = settings.dim
    sides = attended_sides(settings, captions)
    scorer: PairScorer = (
        SGR(dim, settings.similarity_dim, settings.steps, settings.sharpness)
        if kind == "sgr"
        else SAF(dim, settings.similarity_dim, settings.sharpness)
    )
    return join_towers(settings, *sides, branches, scorer)


def attended_sides(
    settings: AttendedSettings, captions: Captions
) -> tuple[Encoder, Encoder, ImageInput, TextInput]:
    """Both encoders with their self-attentions, and what they read."""
    image, text, image_input, text_input = local_sides(settings, captions, settings.word_dropout)
    dim, dropout = settings.dim, settings.attention_dropout
    regions = settings.regions or regions_of(image, captions, settings.image_size)
    seeing, reading = VisualSelfAttention(dim, regions, dropout), TextualSelfAttention(dim, dropout)
    return SelfAttended(image, seeing), SelfAttended(text, reading), image_input, text_input


def regions_of(encoder: Encoder, captions: Captions, size: int) -> int:
    """How many elements the encoder makes of an image."""
    if holds_features(captions.images):
        return len(np.asarray(first_readable(captions.images)))
    assert isinstance(encoder, Grid)
    with torch.inference_mode():
        cells: torch.Tensor = encoder.backbone(torch.zeros(1, 3, size, size))
    return cells.shape[1]


SGR_RECIPE = Recipe("sgr", "SGR: reasoning over similarity vectors", Settings, partial(build, "sgr"))
SAF_RECIPE = Recipe(
    "saf", "SAF: attention over similarity vectors", FiltrationSettings, partial(build, "saf")
)
