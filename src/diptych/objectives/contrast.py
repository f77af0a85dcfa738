"""One direction of CODER's diversity-sensitive contrast, and the queues of pairs that a momentum twin saw last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from diptych import ops
from diptych.errors import SettingsError, one_of, positive
from diptych.types import Batch, Embeddings

Diversity = Literal["std", "std_reversed", "std_supplement", "entropy", "none"]
Positive = Literal["clamp", "relu", "raw"]

SMALL = 1e-6  # added to SD and H, so that equal similarities divide by something
LOWEST = -0.999  # log(1 + S) is −∞ at S = −1


@dataclass(frozen=True, slots=True)
class Contrast:
    """l_DCL of one direction, with every reading of its ambiguous places.

    l = (1/A) Σ_n { μ · log(1 + Σ_{q ∈ Q_n} exp((S_nq − γ) / (μ · div_n))) − c · log(1 + S_nn) }      (Eq. 5)

    with div_n = 1 the loss is DCL_I (Eq. 4), which is HAL's. From the anchor's negatives Q_n (Eq. 3)

    SD_n = √(E[S_nq²] − E[S_nq]²),   div_n = 1/σ(ε/SD_n) = 1 + exp(−ε/SD_n),   div_n ← div_n / max_m div_m

    ===================  ===================================================================================
    ``temperature``      μ
    ``margin``           γ
    ``epsilon``          ε
    ``diversity``        ``std`` as above; ``std_reversed``: σ(ε/SD) without the reciprocal, what the prose of
                         the supplement describes; ``std_supplement``: supp. Eq. 7 as printed, whose radicand
                         E[S] − E[S]² is negative for a negative mean and then taken as 0; ``entropy``: supp.
                         Eq. 8, H = −Σ P log2 P in place of SD (nearly constant for cosines); ``none``
    ``pos_scale``        c. The paper prints c = μ (``"mu"``), which drives the modalities apart; HAL and USER
                         leave the positive unscaled, the default
    ``positive``         log(1 + S) of ``clamp``: max(S, −.999); ``relu``: max(S, 0), as HAL; ``raw``: S
    ``stop_gradient``    whether div is a constant; otherwise the optimiser also shrinks SD below the margin
    ``mask_same_image``  whether other pairs of the anchor's image are left out of its negatives and of SD
    ===================  ===================================================================================
    """

    temperature: float = 0.1
    margin: float = 0.3
    epsilon: float = 0.1
    diversity: Diversity = "std"
    pos_scale: float | Literal["mu"] = 1.0
    positive: Positive = "clamp"
    stop_gradient: bool = True
    mask_same_image: bool = True

    def __post_init__(self) -> None:
        positive(self.temperature, "temperature")
        positive(self.epsilon, "epsilon")
        one_of(self.diversity, "diversity", Diversity)
        one_of(self.positive, "positive", Positive)
        if isinstance(self.pos_scale, str) and self.pos_scale != "mu":
            raise SettingsError(f"pos_scale is '{self.pos_scale}': give a number, or mu for the temperature.")

    def negatives(self, anchors: Tensor, others: Tensor) -> Tensor:
        """(A, Q) bool, what counts as a negative given the image ids of anchors (A,) and candidates (Q,).

        Where nothing is masked by image, row n still leaves out column n, its own pair.
        """
        if self.mask_same_image:
            return ~ops.same_image(anchors, others)
        return ~torch.eye(len(anchors), len(others), dtype=torch.bool, device=anchors.device)

    def spread(self, scores: Tensor, negatives: Tensor) -> Tensor:
        """div_n of each anchor, (A,), from its scores (A, Q), divided by the greatest of the A."""
        if self.diversity == "none":
            return scores.new_ones(len(scores))
        if self.stop_gradient:
            scores = scores.detach()
        if self.diversity == "entropy":
            filled = scores.masked_fill(~negatives, torch.finfo(scores.dtype).min)
            bits = torch.log_softmax(filled, dim=1).masked_fill(~negatives, 0.0) / -math.log(2)  # −log2 P
            width = (ops.masked_softmax(scores, negatives) * bits).sum(1)
        else:
            counts = negatives.sum(1).clamp_min(1)
            kept = scores.masked_fill(~negatives, 0.0)
            mean = kept.sum(1) / counts
            if self.diversity == "std_supplement":
                variance = mean - mean**2
            else:
                apart = (kept - mean[:, None]).masked_fill(~negatives, 0.0)
                variance = apart.square().sum(1) / counts
            width = variance.clamp_min(SMALL**2).sqrt()  # the floor keeps the root's gradient finite
        inverse = torch.sigmoid(self.epsilon / (width + SMALL))
        div = inverse if self.diversity == "std_reversed" else 1.0 / inverse
        return div / div.max()

    def __call__(self, scores: Tensor, negatives: Tensor, positives: Tensor, div: Tensor) -> Tensor:
        """The loss of one direction: scores and mask (A, Q), positive scores (A,), div (A,)."""
        z = (scores - self.margin) / (self.temperature * div[:, None])
        total = torch.logsumexp(z.masked_fill(~negatives, -torch.inf), dim=1)
        push = self.temperature * torch.logaddexp(total, total.new_zeros(()))  # exact softplus, any size
        scale = self.temperature if isinstance(self.pos_scale, str) else self.pos_scale
        return (push - scale * torch.log1p(self._bounded(positives))).mean()

    def _bounded(self, positives: Tensor) -> Tensor:
        if self.positive == "clamp":
            return positives.clamp_min(LOWEST)
        return positives.relu() if self.positive == "relu" else positives


Start = Literal["full", "now"]


class CoupledQueue(nn.Module):
    """The last ``size`` pairs the twin encoded: aligned image and text rows, and the image each came from.

    Row j of ``image`` and ``text`` is one pair; ``ids`` are image ids. Writing wraps around, for any batch up
    to ``size``. Slots not yet filled are never read: ``valid`` masks them. ``start`` says from when the queue
    counts: ``"full"`` or ``"now"`` (as soon as it holds anything). All of it, pointer and fill count too, is
    in buffers.

    In a run of several processes the embeddings, the twin's view and the ids reach objectives gathered in
    rank order, so the queues of all processes stay identical without talking to each other.

    Shapes: image, text (K, D); ids (K,) int64.
    """

    image: Tensor
    text: Tensor
    ids: Tensor
    pointer: Tensor
    count: Tensor

    def __init__(self, size: int = 4096, dim: int = 1024, *, start: Start = "full") -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise SettingsError(
                f"a queue of {size} rows of {dim} numbers cannot hold anything: both must be at least 1."
            )
        self.size, self.start, self.fed = size, one_of(start, "the start of the queue", Start), False
        for side in ("image", "text"):
            self.register_buffer(side, torch.zeros(size, dim))
        self.register_buffer("ids", torch.full((size,), -1, dtype=torch.int64))
        for number in ("pointer", "count"):
            self.register_buffer(number, torch.zeros((), dtype=torch.int64))

    @property
    def valid(self) -> Tensor:
        """(K,) bool, True where a slot was filled."""
        return torch.arange(self.size, device=self.ids.device) < self.count

    @property
    def ready(self) -> Tensor:
        """Whether the queue counts yet; a tensor, since asking the device for a Python bool makes it wait."""
        return self.count >= (self.size if self.start == "full" else 1)

    def feed(self) -> CoupledQueue:
        """Claimed by the one objective that fills and saves the queue."""
        if self.fed:
            raise SettingsError("two objectives feed one queue: give the second a bank, or its own queue.")
        self.fed = True
        return self

    def check(self, batch_size: int) -> None:
        """Refuse a batch (of all processes together) that does not fit."""
        if batch_size > self.size:
            raise SettingsError(
                f"the queue holds {self.size} pairs, fewer than the batch of {batch_size}: "
                f"give --queue_size {batch_size} or more, or a smaller --batch_size."
            )

    @torch.no_grad()
    def push(self, image: Tensor, text: Tensor, ids: Tensor) -> None:
        """Overwrite the oldest rows with a batch of pairs."""
        self.check(len(ids))
        slots = (self.pointer + torch.arange(len(ids), device=self.ids.device)) % self.size
        self.image.index_copy_(0, slots, image.to(self.image.dtype))
        self.text.index_copy_(0, slots, text.to(self.text.dtype))
        self.ids.index_copy_(0, slots, ids)
        self.pointer.add_(len(ids)).remainder_(self.size)
        self.count.add_(len(ids)).clamp_(max=self.size)

    def negatives(self, contrast: Contrast, ids: Tensor) -> Tensor:
        """(B, K) bool, the filled slots that are negatives of anchors with these image ids."""
        if not contrast.mask_same_image:
            return self.valid.expand(len(ids), -1)
        return self.valid & ~ops.same_image(ids, self.ids)

    def average(
        self, contrast: Contrast, anchors: Embeddings, batch: Batch, div_image: Tensor, div_text: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Diversities (B,) of the batch averaged with those in the bank, once it is ready."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not contrast.stop_gradient):
            negatives = self.negatives(contrast, batch.image_ids)
            scores_image, scores_text = anchors.image @ self.text.T, anchors.text @ self.image.T
        return (
            self.mean(div_image, contrast.spread(scores_image, negatives)),
            self.mean(div_text, contrast.spread(scores_text, negatives)),
        )

    def mean(self, in_batch: Tensor, in_bank: Tensor) -> Tensor:
        """½ (batch + bank) once the bank is ready, the batch's alone before."""
        return torch.where(self.ready, 0.5 * (in_batch + in_bank), in_batch)
