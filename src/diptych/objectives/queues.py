"""Coupled queues: the pairs a momentum twin saw last."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from diptych import ops
from diptych.errors import SettingsError
from diptych.objectives.contrast import Contrast
from diptych.types import Batch, Embeddings

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
        if start not in get_args(Start):
            raise SettingsError(f"the queue starts '{start}': choose {' or '.join(get_args(Start))}.")
        self.size, self.start, self.fed = size, start, False
        self.register_buffer("image", torch.zeros(size, dim))
        self.register_buffer("text", torch.zeros(size, dim))
        self.register_buffer("ids", torch.full((size,), -1, dtype=torch.int64))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

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
            raise SettingsError(
                "two objectives feed the same queue: give the second one as a bank, or its own queue."
            )
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
