"""VSE∞ and VSE++ on videos (VSE∞, supplement 1.2): the same methods on sets of frames, with HGR's schedule.

A video is the set of its frame features (MSR-VTT: ResNet-152, 2048 numbers; VATEX: I3D, 1024), each projected by one
layer and pooled like the words of a text. 35 epochs with a learning rate of 1e-4, a tenth of it for the last ten.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.evaluation.video import VideoRetrieval
from diptych.recipes import vse_infinity
from diptych.recipes.recipe import Recipe
from diptych.registries import IMAGE_ENCODERS, POOLINGS
from diptych.settings import IMAGE_HELP, setting


@dataclass(frozen=True)
class Settings(vse_infinity.Settings):
    """VSE∞'s settings with the schedule of its video experiments."""

    image_encoder: str = setting("grid", IMAGE_HELP, names=IMAGE_ENCODERS)
    epochs: int = setting(35, "passes over the training texts", low=1)
    learning_rate: float = setting(1e-4, "base learning rate", low=0)
    decay_epoch: int = setting(25, "epoch from which the learning rate is multiplied by decay_factor", low=0)


@dataclass(frozen=True)
class MeanSettings(Settings):
    """The same with the pooling fixed."""

    image_pool: str = setting("mean", "visual aggregator", names=POOLINGS)
    text_pool: str = setting(
        "mean", "textual aggregator ('first' for the CLS token of a transformer)", names=POOLINGS
    )


def evaluators(settings: Settings) -> tuple[VideoRetrieval, ...]:
    """Recall over the different texts of the videos."""
    return (VideoRetrieval(),)


RECIPE = Recipe(
    "vse-infinity-video", "VSE∞ on frames of videos", Settings, vse_infinity.build, evaluators=evaluators
)
MEAN = Recipe(
    "vse-plus-plus-video",
    "VSE++ on frames of videos",
    MeanSettings,
    vse_infinity.build,
    evaluators=evaluators,
)
