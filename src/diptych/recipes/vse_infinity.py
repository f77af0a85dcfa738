"""VSE∞: a visual semantic embedding whose pooling is learned (Chen et al., CVPR 2021).

Two towers; each projects its local features to the joint space and pools them with a Generalized Pooling Operator;
hinge loss on the hardest negative, all negatives in the first epoch; Size Augmentation on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.data.captions import Captions
from diptych.objectives.triplet import triplet
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import TowerSettings, method, towers
from diptych.settings import setting
from diptych.training.method import Method


@dataclass(frozen=True)
class Settings(TowerSettings):
    """VSE∞ in the paper's numbers: AdamW 5e-4, 25 epochs, ×0.1 for the last 10, batch 128, margin 0.2, 1024-d."""

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


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    visual = settings.drop if settings.size_augmentation in ("both", "visual") else 0.0
    textual = settings.drop if settings.size_augmentation == "both" else 0.0
    retriever = towers(settings, captions, image_drop=visual, text_drop=textual)
    return method(retriever, triplet(settings), settings)


RECIPE = Recipe("vse-infinity", "VSE∞: learned pooling (GPO)", Settings, build)
