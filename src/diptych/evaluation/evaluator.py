"""What measures a model: evaluators, each a group of metrics with its protocol and its primary metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.evaluation.evaluate import evaluate
from diptych.evaluation.judgements import Judgements
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.protocols import EvaluationProtocol
from diptych.evaluation.report import Group, Report
from diptych.model.retriever import Retriever


class Evaluator(Protocol):
    """Measures a model on data; an object without state that changes."""

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        """The metrics of the model on these captions."""
        ...


@dataclass(frozen=True)
class Retrieval:
    """Recall in both directions, RSUM; see ``evaluate``. ``bootstrap`` is the number of resamples, 0 for none."""

    protocol: str | EvaluationProtocol = "plain"
    ties: str = "index"
    bootstrap: int = 0
    judgements: Sequence[str | Judgements] = ()
    equal_texts: bool = False

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        """The group ``retrieval``; its primary metric is ``rsum``."""
        report = evaluate(
            model if data.scored is None else data.scored,
            data.captions,
            protocol=self.protocol,
            ties=self.ties,
            judgements=self.judgements,
            text_store=data.texts,
            bootstrap=self.bootstrap,
            equal_texts=self.equal_texts,
            show_progress=show_progress,
        )
        return report.groups[0]


@runtime_checkable
class Checks(Protocol):
    """An evaluator that can tell before training whether it can read the data."""

    def check(self, model: Retriever, captions: Captions) -> None:
        """Raise what measuring would raise."""
        ...


def check_data(evaluators: Sequence[Evaluator], model: Retriever, captions: Captions) -> None:
    """Refuse data that an evaluator cannot read, before an epoch is spent on them."""
    for evaluator in evaluators:
        if isinstance(evaluator, Checks):
            evaluator.check(model, captions)


def measure(
    evaluators: Sequence[Evaluator], model: Retriever, data: Prepared, *, show_progress: bool = False
) -> Report:
    """Every evaluator's group, in order; the first one's primary metric chooses between models."""
    if not evaluators:
        raise SettingsError("a method needs at least one evaluator: give Retrieval().")
    return Report(tuple(evaluator(model, data, show_progress=show_progress) for evaluator in evaluators))
