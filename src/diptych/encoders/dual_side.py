"""What the sides of every dual encoder share: freezing, stored vectors, the scale of the logits."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from diptych.encoders.backbone import Backbone, weights_fingerprint
from diptych.encoders.encoder import Freezable
from diptych.encoders.lora import is_adapter
from diptych.errors import DataError
from diptych.types import Features


class DualSide(Freezable):
    """One side of a dual encoder: its network, and the projection to the joint space.

    The output is a set of vectors of ``dim`` numbers, not of unit length. Its first element is the model's own
    pooled vector; the aggregator ``First`` takes it. Vectors that were computed before (``Features`` of ``dim``
    numbers) pass as they are. A frozen side (``trainable=False``) stays in evaluation mode.
    """

    dim: int
    trainable: bool = True
    adapted: bool = False

    def pretrained(self) -> tuple[str, ...]:
        """All of it, where it is trained."""
        return tuple(name for name, _ in self.named_children()) if self.trainable else ()

    def let_train(self, trainable: bool) -> None:
        """Freeze or unfreeze; where there are adapters, they alone are trained."""
        self.trainable = trainable
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trainable and (is_adapter(name) or not self.adapted))
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Training mode for what is trained."""
        super().train(mode and self.trainable)
        self.training = mode
        return self

    def fingerprint(self) -> str:
        """16 hex digits of the weights and what is computed with them; where they came from does not matter."""
        return weights_fingerprint(self, f"{type(self).__name__} {self.dim}")

    def stored(self, inputs: Features) -> Features:
        """Vectors that were computed before, once their width has been checked."""
        if inputs.is_ids or inputs.values.shape[-1] != self.dim:
            raise DataError(
                f"the stored vectors have {inputs.values.shape[-1]} numbers, this encoder makes {self.dim}: "
                "they come from another model, compute them again."
            )
        return inputs


class Vectors(Backbone):
    """A frozen image side as a backbone: its vectors (B, L, dim) can be computed once and cached."""

    def __init__(self, side: DualSide) -> None:
        nn.Module.__init__(self)  # the pixels are the side's own input's business
        self.side, self.channels = side, side.dim
        self.pixel_format = {}

    def forward(self, pixels: Tensor) -> Tensor:
        """Vectors (B, L, dim)."""
        seen: Features = self.side(pixels)
        return seen.values

    def fingerprint(self) -> str:
        """The side's."""
        return self.side.fingerprint()


class DualImageSide(DualSide):
    """An image side, which also keeps the scale (its logarithm) and the bias of the model's logits."""

    logit_scale: Tensor

    def frozen_part(self) -> nn.Module | None:
        """All of it, unless it is trained."""
        return None if self.trainable else Vectors(self)

    def keep_scale(self, scale: float, bias: float) -> None:
        """Remember the scale s and bias b of the logits e^s · cosine + b; they travel with the weights."""
        self.register_buffer("logit_scale", torch.tensor([scale, bias]))

    @property
    def temperature(self) -> float:
        """The τ of this model: 1 / its logit scale."""
        return float(torch.exp(-self.logit_scale[0]))

    def logits(self, scores: Tensor) -> Tensor:
        """Cosines as the model's own logits: e^s · cosine + b."""
        return scores * self.logit_scale[0].exp() + self.logit_scale[1]
