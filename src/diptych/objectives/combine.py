"""Objectives made of objectives: a weighted sum, a switch at an epoch, one at other rows, one in parts, a ramp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from diptych.errors import SettingsError
from diptych.objectives.objective import Combined, Objective
from diptych.types import Batch, Embeddings, Features, Terms


class Sum(Combined):
    """Several objectives at once, each with its weight."""

    def __init__(self, members: Mapping[str, tuple[Objective, float]]) -> None:
        super().__init__()
        self.members = nn.ModuleDict({name: objective for name, (objective, _) in members.items()})
        self.weights = {name: weight for name, (_, weight) in members.items()}

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """Terms of every member, weighted, named ``member.term`` (``member`` when a member has one term)."""
        terms: Terms = {}
        for name, objective in self.members.items():
            found = objective(embeddings, batch)
            for term, value in found.items():
                terms[name if len(found) == 1 else f"{name}.{term}"] = self.weights[name] * value
        return terms

    def collapsed_value(self, pairs: int) -> float | None:
        """The weighted sum where every member knows its own."""
        total = 0.0
        for name, weight in self.weights.items():
            value = self.members[name].collapsed_value(pairs)  # type: ignore[operator]
            if value is None:
                return None
            total += weight * value
        return total


class On(Combined):
    """An objective over other rows than the towers' own.

    ``On(objective, "concept")`` reads both sides of a view. ``On(objective, "image", "augmented.image")`` takes two
    sets of rows by name, ``image``, ``text``, ``VIEW.image`` or ``VIEW.text``, and lets the objective see the first as
    its images and the second as its texts.
    """

    def __init__(self, objective: Objective, first: str, second: str | None = None) -> None:
        super().__init__()
        self.objective = objective
        self.first, self.second = (f"{first}.image", f"{first}.text") if second is None else (first, second)
        for name in (self.first, self.second):
            if name.rpartition(".")[2] not in ("image", "text"):
                raise SettingsError(f"On reads rows '{name}': give image, text, or VIEW.image and VIEW.text.")

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for name in (self.first, self.second) if "." in name)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        return self.objective(self._look(embeddings), batch)

    def participants(self, embeddings: Embeddings) -> Iterable[tuple[Objective, Embeddings]]:
        return [(self.objective, self._look(embeddings))]

    def collapsed_value(self, pairs: int) -> float | None:
        return self.objective.collapsed_value(pairs)

    def _look(self, embeddings: Embeddings) -> Embeddings:
        first, image_features = _rows(embeddings, self.first)
        second, text_features = _rows(embeddings, self.second)
        whole = (self.first, self.second) == ("image", "text")
        scores = embeddings.scores if whole else None
        return Embeddings(first, second, image_features, text_features, scores, embeddings.views)


def _rows(embeddings: Embeddings, name: str) -> tuple[Tensor, Features | None]:
    view, _, side = name.rpartition(".")
    found = embeddings.view(view) if view else embeddings
    return (found.image, found.image_features) if side == "image" else (found.text, found.text_features)


class SwitchAt(Combined):
    """One objective before an epoch, another from it on (VSE∞: all negatives in epoch 0, then the hardest)."""

    def __init__(self, first: Objective, then: Objective, epoch: int) -> None:
        super().__init__()
        self.first, self.then, self.epoch = first, then, epoch
        self.switched = epoch <= 0

    @property
    def current(self) -> Objective:
        return self.then if self.switched else self.first

    def participants(self, embeddings: Embeddings) -> Iterable[tuple[Objective, Embeddings]]:
        return [(self.current, embeddings)]

    def start_epoch(self, epoch: int) -> None:
        """Choose by the epoch alone, so that a resumed run chooses the same."""
        self.switched = epoch >= self.epoch

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        return self.current(embeddings, batch)

    def collapsed_value(self, pairs: int) -> float | None:
        return self.current.collapsed_value(pairs)


class Parted(Combined):
    """The mean of an objective over equal parts of a batch: what GPUs compute that do not see each other's rows.

    Part k of n has the rows from kB/n on. With n processes these are the rows of one process each.
    """

    def __init__(self, objective: Objective, parts: int) -> None:
        super().__init__()
        self.objective, self.parts = objective, parts

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """The mean of each term."""
        if len(batch) % self.parts:
            raise SettingsError(
                f"a batch of {len(batch)} pairs has no {self.parts} equal parts: choose another batch size."
            )
        size = len(batch) // self.parts
        found = [
            self.objective(*_part(embeddings, batch, start, size)) for start in range(0, len(batch), size)
        ]
        return {name: torch.stack([terms[name] for terms in found]).mean() for name in found[0]}

    def participants(self, embeddings: Embeddings) -> Iterable[tuple[Objective, Embeddings]]:
        """None after a step: an objective that keeps rows sees the whole batch."""
        return []

    def collapsed_value(self, pairs: int) -> float | None:
        return self.objective.collapsed_value(pairs // self.parts)


def _part(embeddings: Embeddings, batch: Batch, start: int, size: int) -> tuple[Embeddings, Batch]:
    """Rows of a batch with their embeddings; what a pair scorer read or judged stays behind."""
    rows = slice(start, start + size)
    seen = embeddings.map_rows(lambda values: values[rows])
    scores = None if embeddings.scores is None else embeddings.scores[rows, rows]
    return replace(
        seen, image_features=None, text_features=None, scores=scores, matches=None
    ), batch.map_rows(lambda values: values[rows])


class Ramp(Objective):
    """L · i / n at step i = 0, 1, … of one ``epoch``, L in all others.

    The public code of VSE∞ calls this its warm-up. Adam divides by the size of the gradient, so little of it remains
    apart from the clipping. n is ``steps``.
    """

    position: Tensor

    def __init__(self, objective: Objective, epoch: int, steps: int) -> None:
        super().__init__()
        self.objective, self.epoch, self.steps = objective, epoch, steps
        self.rises = False
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """The objective's terms, times i / n in the epoch of the ramp."""
        terms = self.objective(embeddings, batch)
        if not self.rises:
            return terms
        return {name: value * (self.position / self.steps) for name, value in terms.items()}

    def start_epoch(self, epoch: int) -> None:
        self.rises = epoch == self.epoch

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        if self.rises:
            self.position += 1

    def collapsed_value(self, pairs: int) -> float | None:
        return None if self.rises else self.objective.collapsed_value(pairs)
