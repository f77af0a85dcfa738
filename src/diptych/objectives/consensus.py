"""CVSE's agreement of both sides about the concepts of a pair."""

from __future__ import annotations

import torch

from diptych.objectives.objective import Objective
from diptych.types import Batch, Embeddings, Terms


class Agreement(Objective):
    """Σ_b KL(p^T_b ‖ p^I_b) of two distributions over concepts, (B, g) each, summed over the batch.

    ``view`` names the rows p^I and p^T; rows are probabilities already.
    """

    def __init__(self, view: str) -> None:
        super().__init__()
        self.view = view

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """The term ``agreement``."""
        rows = embeddings.view(self.view)
        image, text = rows.image, rows.text
        least = torch.finfo(image.dtype).tiny
        return {"agreement": torch.xlogy(text, text).sum() - (text * image.clamp_min(least).log()).sum()}
