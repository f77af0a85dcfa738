"""VSE∞ and VSE++ on videos (VSE∞, supplement 1.2): the same methods on sets of frames, with HGR's schedule.

A video is the set of its frame features (MSR-VTT: ResNet-152, 2048 numbers; VATEX: I3D, 1024), each projected by one
layer and pooled like the words of a text. 35 epochs with a learning rate of 1e-4, a tenth of it for the last ten.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych import named
from diptych.recipes import vse_infinity, vse_plus_plus
from diptych.recipes.recipe import Recipe
from diptych.settings import setting


@dataclass(frozen=True)
class Settings(vse_infinity.Settings):
    """VSE∞'s settings with the schedule of its video experiments."""

    image_encoder: str = setting("grid", named.IMAGE_HELP)
    epochs: int = setting(35, "passes over the training texts", low=1)
    learning_rate: float = setting(1e-4, "base learning rate", low=0)
    decay_epoch: int = setting(25, "epoch from which the learning rate is multiplied by decay_factor", low=0)


@dataclass(frozen=True)
class MeanSettings(Settings):
    """The same with the pooling fixed."""

    image_pool: vse_infinity.Pool = setting("mean", "visual aggregator")
    text_pool: vse_infinity.Pool = setting(
        "mean", "textual aggregator ('first' for the CLS token of a transformer)"
    )


RECIPE = Recipe("vse-infinity-video", "VSE∞ on frames of videos", Settings, vse_infinity.build)
MEAN = Recipe("vse-plus-plus-video", "VSE++ on frames of videos", MeanSettings, vse_plus_plus.RECIPE.build)
