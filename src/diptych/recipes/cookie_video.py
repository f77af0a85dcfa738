"""COOKIE's video-text matching: a pre-trained model fine-tuned on frames of videos with the hinge (A.1).

A video is the set of its frame features (ResNet-152, at most 20). Their projection is new; the transformer that both
sides share, and the text side, come from pre-training. MEAN-pooling or G-pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.data.captions import Captions
from diptych.evaluation.video import VideoRetrieval
from diptych.model import named
from diptych.objectives.triplet import Triplet
from diptych.recipes import cookie
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import FRAMES
from diptych.registries import POOLINGS
from diptych.settings import defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(image_encoder="grid", epochs=10, batch_size=320, learning_rate=2e-5, decay_epoch=5)
class Settings(cookie.Towers):
    """MSR-VTT's numbers: AdamW 2e-5, ×0.1 after 5 of 10 epochs, batch 320, margin 0.2, MEAN-pooling."""

    INHERITED = FRAMES

    image_pool: str = setting("mean", "visual aggregator (the paper: mean or gpo)", names=POOLINGS)
    text_pool: str = setting("mean", "textual aggregator (the paper: mean or gpo)", names=POOLINGS)
    margin: float = setting(0.2, "margin α of the hinge", low=0)
    mask_same_image: bool = setting(
        True, "texts of one video are not each other's negatives (off: as published)"
    )
    gallery: Literal["different", "all"] = setting(
        "different", "texts that validation ranks: each different one once (HGR's rule), or all"
    )


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    retriever = cookie.towers(settings, captions)
    return Method(
        retriever,
        Triplet(settings.margin, negatives="hardest", mask_same_image=settings.mask_same_image),
        multipliers=named.multipliers(retriever, settings),
    )


def evaluators(settings: Settings) -> tuple[VideoRetrieval, ...]:
    """Recall over the texts that ``gallery`` names."""
    return (VideoRetrieval(dedupe_captions=settings.gallery == "different"),)


RECIPE = Recipe("cookie-video", "COOKIE: video-text matching", Settings, build, evaluators=evaluators)
