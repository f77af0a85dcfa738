"""The objectives of a fusion encoder: ITC aligns the two encoders, ITM judges pairs and their hardest negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.errors import SettingsError
from diptych.objectives.contrastive import info_nce
from diptych.objectives.objective import Objective
from diptych.objectives.soft_labels import IMAGE_TEACHER, TEXT_TEACHER, row_cosines, teacher_rows
from diptych.types import Batch, Embeddings, Matches, Terms


class ITC(Objective):
    """Image-text contrast: ``InfoNCE`` with texts of one image as positives, at the fusion encoder's own τ.

    The same τ draws the hard negatives that ``ITM`` judges, so it lives in the model.
    """

    needs = ("matches",)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """The term ``itc``."""
        temperature = _matches(embeddings).temperature
        return {"itc": info_nce(embeddings.image @ embeddings.text.T / temperature, batch.image_ids)}


class ITM(Objective):
    """Image-text matching: cross-entropy of "they match" over B pairs and 2B hard negatives, soft with a teacher.

    ::

        L = 1/3B Σ −[ (1 − y) log p₀ + y log p₁ ],   y = 1 for a pair,
        y = α · max(0, X_ij) for image i and the text of pair j,   y = α · max(0, Y_ij) for text i and the image of j

    ===============  =================================================================================
    paper            argument
    ===============  =================================================================================
    p                softmax of ``embeddings.matches.logits`` (3, B, 2): the pairs, each image beside a
                     wrong text, each text beside a wrong image
    X, Y             cosines of the teachers' vectors ``batch.targets["teacher_image"]``, ``["teacher_text"]``
    α (CUSA)         ``alpha``; 0 is the hard target of X2-VLM
    ===============  =================================================================================

    A row without a negative (every pair of the batch shows its image) is left out of the mean.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """What the fusion encoder compared and, with soft targets, the teachers."""
        return ("matches", "teachers") if self.alpha else ("matches",)

    def __init__(self, alpha: float = 0.0) -> None:
        super().__init__()
        if not 0 <= alpha <= 1:
            raise SettingsError(f"alpha={alpha} is not a share of a match: give a number from 0 to 1.")
        self.alpha = alpha

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """The term ``itm``."""
        matches = _matches(embeddings)
        logits = matches.logits.float()
        target = torch.zeros(logits.shape[:2], device=logits.device)  # (3, B)
        target[0] = 1.0
        if self.alpha:
            teachers = zip((IMAGE_TEACHER, TEXT_TEACHER), matches.negatives, strict=True)
            target[1:] = torch.stack([self._soft(name, batch, drawn) for name, drawn in teachers])
        logp = torch.log_softmax(logits, dim=-1)
        losses = -((1 - target) * logp[..., 0] + target * logp[..., 1])
        counted = torch.cat([torch.ones_like(matches.possible[:1]), matches.possible])
        return {"itm": losses.masked_fill(~counted, 0.0).sum() / counted.sum()}

    def _soft(self, name: str, batch: Batch, drawn: Tensor) -> Tensor:
        """α · max(0, teacher's cosine) of each row of this process and the one drawn for it, (B,)."""
        cosines = row_cosines(teacher_rows(batch, name)[batch.own])
        soft: Tensor = self.alpha * cosines.gather(1, drawn[:, None])[:, 0].clamp(min=0.0)
        return soft


def _matches(embeddings: Embeddings) -> Matches:
    if embeddings.matches is None:
        raise SettingsError(
            "ITC and ITM read what a fusion encoder compared: give the retriever a Fusion scorer."
        )
    return embeddings.matches
