"""What a recipe hands to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from diptych.evaluation.evaluate import Evaluator, Retrieval
from diptych.model.retriever import Retriever
from diptych.model.twin import Twin
from diptych.objectives.objective import Objective
from diptych.targets.columns import TargetSource
from diptych.training.views import Augmented

Solver = Callable[..., Mapping[str, float]]
"""Sets weights of a model in closed form, from frozen features of the training data.

``solver(retriever, training, validation, show_progress=…)`` gets both splits as ``Prepared``, or None for the second,
changes the retriever in place, and returns what was chosen on the way, for the log.
"""


@dataclass
class Method:
    """A model, its objective, what the objective reads beside the pairs, how results are measured and parts optimised.

    ``targets`` fill ``batch.targets``, ``views`` make further inputs of each batch (``batch.views``), ``evaluators``
    measure the model after each epoch: the first one's primary metric decides which epoch was the best.

    ``multipliers`` maps a prefix of parameter names to the factor on the learning rate (0.1 for a pretrained text
    encoder); ``train_from`` maps a prefix to the epoch from which those parameters move (a CNN that waits one epoch).
    The longest matching prefix counts. ``momentum`` makes a twin, which makes the momentum view of each batch.
    ``solver`` sets weights in closed form before the first step: what it finds is measured and kept like an epoch, and
    may be all there is. ``betas`` are Adam's. ``notes`` are sentences about how it was made.
    """

    retriever: Retriever
    objective: Objective
    multipliers: Mapping[str, float] = field(default_factory=dict)
    train_from: Mapping[str, int] = field(default_factory=dict)
    momentum: Callable[[Retriever], Twin] | None = None
    targets: Sequence[TargetSource] = ()
    views: Mapping[str, Augmented] = field(default_factory=dict)
    evaluators: Sequence[Evaluator] = (Retrieval(),)
    solver: Solver | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    notes: Sequence[str] = ()

    @cached_property
    def twin(self) -> Twin | None:
        """The slow copy of the retriever, made when it is first asked for: when training begins.

        Until then the parts of the retriever may be replaced.
        """
        return None if self.momentum is None else self.momentum(self.retriever)

    def modules(self) -> dict[str, nn.Module]:
        """Everything whose state belongs in a checkpoint."""
        found: dict[str, nn.Module] = {"retriever": self.retriever, "objective": self.objective}
        if self.twin is not None:
            found["twin"] = self.twin
        return found


def longest_prefix(name: str, prefixes: Mapping[str, float]) -> str | None:
    """The longest of ``prefixes`` that ``name`` starts with."""
    matching = [prefix for prefix in prefixes if name.startswith(prefix)]
    return max(matching, key=len, default=None)
