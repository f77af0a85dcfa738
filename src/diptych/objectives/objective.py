"""What every objective is: a pure function of embeddings whose state lives in buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from diptych.types import Batch, Embeddings, Terms

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PairVectors:
    """The towers' unit vectors of all training pairs, as the model is at the end of an epoch.

    Encoded in evaluation mode, without augmentation; float16, on the CPU. Row m of ``text`` belongs to row
    ``image_of[m]`` of ``image``, or to none (−1) where the image could not be read.
    """

    image: Tensor  # (N, D)
    text: Tensor  # (M, D)
    image_of: Tensor  # (M,)


class Objective(nn.Module):
    """Maps embeddings and their batch to named terms; the loss is the sum of the terms.

    ``forward`` is pure: calling it twice gives the same terms. State (queues, centroids) lives in persistent buffers,
    so that it is in the checkpoint, and moves only in the hooks of time. An objective may own
    scalars such as a learned temperature, which are optimised with the retriever's parameters; a classification head
    and other trainable parts belong in the model (a branch, an encoder, a scorer), where several processes keep them
    equal and where they are saved.

    The hooks reach every objective inside another one (``start_epoch``, ``after_step`` and ``after_epoch`` below); an
    objective that holds others does not pass them on.
    """

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """The named, weighted terms of this batch."""
        raise NotImplementedError

    def start_epoch(self, epoch: int) -> None:
        """Called before the first step of each epoch, also after a resume in its middle."""

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        """Called after the optimiser step, without gradient: the one place where buffers move."""

    def after_epoch(self, epoch: int) -> None:
        """Called after the last step of each epoch, without gradient."""

    def collapsed_value(self, pairs: int) -> float | None:
        """The loss of ``pairs`` pairs when all similarities are equal, where that is a known trap; else None."""
        return None

    def __call__(self, embeddings: Embeddings, batch: Batch) -> Terms:
        terms: Terms = super().__call__(embeddings, batch)
        return terms


class SeesPairs(Objective):
    """An objective that looks at all training pairs at the end of some epochs."""

    show_progress = True  # of work that takes long; the training loop sets it

    def wants_pairs(self, epoch: int) -> bool:
        """Whether ``see_pairs`` is to be called at the end of this epoch; the pairs are encoded only then."""
        raise NotImplementedError

    def see_pairs(self, epoch: int, pairs: PairVectors | None) -> None:
        """Called at the end of an epoch, before ``after_epoch``, where ``wants_pairs`` says so.

        Every process calls it, the first with the vectors, the others with None.
        """
        raise NotImplementedError


class Combined(Objective):
    """An objective made of others: it may choose which of them a step asks, and the rows that each of them sees."""

    takes_turns = False  # whether a step may leave parameters without a gradient

    def participants(self, embeddings: Embeddings) -> Iterable[tuple[Objective, Embeddings]]:
        """The members that a step asks, each with its rows; by default all of them with the same rows."""
        return [(member, embeddings) for member in members_of(self)]


def given_or_set(given: T | None, settings: Any, name: str, default: T) -> T:
    """The argument of a term: as given, else the recipe's setting of that name, else the default."""
    found: T = getattr(settings, name, default) if given is None else given
    return found


def needs_of(objective: Objective) -> list[str]:
    """What an objective and those inside it read beside the pairs, as their ``needs`` say."""
    found = [need for part in objective.modules() for need in getattr(part, "needs", ())]
    return list(dict.fromkeys(found))


def takes_turns(objective: Objective) -> bool:
    """Whether a step of this objective may leave parameters out."""
    return any(isinstance(part, Combined) and part.takes_turns for part in objective.modules())


def members_of(objective: Objective) -> Iterator[Objective]:
    """The objectives that this one holds directly, also in lists and dicts of modules."""
    waiting = list(objective.children())
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, Objective):
            yield part
        else:
            waiting = [*part.children(), *waiting]


def start_epoch(objective: Objective, epoch: int) -> None:
    """Tell an objective, then all inside it, that an epoch begins."""
    objective.start_epoch(epoch)
    for member in members_of(objective):
        start_epoch(member, epoch)


def after_step(objective: Objective, embeddings: Embeddings, batch: Batch) -> None:
    """Tell those inside an objective that the step asked, then the objective itself, that the step is done."""
    same_rows = ((member, embeddings) for member in members_of(objective))
    for member, rows in objective.participants(embeddings) if isinstance(objective, Combined) else same_rows:
        after_step(member, rows, batch)
    objective.after_step(embeddings, batch)


def after_epoch(objective: Objective, epoch: int) -> None:
    """Tell all inside an objective, then the objective itself, that an epoch has ended."""
    for member in members_of(objective):
        after_epoch(member, epoch)
    objective.after_epoch(epoch)


class FunctionObjective(Objective):
    """An objective made of ``function(embeddings, batch)``, which returns the loss or named terms of it."""

    def __init__(self, function: Callable[[Embeddings, Batch], Terms | Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """What the function returns; a single loss is called ``loss``."""
        found = self.function(embeddings, batch)
        return {"loss": found} if isinstance(found, Tensor) else found
