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
from diptych.encoders.attended import SelfAttended, TextualSelfAttention, VisualSelfAttention
from diptych.encoders.cnn import Grid
from diptych.encoders.encoder import Encoder
from diptych.errors import SettingsError
from diptych.interaction.sgraf import SAF, SGR
from diptych.interaction.similarity import PairScorer
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.objectives.triplet import triplet
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import HingeSettings, TowerSettings, join_towers, method
from diptych.registries import IMAGE_ENCODERS
from diptych.settings import GRID_HELP, defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(image_pool="first", text_pool="first")
class Settings(TowerSettings, HingeSettings):
    """SGRAF in the published numbers: Adam 2e-4 (no decay), batch 128, margin 0.2, clip 2, 1024-d, 256-d similarity."""

    epochs: int = setting(40, "passes over the training texts (Flickr30K; COCO: 20)", low=1)
    learning_rate: float = setting(2e-4, "base learning rate", low=0)
    weight_decay: float = setting(0.0, "AdamW weight decay (0: Adam, as published)", low=0)
    decay_epoch: int = setting(
        30, "epoch from which the learning rate is multiplied by decay_factor (COCO: 10)", low=0
    )
    image_encoder: str = setting("auto", GRID_HELP, names=IMAGE_ENCODERS)
    similarity_dim: int = setting(256, "width of a similarity vector", low=1)
    sharpness: float = setting(9.0, "factor λ on the affinities before their softmax over regions", low=0)
    steps: int = setting(3, "steps of reasoning (SGR)", low=1)
    regions: int = setting(0, "most regions of an image (0: as many as the first image has)", low=0)
    attention_dropout: float = setting(0.4, "dropout in the self-attentions", low=0, high=0.95)
    word_dropout: float = setting(0.4, "dropout of embedded words (BiGRU)", low=0, high=0.95)


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
    if settings.text_encoder == "gru":
        raise SettingsError(
            "--text_encoder gru gives one vector per text, and a pair scorer reads words: use bigru."
        )
    # published SGRAF projects regions with one linear layer, which is what 'grid' does
    image, image_input = named.image_side(settings, captions, drop=0.0, auto="grid")
    text, text_input = named.text_side(settings, captions, drop=0.0, word_dropout=settings.word_dropout)
    dim, dropout = settings.dim, settings.attention_dropout
    seeing = VisualSelfAttention(
        dim, settings.regions or regions_of(image, captions, settings.image_size), dropout
    )
    reading = TextualSelfAttention(dim, dropout)
    scorer: PairScorer = (
        SGR(dim, settings.similarity_dim, settings.steps, settings.sharpness)
        if kind == "sgr"
        else SAF(dim, settings.similarity_dim, settings.sharpness)
    )
    sides = SelfAttended(image, seeing), SelfAttended(text, reading)
    return join_towers(settings, *sides, image_input, text_input, branches, scorer)


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
