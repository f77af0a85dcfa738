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
from diptych.registries import IMAGE_ENCODERS, POOLINGS
from diptych.settings import IMAGE_HELP, setting
from diptych.training.method import Method

NEW = ("image.encoder.inner.",)  # the projection of the frames, in the place of the grid's


@dataclass(frozen=True)
class Settings(cookie.Towers):
    """MSR-VTT's numbers: AdamW 2e-5, ×0.1 after 5 of 10 epochs, batch 320, margin 0.2, MEAN-pooling."""

    INHERITED = tuple(name for name in cookie.SHAPE if name not in ("image_encoder", "image_size"))

    init: str = setting("", "run or model folder of 'cookie' to start from (else from scratch)")
    image_encoder: str = setting("grid", IMAGE_HELP, names=IMAGE_ENCODERS)
    epochs: int = setting(10, "passes over the training texts", low=1)
    batch_size: int = setting(320, "pairs per step, over all processes together", low=2)
    learning_rate: float = setting(2e-5, "base learning rate", low=0)
    decay_epoch: int = setting(5, "epoch from which a step schedule applies decay_factor", low=0)
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
    settings = cookie.words_of(settings, settings.init)
    retriever = cookie.towers(settings, captions)
    if settings.init:
        cookie.start_from(retriever, settings.init, new=NEW)
    return Method(
        retriever,
        Triplet(settings.margin, negatives="hardest", mask_same_image=settings.mask_same_image),
        multipliers=named.multipliers(retriever, settings),
    )


def evaluators(settings: Settings) -> tuple[VideoRetrieval, ...]:
    """Recall over the texts that ``gallery`` names."""
    return (VideoRetrieval(dedupe_captions=settings.gallery == "different"),)


RECIPE = Recipe("cookie-video", "COOKIE: video-text matching", Settings, build, evaluators=evaluators)
