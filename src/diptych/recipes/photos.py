"""What measured best on a few hundred to a few thousand captioned pictures: ridge regression, then a little training.

The encoders stay frozen. Training starts from the ridge solution with a small learning rate, stops by itself, and the
solution is kept where training does not beat it on the validation split (docs/results-small-data.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.recipes import ridge
from diptych.recipes.recipe import Recipe
from diptych.settings import defaults


@dataclass(frozen=True)
@defaults(epochs=30, learning_rate=1e-5, schedule="cosine", patience=5)
class Settings(ridge.Settings):
    """Ridge's settings with up to 30 epochs behind it."""


RECIPE = Recipe("photos", "Your own photos: ridge, then a few epochs", Settings, ridge.build)
