"""VSE∞ and VSE++ on videos (VSE∞, supplement 1.2): the same methods on sets of frames, with HGR's schedule.

A video is the set of its frame features (MSR-VTT: ResNet-152, 2048 numbers; VATEX: I3D, 1024), each projected by one
layer and pooled like the words of a text. 35 epochs with a learning rate of 1e-4, a tenth of it for the last ten.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.evaluation.video import VideoRetrieval
from diptych.recipes import vse_infinity
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import FRAMES
from diptych.settings import defaults


@dataclass(frozen=True)
@defaults(image_encoder="grid", epochs=35, learning_rate=1e-4, decay_epoch=25)
class Settings(vse_infinity.Settings):
    """VSE∞'s settings with the schedule of its video experiments."""

    INHERITED = FRAMES


@dataclass(frozen=True)
@defaults(image_pool="mean", text_pool="mean")
class MeanSettings(Settings):
    """The same with the pooling fixed."""


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
