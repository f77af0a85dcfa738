"""What every encoder offers: local features in the joint dimension, and what in it is frozen or pretrained."""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from diptych.encoders.backbone import Backbone
from diptych.errors import DataError
from diptych.types import Features, Inputs


class Encoder(nn.Module):
    """Inputs → ``Features`` (B, L, dim).

    An encoder that wraps another passes the questions on: ``frozen_part`` and ``packs`` unchanged, ``pretrained``
    with the name of the wrapped one before each name.
    """

    dim: int

    def forward(self, inputs: Inputs) -> Features:
        """Local features (B, L, dim)."""
        raise NotImplementedError

    def frozen_part(self) -> nn.Module | None:
        """The part whose outputs never change and may be computed once: a ``Backbone``, or a text encoder's ``states``.

        None where everything is trained, or nothing is worth keeping. The encoder accepts that part's outputs in
        the place of its own inputs.
        """
        return None

    def frozen_backbone(self) -> Backbone | None:
        """The frozen part, where it reads pictures: its cells of a picture may be computed once and cached."""
        part = self.frozen_part()
        return part if isinstance(part, Backbone) else None

    def pretrained(self) -> tuple[str, ...]:
        """Names of the submodules that are trained from pretrained weights, which learn with a rate of their own."""
        return ()

    def packs(self, device: torch.device) -> bool:
        """Whether texts that come packed (``data.packing``) are encoded faster on a device than padded ones."""
        return False


class Freezable(Encoder):
    """An encoder from pretrained weights, which are trained or frozen in evaluation mode."""

    trainable: bool

    def freeze(self) -> None:
        """Stop training the pretrained weights; they go to evaluation mode."""
        self.let_train(False)

    def unfreeze(self) -> None:
        """Train the pretrained weights too."""
        self.let_train(True)

    def let_train(self, trainable: bool) -> None:
        """Freeze or unfreeze the pretrained weights."""
        raise NotImplementedError


class AroundNetwork(Freezable):
    """A freezable encoder whose pretrained weights are one submodule."""

    network: str
    """Name of that submodule."""

    def pretrained(self) -> tuple[str, ...]:
        """The network, where it is trained."""
        return (self.network,) if self.trainable else ()

    def let_train(self, trainable: bool) -> None:
        """Freeze or unfreeze the network."""
        self.trainable = trainable
        self.get_submodule(self.network).requires_grad_(trainable)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Training mode for what is trained."""
        super().train(mode)
        self.get_submodule(self.network).train(mode and self.trainable)
        return self


def text_inputs(inputs: Inputs) -> Features:
    """What a text encoder reads, ids or what was computed of them; pictures are refused."""
    if not isinstance(inputs, Features):
        raise DataError(
            "a text encoder reads texts, not pictures: prepare them with the model's own text input."
        )
    return inputs
