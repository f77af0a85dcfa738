"""VSE++: hard negatives with fixed pooling (Faghri et al., BMVC 2018), as re-run in the VSE∞ tables.

The same method as VSE∞ with mean pooling on both sides (``--text_pool first`` for the CLS token of a transformer).
The model of 2018, on stored global CNN vectors, is ``--image_encoder grid --unit_input --text_encoder gru --text_pool
first --size_augmentation none --learning_rate 2e-4 --weight_decay 0 --epochs 30 --all_negatives_epochs 0
--warmup_epoch -1``: one layer on the image, and a one-way GRU whose last state is the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.recipes import vse_infinity
from diptych.recipes.recipe import Recipe
from diptych.settings import defaults


@dataclass(frozen=True)
@defaults(image_pool="mean", text_pool="mean")
class Settings(vse_infinity.Settings):
    """VSE∞'s settings with the pooling fixed."""


RECIPE = Recipe("vse-plus-plus", "VSE++: hardest negatives, mean pooling", Settings, vse_infinity.build)
