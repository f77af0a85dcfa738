"""The plugins that a user asked for.

A model folder never makes a module run: a part of a user's own package is found when that package was imported, when
``DIPTYCH_PLUGINS`` names its module (several with commas), or when an installed package names it as an entry point of
the group ``diptych.plugins``.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import entry_points

from diptych.errors import SettingsError


def import_plugins() -> None:
    """Import the modules that ``DIPTYCH_PLUGINS`` and installed packages name."""
    named = [name.strip() for name in os.environ.get("DIPTYCH_PLUGINS", "").split(",")]
    for name in filter(None, named):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SettingsError(
                f"DIPTYCH_PLUGINS names '{name}', which cannot be imported ({error}): correct the name, "
                "or put its folder on PYTHONPATH."
            ) from error
    for plugin in entry_points(group="diptych.plugins"):
        plugin.load()
