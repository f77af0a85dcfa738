"""What a recipe is: a name, settings and a build function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diptych.data.captions import Captions
from diptych.evaluation.evaluate import Evaluator
from diptych.objectives.expressions import OWN, parse_objective
from diptych.objectives.objective import Objective
from diptych.recipes.provide import provided
from diptych.recipes.towers import start_from, with_words_of
from diptych.settings import TrainingSettings
from diptych.training.method import Method


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

    def build(self, settings: Any, captions: Captions, objective: Objective | None = None) -> Method:
        """The method for the given training data, with the loss that ``--objective`` or an ``objective`` asks for.

        What its terms read beside the pairs is made. With ``--init`` the parts of another model that fit are taken.
        """
        init = settings.init
        method = self.compose(with_words_of(settings, init) if init else settings, captions)
        if self.evaluators is not None:
            method = replace(method, evaluators=self.evaluators(settings))
        if objective is None and settings.objective != OWN:
            objective = parse_objective(
                settings.objective,
                method.objective,
                settings,
                dim=method.retriever.image.dim,
                pairs=len(captions.texts),
                batch_size=settings.batch_size,
                branches=method.retriever.branches,
            )
        if objective is not None:
            method = provided(replace(method, objective=objective), settings, captions)
        return replace(method, notes=[*method.notes, start_from(method.retriever, init)]) if init else method
