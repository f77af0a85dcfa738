"""What a recipe is: a name, settings and a build function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diptych.data.captions import Captions
from diptych.evaluation.evaluate import Evaluator
from diptych.objectives.expressions import OWN, parse_objective
from diptych.settings import TrainingSettings
from diptych.training.method import Method
from diptych.training.teachers import with_teachers


@dataclass(frozen=True)
class Recipe:
    """One paper: ``compose(settings, training captions)`` makes the method in the paper's way.

    ``evaluators(settings)`` measure its runs while they train and in ``diptych evaluate``; by default retrieval alone.
    """

    name: str
    title: str
    settings: type[TrainingSettings]
    compose: Callable[[Any, Captions], Method]
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
