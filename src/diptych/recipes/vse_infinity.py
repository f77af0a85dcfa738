"""VSE∞: a visual semantic embedding whose pooling is learned (Chen et al., CVPR 2021).

Two towers; each projects its local features to the joint space and pools them with a Generalized Pooling Operator;
hinge loss on the hardest negative, all negatives in the first epoch; Size Augmentation on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.data.captions import Captions
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.objectives.expressions import triplet
from diptych.recipes.recipe import Recipe
from diptych.registries import IMAGE_ENCODERS, POOLINGS, TEXT_ENCODERS
from diptych.settings import IMAGE_HELP, TrainingSettings, setting
from diptych.training.method import Method


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """VSE∞ in the paper's numbers: AdamW 5e-4, 25 epochs, ×0.1 for the last 10, batch 128, margin 0.2, 1024-d."""

    image_encoder: str = setting("auto", IMAGE_HELP, names=IMAGE_ENCODERS)
    text_encoder: str = setting("bigru", "text encoder", names=TEXT_ENCODERS)
    dim: int = setting(1024, "joint dimension (the paper's d_3)", low=1)
    image_pool: str = setting("gpo", "visual aggregator", names=POOLINGS)
    text_pool: str = setting("gpo", "textual aggregator", names=POOLINGS)
    pool_k: int = setting(2, "k of the kmax aggregator", low=1)
    gpo_sequence: Literal["bigru", "transformer", "mlp"] = setting("bigru", "sequence model of GPO (Table 3)")
    gpo_per_dimension: bool = setting(False, "coefficients per dimension (Table 7)")
    gpo_data_dependent: bool = setting(
        False, "feed the features into the coefficient generator as well (Table 8)"
    )
    size_augmentation: Literal["both", "visual", "none"] = setting(
        "both", "sides whose elements are dropped at random while training (Table 2)"
    )
    drop: float = setting(0.2, "share of elements that Size Augmentation drops", low=0, high=0.95)
    info_nce_temperature: float = setting(
        0.07, "temperature InfoNCE starts from and learns", low=1e-3, high=1
    )
    margin: float = setting(0.2, "margin α of the hinge", low=0)
    all_negatives_epochs: int = setting(1, "first epochs that sum over all negatives", low=0)
    mask_same_image: bool = setting(
        True, "texts of one image are not each other's negatives (off: as published)"
    )
    warmup_epoch: int = setting(
        1, "epoch during which the learning rate rises linearly from 0 (-1: never)", low=-1
    )
    unit_input: bool = setting(False, "give stored CNN vectors unit length first, as VSE++ did in 2018")
    train_backbone: bool = setting(
        False, "train the CNN or ViT from epoch 1 on (else its features are cached)"
    )
    backbone_multiplier: float = setting(
        0.1, "learning-rate factor of the image backbone (BUTD, WSL: 0.01)", low=0
    )
    image_size: int = setting(224, "pixels of the square image the backbone reads (the paper: 512)", low=32)
    train_text: bool = setting(True, "train the text transformer (else its token states are cached)")
    text_multiplier: float = setting(0.1, "learning-rate factor of the text transformer", low=0)
    word_dim: int = setting(300, "width of BiGRU word vectors", low=1)
    word_vectors: str = setting(
        "", "start word vectors from 'glove' (50-d, extra 'demo') or a file of GloVe or word2vec"
    )
    vocabulary: str = setting("", "published vocabulary JSON (else built from the training texts)")
    min_count: int = setting(4, "least occurrences of a word in the vocabulary", low=1)


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    visual = settings.drop if settings.size_augmentation in ("both", "visual") else 0.0
    textual = settings.drop if settings.size_augmentation == "both" else 0.0
    image, image_input = named.image_side(settings, captions, drop=visual)
    text, text_input = named.text_side(settings, captions, drop=textual)
    retriever = Retriever(
        named.pooled(image, settings.image_pool, settings),
        named.pooled(text, settings.text_pool, settings),
        image_input,
        text_input,
    )
    return Method(
        retriever,
        triplet(settings),
        multipliers=named.multipliers(retriever, settings),
        train_from=named.train_from(retriever, settings),
    )


RECIPE = Recipe("vse-infinity", "VSE∞: learned pooling (GPO)", Settings, build)
