"""CODER's diversity-sensitive contrastive loss (DCL), and its insensitive ancestor DCL_I."""

from __future__ import annotations

from diptych import ops
from diptych.errors import SettingsError
from diptych.objectives.contrast import Contrast
from diptych.objectives.objective import Objective
from diptych.objectives.queues import CoupledQueue
from diptych.types import Batch, Embeddings, Terms


class DiversityContrast(Objective):
    """In-batch DCL in both directions: L = l(V, W) + l(W, V)   (Eq. 5; Eq. 4 with ``diversity="none"``).

    ``view`` names the branch whose embeddings are aligned (L_DCL^C on ``"concept"``); None is the towers' own
    (L_DCL^I). With a ``bank``, an anchor's diversity is the mean of its value in the batch and its value in
    the bank, each divided by its own maximum first, as soon as the bank is ready. The bank is only read here:
    the objective that feeds it also saves it (``MomentumContrast``, or ``Enqueue`` where no loss runs on it).

    Shapes: ``embeddings.image`` and ``.text`` (B, D); the bank's rows (K, D).
    """

    bank: CoupledQueue | None

    def __init__(
        self, contrast: Contrast | None = None, *, view: str | None = None, bank: CoupledQueue | None = None
    ) -> None:
        super().__init__()
        self.contrast, self.view = contrast or Contrast(), view
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
        seen = pick(embeddings, self.view)
        scores = ops.cosine_scores(seen.image, seen.text)  # (B, B)
        negatives = self.contrast.negatives(batch.image_ids, batch.image_ids)
        div_image = self.contrast.spread(scores, negatives)
        div_text = self.contrast.spread(scores.T, negatives)
        if self.bank is not None and self.contrast.diversity != "none":
            div_image, div_text = self.bank.average(self.contrast, seen, batch, div_image, div_text)
        positives = scores.diagonal()
        loss = self.contrast(scores, negatives, positives, div_image)
        return {"diversity": loss + self.contrast(scores.T, negatives, positives, div_text)}


def pick(embeddings: Embeddings, view: str | None) -> Embeddings:
    """The towers' own embeddings, or those of the branch called ``view``."""
    if view is None:
        return embeddings
    if view not in embeddings.branches:
        known = ", ".join(embeddings.branches) or "none"
        raise SettingsError(
            f"the objective reads the branch '{view}', but the model's branches are: {known}."
        )
    return embeddings.branches[view]
