"""SCAN: stacked cross attention (Lee et al., ECCV 2018), a baseline of VSE∞, CODER and CUSA.

Words attend to regions, or regions to words, and each is compared with what it attends to. Hinge loss on the hardest
negative. The two directions are trained apart; the published SCAN is the mean of their scores: ``diptych evaluate
RUN_TEXT RUN_IMAGE``. Formulas and what differs between paper and code: docs/methods-baselines.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.data.captions import Captions
from diptych.interaction.scan import SCAN, Direction, Pooling
from diptych.objectives.triplet import triplet
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import LocalSettings, join_towers, local_sides, method
from diptych.settings import defaults, setting
from diptych.training.method import Method

SHARPNESS = {"text": 9.0, "image": 4.0}
POOLING: dict[Direction, Pooling] = {"text": "mean", "image": "lse"}
LSE_SHARPNESS = {"text": 6.0, "image": 5.0}


@dataclass(frozen=True)
@defaults(image_pool="mean", text_pool="mean")
class Settings(LocalSettings):
    """SCAN in the published numbers for Flickr30K: Adam 2e-4 (no decay), batch 128, margin 0.2, clip 2, 1024-d."""

    direction: Direction = setting(
        "text", "who attends: words to regions (text, the paper's t-i) or regions to words (image, i-t)"
    )
    sharpness: float = setting(0.0, "λ₁, factor before the softmax (0: 9 for text, 4 for image)", low=0)
    pooling: Literal["auto", "mean", "lse"] = setting(
        "auto", "how a pair's relevances become its score (auto: mean for text, lse for image)"
    )
    lse_sharpness: float = setting(0.0, "λ₂ of lse (0: 6 for text, 5 for image; COCO's image: 20)", low=0)
    epochs: int = setting(30, "passes over the training texts (COCO: 20)", low=1)
    learning_rate: float = setting(2e-4, "base learning rate (COCO: 5e-4)", low=0)
    decay_epoch: int = setting(15, "epoch from which decay_factor scales the learning rate (COCO: 10)", low=0)


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method: local features of both sides, and the scorer between them."""
    retriever = join_towers(settings, *local_sides(settings, captions), scorer=scorer(settings))
    return method(retriever, triplet(settings), settings)


def scorer(settings: Settings) -> SCAN:
    """The pair scorer, with the published numbers of its direction where the settings leave them open."""
    direction = settings.direction
    return SCAN(
        settings.dim,
        direction,
        settings.sharpness or SHARPNESS[direction],
        POOLING[direction] if settings.pooling == "auto" else settings.pooling,
        settings.lse_sharpness or LSE_SHARPNESS[direction],
    )


RECIPE = Recipe("scan", "SCAN: words attend to regions, or regions to words", Settings, build)
