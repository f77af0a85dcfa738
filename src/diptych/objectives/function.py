"""A loss that is a function."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from diptych.objectives.objective import Objective
from diptych.types import Batch, Embeddings, Terms


class FunctionObjective(Objective):
    """An objective made of ``function(embeddings, batch)``, which returns the loss or named terms of it."""

    def __init__(self, function: Callable[[Embeddings, Batch], Terms | Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """What the function returns; a single loss is called ``loss``."""
        found = self.function(embeddings, batch)
        return {"loss": found} if isinstance(found, Tensor) else found
