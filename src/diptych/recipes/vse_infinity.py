"""VSE∞: a visual semantic embedding whose pooling is learned (Chen et al., CVPR 2021).

Two towers; each projects its local features to the joint space and pools them with a Generalized Pooling Operator;
hinge loss on the hardest negative, all negatives in the first epoch; Size Augmentation on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.data.captions import Captions
from diptych.evaluation.video import VideoRetrieval
from diptych.objectives.triplet import triplet
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import FRAMES, HingeSettings, TowerSettings, method, towers
from diptych.settings import defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(all_negatives_epochs=1, mask_same_image=True, warmup_epoch=1)
class Settings(TowerSettings, HingeSettings):
    """VSE∞ in the paper's numbers: AdamW 5e-4, 25 epochs, ×0.1 for the last 10, batch 128, margin 0.2, 1024-d."""

    size_augmentation: Literal["both", "visual", "none"] = setting(
        "both", "sides whose elements are dropped at random while training (Table 2)"
    )
    drop: float = setting(0.2, "share of elements that Size Augmentation drops", low=0, high=0.95)
    info_nce_temperature: float = setting(
        0.07, "temperature InfoNCE starts from and learns", low=1e-3, high=1
    )


@dataclass(frozen=True)
@defaults(image_pool="mean", text_pool="mean")
class MeanSettings(Settings):
    """VSE++: hard negatives with fixed pooling (Faghri et al., BMVC 2018), as re-run in the VSE∞ tables.

    ``--text_pool first`` pools a transformer by its CLS token. The model of 2018, on stored global CNN vectors, is
    ``--image_encoder grid --unit_input --text_encoder gru --text_pool first --size_augmentation none --learning_rate
    2e-4 --weight_decay 0 --epochs 30 --all_negatives_epochs 0 --warmup_epoch -1``: one layer on the image, and a
    one-way GRU whose last state is the text.
    """


@dataclass(frozen=True)
@defaults(image_encoder="grid", epochs=35, learning_rate=1e-4, decay_epoch=25)
class VideoSettings(Settings):
    """VSE∞'s settings with HGR's schedule for videos: 35 epochs at 1e-4, a tenth of it for the last ten.

    A video is the set of its frame features (MSR-VTT: ResNet-152, 2048 numbers; VATEX: I3D, 1024), each projected by
    one layer and pooled like the words of a text (VSE∞, supplement 1.2).
    """

    INHERITED = FRAMES


@dataclass(frozen=True)
@defaults(image_pool="mean", text_pool="mean")
class MeanVideoSettings(VideoSettings):
    """The same with the pooling fixed."""


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    visual = settings.drop if settings.size_augmentation in ("both", "visual") else 0.0
    textual = settings.drop if settings.size_augmentation == "both" else 0.0
    retriever = towers(settings, captions, image_drop=visual, text_drop=textual)
    return method(retriever, triplet(settings), settings)


RECIPE = Recipe("vse-infinity", "VSE∞: learned pooling (GPO)", Settings, build)
PLUS_PLUS = Recipe("vse-plus-plus", "VSE++: hardest negatives, mean pooling", MeanSettings, build)


def video(settings: VideoSettings) -> tuple[VideoRetrieval, ...]:
    """Recall over the different texts of the videos."""
    return (VideoRetrieval(),)


VIDEO = Recipe("vse-infinity-video", "VSE∞ on frames of videos", VideoSettings, build, video)
MEAN_VIDEO = Recipe("vse-plus-plus-video", "VSE++ on frames of videos", MeanVideoSettings, build, video)
