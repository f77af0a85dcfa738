"""A loss that grows from 0 during one epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.objectives.objective import Objective
from diptych.types import Batch, Embeddings, Terms


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
        """The ramp rises in its epoch alone."""
        self.rises = epoch == self.epoch

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        """One step further."""
        if self.rises:
            self.position += 1

    def collapsed_value(self, pairs: int) -> float | None:
        """The objective's own, except while it rises."""
        return None if self.rises else self.objective.collapsed_value(pairs)
