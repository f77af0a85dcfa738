"""CODER's diversity-sensitive contrastive loss (DCL), and its insensitive ancestor DCL_I."""

from __future__ import annotations

from diptych.errors import SettingsError
from diptych.objectives.contrast import Contrast
from diptych.objectives.objective import Objective
from diptych.objectives.queues import CoupledQueue
from diptych.types import Batch, Embeddings, Terms


class DiversityContrast(Objective):
    """In-batch DCL in both directions: L = l(V, W) + l(W, V)   (Eq. 5; Eq. 4 with ``diversity="none"``).

    L_DCL^I reads the towers' own rows, L_DCL^C those of a view: ``On(DiversityContrast(…), "concept")``. With a
    ``bank``, an anchor's diversity is the mean of its value in the batch and its value in the bank, each divided by
    its own maximum first, as soon as the bank is ready. The bank is only read here: the objective that feeds it also
    saves it (``MomentumContrast``, or ``Enqueue`` where no loss runs on it).

    Shapes: ``embeddings.image`` and ``.text`` (B, D); the bank's rows (K, D).
    """

    bank: CoupledQueue | None

    def __init__(self, contrast: Contrast | None = None, *, bank: CoupledQueue | None = None) -> None:
        super().__init__()
        self.contrast = contrast or Contrast()
        # not a submodule: its buffers belong to the objective that feeds it and must be saved once
        object.__setattr__(self, "bank", bank)

    def start_epoch(self, epoch: int) -> None:
        """Refuse a bank that nobody fills, whose diversity would silently never count."""
        if self.bank is not None and not self.bank.fed:
            raise SettingsError(
                "the diversity reads a bank that no objective feeds: add MomentumContrast or Enqueue on it."
            )

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """One term, ``diversity``."""
        scores = embeddings.all_scores()  # (B, B)
        negatives = self.contrast.negatives(batch.image_ids, batch.image_ids)
        div_image = self.contrast.spread(scores, negatives)
        div_text = self.contrast.spread(scores.T, negatives)
        if self.bank is not None and self.contrast.diversity != "none":
            div_image, div_text = self.bank.average(self.contrast, embeddings, batch, div_image, div_text)
        positives = scores.diagonal()
        loss = self.contrast(scores, negatives, positives, div_image)
        return {"diversity": loss + self.contrast(scores.T, negatives, positives, div_text)}
