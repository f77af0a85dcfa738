"""One short file per paper; ``RECIPES`` names them, and imports the one that is asked for."""

from __future__ import annotations

from diptych.registries import RECIPES

__all__ = ["RECIPES"]
