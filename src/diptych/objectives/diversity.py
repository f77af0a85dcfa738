"""CODER's diversity-sensitive contrastive losses: in the batch (DCL, and DCL_I without the diversity), and against
the queues of a momentum twin (M-DCL).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from diptych.errors import SettingsError
from diptych.objectives.contrast import Contrast, CoupledQueue, Diversity, Positive
from diptych.objectives.objective import Objective, given_or_set
from diptych.types import Batch, Embeddings, Terms

USUAL = Contrast()  # CODER's numbers


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
        scores = embeddings.all_scores()  # (B, B)
        negatives = self.contrast.negatives(batch.image_ids, batch.image_ids)
        div_image = self.contrast.spread(scores, negatives)
        div_text = self.contrast.spread(scores.T, negatives)
        if self.bank is not None and self.contrast.diversity != "none":
            div_image, div_text = self.bank.average(self.contrast, embeddings, batch, div_image, div_text)
        positives = scores.diagonal()
        loss = self.contrast(scores, negatives, positives, div_image)
        return {"diversity": loss + self.contrast(scores.T, negatives, positives, div_text)}


class Enqueue(Objective):
    """Keeps a queue filled and saved; by itself where no loss runs against it, and the bank is for diversity alone."""

    needs = ("twin",)

    def __init__(self, queue: CoupledQueue) -> None:
        super().__init__()
        self.queue = queue.feed()

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        return {}

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        twin = twin_of(embeddings)
        self.queue.push(twin.image, twin.text, batch.image_ids)


class MomentumContrast(Enqueue):
    """M-DCL: the batch against the coupled banks, l(V → B_w) + l(W → B_v)   (Eq. 6).

    l is ``Contrast`` (Eq. 5) with anchors v_n, negatives the rows of the opposite bank from before this batch
    was enqueued, and the positive v_n · k_n, where k_n is the twin's key of the same pair on the other side.
    The two-way reading of Eq. 6 is undefined: rows of the bank have no positive in the batch. The term is 0
    until the bank is ready.

    ==================  =====================================================================================
    B_v, B_w            ``queue.image``, ``queue.text``
    ``bank_diversity``  div of the batch averaged with that of the bank (the paper); else the batch's alone
    ``contrast``        μ, γ, ε and the readings of Eq. 5
    ==================  =====================================================================================

    Shapes: embeddings and twin (B, D), queue (K, D).
    """

    def __init__(
        self, queue: CoupledQueue, contrast: Contrast | None = None, *, bank_diversity: bool = True
    ) -> None:
        super().__init__(queue)
        self.contrast, self.bank_diversity = contrast or Contrast(), bank_diversity

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        twin, contrast, queue = twin_of(embeddings), self.contrast, self.queue
        in_batch = embeddings.all_scores()  # (B, B)
        others = contrast.negatives(batch.image_ids, batch.image_ids)
        negatives = queue.negatives(contrast, batch.image_ids)  # (B, K)
        loss = embeddings.image.new_zeros(())
        for anchors, bank, keys, near in (
            (embeddings.image, queue.text, twin.text, in_batch),
            (embeddings.text, queue.image, twin.image, in_batch.T),
        ):
            scores = anchors @ bank.T  # (B, K)
            div = contrast.spread(near, others)
            if self.bank_diversity:
                div = queue.mean(div, contrast.spread(scores, negatives))
            positives = (anchors * keys.detach()).sum(dim=1)
            loss = loss + contrast(scores, negatives, positives, div)
        return {"momentum": torch.where(queue.ready, loss, torch.zeros_like(loss))}


def twin_of(embeddings: Embeddings) -> Embeddings:
    """The twin's view, or the sentence that says it is missing."""
    if "twin" not in embeddings.views:
        raise SettingsError("a momentum queue needs a twin's view of the batch: give the run a Twin.")
    return embeddings.views["twin"]


def dcl(
    settings: Any,
    temperature: float = USUAL.temperature,
    margin: float = USUAL.margin,
    epsilon: float = USUAL.epsilon,
    diversity: Diversity = USUAL.diversity,
    pos_scale: float | Literal["mu"] = USUAL.pos_scale,
    positive: Positive = USUAL.positive,
    mask_same_image: bool | None = None,
) -> Objective:
    """CODER's diversity-sensitive contrast in the batch."""
    mask = given_or_set(mask_same_image, settings, "mask_same_image", True)
    return DiversityContrast(
        Contrast(temperature, margin, epsilon, diversity, pos_scale, positive, mask_same_image=mask)
    )


def dcl_i(
    settings: Any,
    temperature: float = USUAL.temperature,
    margin: float = USUAL.margin,
    mask_same_image: bool | None = None,
) -> Objective:
    """The same without the diversity (HAL)."""
    return dcl(settings, temperature, margin, diversity="none", mask_same_image=mask_same_image)


def m_dcl(
    settings: Any,
    dim: int,
    batch_size: int,
    temperature: float = USUAL.temperature,
    margin: float = USUAL.margin,
    epsilon: float = USUAL.epsilon,
    diversity: Diversity = USUAL.diversity,
    bank_diversity: bool = True,
    queue_size: int | None = None,
    mask_same_image: bool | None = None,
) -> Objective:
    """CODER's contrast against the queues of a momentum twin, which counts once they are full."""
    queue = CoupledQueue(given_or_set(queue_size, settings, "queue_size", 4096), dim)
    queue.check(batch_size)
    mask = given_or_set(mask_same_image, settings, "mask_same_image", True)
    contrast = Contrast(temperature, margin, epsilon, diversity, mask_same_image=mask)
    return MomentumContrast(queue, contrast, bank_diversity=bank_diversity)
