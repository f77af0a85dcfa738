"""What measured best on a few hundred to a few thousand captioned pictures: ridge regression, then a little training.

The encoders stay frozen. Training starts from the ridge solution with a small learning rate, stops by itself, and the
solution is kept where training does not beat it on the validation split (docs/results-small-data.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.recipes import ridge
from diptych.recipes.recipe import Recipe
from diptych.settings import setting


@dataclass(frozen=True)
class Settings(ridge.Settings):
    """Ridge's settings with up to 30 epochs behind it."""

    epochs: int = setting(30, "passes over the training texts after the solve, with InfoNCE", low=0)
    learning_rate: float = setting(1e-5, "base learning rate", low=0)
    schedule: Literal["step", "every", "cosine", "linear"] = setting(
        "cosine", "how the learning rate falls: once, every few epochs, as a cosine, as a line"
    )
    patience: int = setting(
        5, "stop after this many epochs without a better validation result (0: never)", low=0
    )


RECIPE = Recipe("photos", "Your own photos: ridge, then a few epochs", Settings, ridge.build)
