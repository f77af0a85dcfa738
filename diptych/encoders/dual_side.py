"""What the sides of every dual encoder share: freezing, stored vectors, the scale of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.encoders.encoder import Encoder
from diptych.errors import DataError
from diptych.types import Features


class DualSide(Encoder):
    """One side of a dual encoder: its network, and the projection to the joint space.

    The output is a set of vectors of ``dim`` numbers, not of unit length. Its first element is the model's own
    pooled vector; the aggregator ``First`` takes it. Vectors that were computed before (``Features`` of ``dim``
    numbers) pass as they are. A frozen side (``trainable=False``) stays in evaluation mode.
    """

    dim: int
    trainable: bool = True

    def pretrained(self) -> tuple[str, ...]:
        """All of it, where it is trained."""
        return tuple(name for name, _ in self.named_children()) if self.trainable else ()

    def freeze(self) -> None:
        """Stop training this side; it goes to evaluation mode."""
        self.let_train(False)

    def unfreeze(self) -> None:
        """Train this side."""
        self.let_train(True)

    def let_train(self, trainable: bool) -> None:
        """Freeze or unfreeze."""
        self.trainable = trainable
        self.requires_grad_(trainable)
        self.train(self.training)

    def train(self, mode: bool = True) -> DualSide:
        """Training mode for what is trained."""
        super().train(mode and self.trainable)
        self.training = mode
        return self

    def stored(self, inputs: Features) -> Features:
        """Vectors that were computed before, once their width has been checked."""
        if inputs.is_ids or inputs.values.shape[-1] != self.dim:
            raise DataError(
                f"the stored vectors have {inputs.values.shape[-1]} numbers, this encoder makes {self.dim}: "
                "they come from another model, compute them again."
            )
        return inputs


class DualImageSide(DualSide):
    """An image side, which also keeps the scale (its logarithm) and the bias of the model's logits."""

    logit_scale: Tensor

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
