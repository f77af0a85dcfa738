"""Every name that the golden runs take from inside the package: where a module moves, this file alone follows."""

from __future__ import annotations

from diptych.recipes import RECIPES
from diptych.runs.train import seed_everything

__all__ = ["RECIPES", "seed_everything"]
