"""What a recipe is: a name, settings, a build function, and the tables of its paper as rows of switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from diptych.data.captions import Captions
from diptych.evaluation.evaluate import Evaluator
from diptych.objectives.expressions import OWN, parse_objective
from diptych.settings import TrainingSettings
from diptych.training.method import Method
from diptych.training.teachers import with_teachers

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
class Figure:
    """How a table is drawn: metrics (each with its words) over the epochs, a line per row, or over the rows."""

    over: Literal["epochs", "rows"]
    metrics: Mapping[str, str]
    unit: str = "%"


@dataclass(frozen=True)
class Table:
    """A table of a paper as switches of its recipe; ``protocol`` says what the published numbers were measured on.

    ``columns`` are the metrics it shows, each with its head; ``figure`` says how it is drawn, if it is.
    """

    title: str
    protocol: str
    rows: tuple[Row, ...]
    columns: Mapping[str, str] = field(default_factory=lambda: dict(RECALLS))
    figure: Figure | None = None


@dataclass(frozen=True)
class Recipe:
    """One paper: ``compose(settings, training captions)`` makes the method in the paper's way.

    ``evaluators(settings)`` measure its runs while they train and in ``diptych evaluate``; by default retrieval alone.
    """

    name: str
    title: str
    settings: type[TrainingSettings]
    compose: Callable[[Any, Captions], Method]
    tables: Mapping[str, Table] = field(default_factory=dict)
    evaluators: Callable[[Any], Sequence[Evaluator]] | None = None

    def build(self, settings: Any, captions: Captions) -> Method:
        """The method for the given training data, with the loss that ``--objective`` asks for."""
        method = self.compose(settings, captions)
        if self.evaluators is not None:
            method = replace(method, evaluators=self.evaluators(settings))
        if settings.objective == OWN:
            return method
        objective = parse_objective(settings.objective, method.objective, settings)
        return with_teachers(replace(method, objective=objective))
