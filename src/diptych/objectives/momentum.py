"""The loss of a batch against the queues of a momentum twin (M-DCL)."""

from __future__ import annotations

import torch

from diptych.errors import SettingsError
from diptych.objectives.contrast import Contrast
from diptych.objectives.objective import Objective
from diptych.objectives.queues import CoupledQueue
from diptych.types import Batch, Embeddings, Terms


class Enqueue(Objective):
    """Keeps a queue filled and saved when no loss runs against it: the bank is for diversity alone."""

    def __init__(self, queue: CoupledQueue) -> None:
        super().__init__()
        self.queue = queue.feed()

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """No terms."""
        return {}

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        """Enqueue the twin's view of the batch."""
        twin = twin_of(embeddings)
        self.queue.push(twin.image, twin.text, batch.image_ids)


class MomentumContrast(Objective):
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
        super().__init__()
        self.queue = queue.feed()
        self.contrast, self.bank_diversity = contrast or Contrast(), bank_diversity

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """One term, ``momentum``."""
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

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        """Enqueue the twin's view of the batch."""
        twin = twin_of(embeddings)
        self.queue.push(twin.image, twin.text, batch.image_ids)


def twin_of(embeddings: Embeddings) -> Embeddings:
    """The twin's view, or the sentence that says it is missing."""
    if "twin" not in embeddings.views:
        raise SettingsError(
            "a momentum queue needs a twin's view of the batch: give the run a Twin of its retriever."
        )
    return embeddings.views["twin"]
