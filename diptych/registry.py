"""Imports every module that defines parts, so that a saved model finds them by name."""

from __future__ import annotations

import importlib
import pkgutil

import diptych.branches
import diptych.encoders

_MODULES = ["diptych.aggregators", "diptych.data.images", "diptych.data.text", "diptych.retriever"]
_MODULES += [f"diptych.encoders.{module.name}" for module in pkgutil.iter_modules(diptych.encoders.__path__)]
_MODULES += [f"diptych.branches.{module.name}" for module in pkgutil.iter_modules(diptych.branches.__path__)]

for _module in _MODULES:
    importlib.import_module(_module)
