"""COOKIE's matching tasks: a pre-trained model fine-tuned with the hinge, on pictures or on frames of videos (A.1).

A video is the set of its frame features (ResNet-152, at most 20). Their projection is new; the transformer that both
sides share, and the text side, come from pre-training. MEAN-pooling or G-pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.data.captions import Captions
from diptych.evaluation.video import VideoRetrieval
from diptych.model import named
from diptych.objectives.triplet import triplet
from diptych.recipes import cookie
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import FRAMES, HingeSettings
from diptych.settings import defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(
    epochs=20, batch_size=320, learning_rate=2e-5, decay_epoch=10, warmup_share=0.1, mask_same_image=True
)
class Settings(cookie.Towers, HingeSettings):
    """COCO's numbers: AdamW 2e-5, weight decay 1e-4, ×0.1 at half of 20 epochs, 10 % warm-up, batch 320, margin 0.2.

    Flickr30K: 16 epochs, 1e-5, batch 240. ResNeXt-101 has batches of 384 and 288. Pooling is MAX.
    """

    augment: bool = setting(True, "crop and flip pictures, and perturb words, as VSE∞ does")
    word_rate: float = setting(0.2, "share of words that are masked, replaced or deleted", low=0, high=0.95)


@dataclass(frozen=True)
@defaults(
    image_encoder="grid", image_pool="mean", text_pool="mean", epochs=10, batch_size=320, learning_rate=2e-5,
    decay_epoch=5, mask_same_image=True,
)  # fmt: skip
class VideoSettings(cookie.Towers, HingeSettings):
    """MSR-VTT's numbers: AdamW 2e-5, ×0.1 after 5 of 10 epochs, batch 320, margin 0.2, MEAN-pooling."""

    INHERITED = FRAMES

    gallery: Literal["different", "all"] = setting(
        "different", "texts that validation ranks: each different one once (HGR's rule), or all"
    )


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    rate = settings.word_rate if settings.augment else 0.0
    retriever = cookie.towers(settings, captions, rate, settings.augment)
    return Method(retriever, triplet(settings), multipliers=named.multipliers(retriever, settings))


def build_video(settings: VideoSettings, captions: Captions) -> Method:
    """The same on sets of frames, which nothing augments."""
    retriever = cookie.towers(settings, captions)
    return Method(retriever, triplet(settings), multipliers=named.multipliers(retriever, settings))


def evaluators(settings: VideoSettings) -> tuple[VideoRetrieval, ...]:
    """Recall over the texts that ``gallery`` names."""
    return (VideoRetrieval(dedupe_captions=settings.gallery == "different"),)


RECIPE = Recipe("cookie-match", "COOKIE: image-text matching", Settings, build)
VIDEO = Recipe("cookie-video", "COOKIE: video-text matching", VideoSettings, build_video, evaluators)
