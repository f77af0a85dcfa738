"""What a recipe is: a name, settings, a build function, and the tables of its paper as rows of switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diptych.data.captions import Captions
from diptych.settings import TrainingSettings
from diptych.training.method import Method

RECALLS = {
    "image_to_text_recall@1": "i2t R@1", "image_to_text_recall@5": "R@5", "image_to_text_recall@10": "R@10",
    "text_to_image_recall@1": "t2i R@1", "text_to_image_recall@5": "R@5", "text_to_image_recall@10": "R@10",
    "rsum": "RSUM",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row of an ablation table: its name in the paper, the settings it changes, the published numbers."""

    name: str
    changes: Mapping[str, Any]
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of a paper as switches of its recipe; ``protocol`` says what the published numbers were measured on.

    ``columns`` are the metrics it shows, each with its head.
    """

    title: str
    protocol: str
    rows: tuple[Row, ...]
    columns: Mapping[str, str] = field(default_factory=lambda: dict(RECALLS))


@dataclass(frozen=True)
class Recipe:
    """One paper: ``build(settings, training captions)`` composes the method."""

    name: str
    title: str
    settings: type[TrainingSettings]
    build: Callable[[Any, Captions], Method]
    tables: Mapping[str, Table] = field(default_factory=dict)
