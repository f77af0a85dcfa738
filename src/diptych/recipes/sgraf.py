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

from diptych.aggregators import First
from diptych.branches.branch import Branch
from diptych.data.captions import Captions, first_readable, holds_features
from diptych.encoders.attended import SelfAttended, TextualSelfAttention, VisualSelfAttention
from diptych.encoders.cnn import Grid
from diptych.encoders.encoder import Encoder
from diptych.errors import SettingsError
from diptych.interaction.scorer import PairScorer
from diptych.interaction.sgraf import SAF, SGR
from diptych.model import named
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.combine import SwitchAt
from diptych.objectives.objective import Objective
from diptych.objectives.triplet import Triplet
from diptych.recipes.recipe import Recipe
from diptych.registries import IMAGE_ENCODERS, TEXT_ENCODERS
from diptych.settings import TrainingSettings, setting
from diptych.training.method import Method


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """SGRAF in the published numbers: Adam 2e-4 (no decay), batch 128, margin 0.2, clip 2, 1024-d, 256-d similarity."""

    epochs: int = setting(40, "passes over the training texts (SGR on Flickr30K; COCO: 20)", low=1)
    learning_rate: float = setting(2e-4, "base learning rate", low=0)
    weight_decay: float = setting(0.0, "AdamW weight decay (0: Adam, as published)", low=0)
    decay_epoch: int = setting(
        30, "epoch from which the learning rate is multiplied by decay_factor (COCO: 10)", low=0
    )
    image_encoder: str = setting(
        "auto", "image encoder (auto: grid for stored features, lite0 for pictures)", names=IMAGE_ENCODERS
    )
    text_encoder: str = setting("bigru", "text encoder", names=TEXT_ENCODERS)
    dim: int = setting(1024, "joint dimension", low=1)
    similarity_dim: int = setting(256, "width of a similarity vector", low=1)
    sharpness: float = setting(9.0, "factor λ on the affinities before their softmax over regions", low=0)
    steps: int = setting(3, "steps of reasoning (SGR)", low=1)
    regions: int = setting(0, "most regions of an image (0: as many as the first image has)", low=0)
    attention_dropout: float = setting(0.4, "dropout in the self-attentions", low=0, high=0.95)
    word_dropout: float = setting(0.4, "dropout of embedded words (BiGRU)", low=0, high=0.95)
    margin: float = setting(0.2, "margin α of the hinge", low=0)
    all_negatives_epochs: int = setting(
        0, "first epochs that sum over all negatives (0: as published; small data may need some)", low=0
    )
    hinge_reduction: Literal["sum", "mean"] = setting(
        "sum", "sum of the hinges over the batch (as published), or their mean"
    )
    mask_same_image: bool = setting(
        False, "texts of one image are not each other's negatives (off: as published)"
    )
    unit_input: bool = setting(False, "give stored CNN vectors unit length first")
    train_backbone: bool = setting(
        False, "train the CNN or ViT from epoch 1 on (else its features are cached)"
    )
    backbone_multiplier: float = setting(0.1, "learning-rate factor of the image backbone", low=0)
    image_size: int = setting(224, "pixels of the square image the backbone reads", low=32)
    train_text: bool = setting(True, "train the text transformer (else its token states are cached)")
    text_multiplier: float = setting(0.1, "learning-rate factor of the text transformer", low=0)
    word_dim: int = setting(300, "width of BiGRU word vectors", low=1)
    word_vectors: str = setting(
        "", "start word vectors from 'glove' (50-d, extra 'demo') or a file of GloVe or word2vec"
    )
    vocabulary: str = setting("", "published vocabulary JSON (else built from the training texts)")
    min_count: int = setting(4, "least occurrences of a word in the vocabulary", low=1)


@dataclass(frozen=True)
class FiltrationSettings(Settings):
    """SAF as published: SGR's settings in 30 epochs, the last 10 at a tenth of the learning rate (Flickr30K)."""

    epochs: int = setting(30, "passes over the training texts (SAF on Flickr30K; COCO: 20)", low=1)
    decay_epoch: int = setting(
        20, "epoch from which the learning rate is multiplied by decay_factor (COCO: 10)", low=0
    )


def build(kind: Literal["sgr", "saf"], settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    retriever = host(kind, settings, captions)
    return Method(
        retriever,
        objective(settings),
        multipliers=named.multipliers(retriever, settings),
        train_from=named.train_from(retriever, settings),
    )


def objective(settings: Settings) -> Objective:
    """The hinge on the hardest negative; on all of them in the first epochs, where asked for."""
    return hinge(
        settings.margin, settings.mask_same_image, settings.hinge_reduction, settings.all_negatives_epochs
    )


def hinge(
    margin: float, mask: bool, reduction: Literal["sum", "mean"], all_negatives_epochs: int
) -> Objective:
    """The hinge on the hardest negative, after epochs on all of them."""
    hardest = Triplet(margin, "hardest", mask, reduction)
    if not all_negatives_epochs:
        return hardest
    return SwitchAt(Triplet(margin, "all", mask, reduction), hardest, epoch=all_negatives_epochs)


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
    return Retriever(
        Tower(SelfAttended(image, seeing), First()),
        Tower(SelfAttended(text, reading), First()),
        image_input,
        text_input,
        branches,
        scorer,
    )


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
