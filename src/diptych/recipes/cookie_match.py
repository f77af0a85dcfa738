"""COOKIE's image-text matching: a pre-trained model fine-tuned with the hinge on the hardest negatives (A.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.data.captions import Captions
from diptych.model import named
from diptych.objectives.combine import SwitchAt
from diptych.objectives.triplet import Triplet
from diptych.recipes import cookie
from diptych.recipes.recipe import Recipe
from diptych.settings import setting
from diptych.training.method import Method


@dataclass(frozen=True)
class Settings(cookie.Towers):
    """COCO's numbers: AdamW 2e-5, weight decay 1e-4, ×0.1 at half of 20 epochs, 10 % warm-up, batch 320, margin 0.2.

    Flickr30K: 16 epochs, 1e-5, batch 240. ResNeXt-101 has batches of 384 and 288. Pooling is MAX.
    """

    INHERITED = cookie.SHAPE

    init: str = setting("", "run or model folder of 'cookie' to start from (else from scratch)")
    epochs: int = setting(20, "passes over the training texts", low=1)
    batch_size: int = setting(320, "pairs per step, over all processes together", low=2)
    learning_rate: float = setting(2e-5, "base learning rate", low=0)
    schedule: Literal["step", "every", "cosine", "linear"] = setting(
        "step", "how the learning rate falls: once, every few epochs, as a cosine, as a line"
    )
    decay_epoch: int = setting(10, "epoch from which a step schedule applies decay_factor", low=0)
    warmup_share: float = setting(
        0.1, "share of all steps during which the learning rate rises linearly from 0", low=0, high=1
    )
    margin: float = setting(0.2, "margin α of the hinge", low=0)
    all_negatives_epochs: int = setting(
        0, "first epochs that sum over all negatives (from scratch: 1)", low=0
    )
    mask_same_image: bool = setting(
        True, "texts of one image are not each other's negatives (off: as published)"
    )
    augment: bool = setting(True, "crop and flip pictures, and perturb words, as VSE∞ does")
    word_rate: float = setting(
        0.2, "share of the words that are masked, replaced or deleted", low=0, high=0.95
    )


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    settings = cookie.words_of(settings, settings.init)
    rate = settings.word_rate if settings.augment else 0.0
    retriever = cookie.towers(settings, captions, rate, settings.augment)
    if settings.init:
        cookie.start_from(retriever, settings.init)
    every, hardest = (
        Triplet(settings.margin, negatives=negatives, mask_same_image=settings.mask_same_image)
        for negatives in ("all", "hardest")
    )
    return Method(
        retriever,
        SwitchAt(every, hardest, epoch=settings.all_negatives_epochs),
        multipliers=named.multipliers(retriever, settings),
    )


RECIPE = Recipe("cookie-match", "COOKIE: image-text matching", Settings, build)
