"""Every name that a flag takes, by kind; nothing is imported until a name is used.

A line of ``registries.json`` is all that a thing of this package needs to be named: its name, one line of help, and the
module and attribute below ``diptych`` where it is. Flags, help pages, messages and the tables of the docs follow. Of a
command its section of the help page stands behind it; of a format the endings of names that are its signs (``NAME/``: a
folder): a reader is imported only where one of them is found, or where it has none. Formats are tried in the order of
the file, the more particular first.

Other packages add names with entry points of the group ``diptych.KIND`` (docs/extending.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diptych.names import Entry, Registry

_LINES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def _registry(kind: str, group: str, **options: Any) -> Registry:
    """The registry of a kind with its lines of the file; a recipe's help is the title that stands in it."""
    entries = [
        Entry(
            name,
            help,
            f"diptych.{target}",
            section="".join(more) if group == "commands" else "",
            signs=tuple("".join(more).split()) if group == "readers" else (),
        )
        for name, help, target, *more in _LINES[group]
    ]
    return Registry(kind, group, entries, **options)


_BACKBONES, _BACKBONE = ("hf:ID", "timm:NAME", "a model folder"), "diptych.encoders.encoder:Backbone"
_TEXTS, _ENCODER = ("hf:ID", "a model folder"), "diptych.encoders.encoder:Encoder"

IMAGE_ENCODERS = _registry("image encoder", "image_encoders", forms=_BACKBONES, bases=(_ENCODER, _BACKBONE))
TEXT_ENCODERS = _registry("text encoder", "text_encoders", forms=_TEXTS, bases=(_ENCODER,))
BACKBONES = _registry("backbone", "backbones", forms=_BACKBONES, bases=(_BACKBONE,))
POOLINGS = _registry("pooling", "poolings", bases=("diptych.aggregators:Aggregator",))
IMAGE_TEACHERS = _registry(
    "image teacher", "image_teachers", forms=(*_BACKBONES, "a file of vectors"), bases=(_BACKBONE,)
)
TEXT_TEACHERS = _registry(
    "text teacher", "text_teachers", forms=_TEXTS, bases=("diptych.targets.teachers:TextTeacher",)
)
OBJECTIVES = _registry(
    "objective", "objectives", forms=("own",), bases=("diptych.objectives.objective:Objective",), terms=True
)
PROTOCOLS = _registry("protocol", "protocols")
JUDGEMENTS = _registry("set of judgements", "judgements", forms=("a file of corrections (.csv)",))
READERS = _registry("format", "readers")
ENGINES = _registry("engine for URLs of the scheme", "engines", forms=("the path of a folder",), typed=False)
"""The engine of each scheme: a class with ``open``, ``create`` and ``exists``, as ``EmbeddedIndex``, for a URL."""
EXPORTERS = _registry("exporter", "exporters", typed=False)
RECIPES = _registry("recipe", "recipes", typed=False)
"""Recipes; only the one that is used is imported. A plugin adds its own: ``RECIPES["mine"] = Recipe(...)``."""
COMMANDS = _registry("command", "commands", typed=False)

REGISTRIES = (
    IMAGE_ENCODERS, TEXT_ENCODERS, BACKBONES, POOLINGS, IMAGE_TEACHERS, TEXT_TEACHERS, OBJECTIVES, PROTOCOLS,
    JUDGEMENTS, READERS, ENGINES, EXPORTERS, COMMANDS, RECIPES,
)  # fmt: skip
