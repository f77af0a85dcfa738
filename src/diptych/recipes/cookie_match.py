"""COOKIE's image-text matching: a pre-trained model fine-tuned with the hinge on the hardest negatives (A.1)."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.data.captions import Captions
from diptych.model import named
from diptych.objectives.triplet import triplet
from diptych.recipes import cookie
from diptych.recipes.recipe import Recipe
from diptych.settings import defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(epochs=20, batch_size=320, learning_rate=2e-5, decay_epoch=10, warmup_share=0.1)
class Settings(cookie.Towers):
    """COCO's numbers: AdamW 2e-5, weight decay 1e-4, ×0.1 at half of 20 epochs, 10 % warm-up, batch 320, margin 0.2.

    Flickr30K: 16 epochs, 1e-5, batch 240. ResNeXt-101 has batches of 384 and 288. Pooling is MAX.
    """

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
    rate = settings.word_rate if settings.augment else 0.0
    retriever = cookie.towers(settings, captions, rate, settings.augment)
    return Method(retriever, triplet(settings), multipliers=named.multipliers(retriever, settings))


RECIPE = Recipe("cookie-match", "COOKIE: image-text matching", Settings, build)
