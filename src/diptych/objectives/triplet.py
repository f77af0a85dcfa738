"""Triplet: hinge losses over the score matrix of a batch, as VSE0, VSE++ and VSE∞ use them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from diptych import ops
from diptych.errors import at_least, one_of
from diptych.objectives.combine import SwitchAt
from diptych.objectives.objective import Objective, given_or_set
from diptych.types import Batch, Embeddings, Terms

Negatives = Literal["hardest", "all"]
Reduction = Literal["sum", "mean"]


class Triplet(Objective):
    """Each positive must beat its negatives by a margin, in both directions.

    ::

        text_ij  = [α + S_ij − S_ii]₊        image i, wrong text j
        image_ij = [α + S_ij − S_jj]₊        text j, wrong image i
        hardest:  Σ_i max_j text_ij + Σ_j max_i image_ij       (VSE++, VSE∞ after its first epoch)
        all:      Σ_ij (text_ij + image_ij)                    (VSE0, the first epoch of VSE∞)

    ===================  ============================================================================
    paper                argument
    ===================  ============================================================================
    α                    ``margin``, 0.2
    max / sum of hinges  ``negatives`` = "hardest" / "all"
    batch reduction      ``reduction``: "sum" in VSE++ and VSE∞ (it matters beside gradient clipping);
                         "mean" divides both sums by B
    (absent)             ``mask_same_image``: another text of image i is no negative of i. The published
                         codes do not mask; switch it off to repeat them exactly
    ===================  ============================================================================

    Shapes: S = image · textᵀ (B, B), the diagonal positive. An anchor without negatives adds 0. A batch whose
    scores are all equal has the value 2·B·α: the signature of a collapsed model.
    """

    def __init__(
        self,
        margin: float = 0.2,
        negatives: Negatives = "hardest",
        mask_same_image: bool = True,
        reduction: Reduction = "sum",
    ) -> None:
        super().__init__()
        self.margin = at_least(margin, "the triplet margin", 0)
        self.negatives = one_of(negatives, "negatives", Negatives)
        self.mask_same_image, self.reduction = mask_same_image, one_of(reduction, "reduction", Reduction)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        scores = embeddings.all_scores()  # (B, B)
        positive = scores.diagonal()
        if self.mask_same_image:
            excluded = ops.same_image(batch.image_ids, batch.image_ids)
        else:
            excluded = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        wrong_text = self._hinge(scores - positive[:, None], excluded)
        wrong_image = self._hinge(scores - positive[None, :], excluded)
        if self.negatives == "hardest":
            total = wrong_text.max(dim=1).values.sum() + wrong_image.max(dim=0).values.sum()
        else:
            total = wrong_text.sum() + wrong_image.sum()
        return {"triplet": total / len(scores) if self.reduction == "mean" else total}

    def collapsed_value(self, pairs: int) -> float | None:
        """2·B·α for the hardest negatives, 2α as a mean.

        None for all negatives: the sum of hinges has that value for any untrained model, so it shows nothing.
        """
        if self.negatives == "all":
            return None
        return 2 * self.margin * (1 if self.reduction == "mean" else pairs)

    def _hinge(self, violation: Tensor, excluded: Tensor) -> Tensor:
        """[α + violation]₊, 0 where excluded."""
        return torch.relu(self.margin + violation).masked_fill(excluded, 0)


def triplet(
    settings: Any,
    margin: float | None = None,
    all_negatives_epochs: int | None = None,
    mask_same_image: bool | None = None,
    reduction: Reduction | None = None,
) -> Objective:
    """VSE∞'s hinge: all negatives in the first epochs, then the hardest; what is not given is the recipe's."""
    alpha = given_or_set(margin, settings, "margin", 0.2)
    mask = given_or_set(mask_same_image, settings, "mask_same_image", True)
    kind: Reduction = given_or_set(reduction, settings, "hinge_reduction", "sum")
    every, hardest = (Triplet(alpha, negatives, mask, kind) for negatives in ("all", "hardest"))
    return SwitchAt(
        every, hardest, epoch=given_or_set(all_negatives_epochs, settings, "all_negatives_epochs", 1)
    )
