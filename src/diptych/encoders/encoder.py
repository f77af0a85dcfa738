"""What every encoder and image backbone offers, and the small functions that encoders share.

Size Augmentation (``drop_each``, ``drop_words``, ``drop_per_image``) works by mask: each function takes the mask (B, L)
and returns a smaller one, drawn from torch's generator on the mask's device, with no transfer to the host. The element
with the largest draw always stays, so no set is ever emptied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from diptych.errors import DataError, SettingsError
from diptych.types import Features, Inputs
from diptych.weights import update_digest


class Backbone(nn.Module):
    """Pixels (B, 3, H, W) → cells (B, R, channels).

    ``pixel_format`` holds the arguments of the matching ``PixelInput``: the size, normalisation and resizing
    the weights were trained with.
    """

    channels: int

    def __init__(
        self,
        size: int,
        mean: Iterable[float],
        std: Iterable[float],
        resize: str = "stretch",
        interpolation: str = "bilinear",
    ) -> None:
        super().__init__()
        self.pixel_format: dict[str, Any] = {
            "size": size,
            "mean": list(mean),
            "std": list(std),
            "resize": resize,
            "interpolation": interpolation,
        }

    def forward(self, pixels: Tensor) -> Tensor:
        """Cells (B, R, channels), row by row."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """16 hex digits of the architecture and weights; where they were loaded from does not matter."""
        return weights_fingerprint(self, type(self).__name__)


def weights_fingerprint(module: nn.Module, label: str) -> str:
    """16 hex digits of a label and every tensor of a module."""
    digest = hashlib.sha256(label.encode())
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        update_digest(digest, value)
    return digest.hexdigest()[:16]


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

        None where everything is trained. The encoder accepts that part's outputs in the place of its own inputs.
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
        """Whether packed texts (``encoders.transformer``) are encoded faster on a device than padded ones."""
        return False


class Around(Encoder):
    """An encoder around another one, which answers what is frozen and pretrained."""

    wrapped: str
    """Name of the submodule that is the other encoder."""

    def frozen_part(self) -> nn.Module | None:
        return self._inner().frozen_part()

    def pretrained(self) -> tuple[str, ...]:
        return tuple(f"{self.wrapped}.{name}" for name in self._inner().pretrained())

    def _inner(self) -> Encoder:
        found: Encoder = getattr(self, self.wrapped)
        return found


class AroundNetwork(Encoder):
    """An encoder whose pretrained weights are one submodule, trained or frozen in evaluation mode."""

    trainable: bool
    network: str
    """Name of that submodule."""

    def frozen_part(self) -> nn.Module | None:
        return None if self.trainable else self.get_submodule(self.network)

    def pretrained(self) -> tuple[str, ...]:
        return (self.network,) if self.trainable else ()

    def let_train(self, trainable: bool) -> None:
        self.trainable = trainable
        self.get_submodule(self.network).requires_grad_(trainable)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.get_submodule(self.network).train(mode and self.trainable)
        return self


def text_inputs(inputs: Inputs) -> Features:
    """What a text encoder reads, ids or what was computed of them; pictures are refused."""
    if not isinstance(inputs, Features):
        raise DataError("a text encoder reads texts, not pictures: prepare them with its text input.")
    return inputs


def check_stored(inputs: Features, width: int, what: str) -> Features:
    """What was computed before, once its width has been checked."""
    if inputs.is_ids or inputs.values.shape[-1] != width:
        raise DataError(
            f"the stored {what} have {inputs.values.shape[-1]} numbers, this encoder makes {width}: they come from "
            "another model, compute them again."
        )
    return inputs


def fit(features: Features, weight: Tensor) -> Tensor:
    """The values (B, L, C) ready for a linear layer: padding zeroed, cast to the weight's type unless
    autocast will.

    Padding may hold anything, even NaN, which a zero gradient would still carry into the weights (0 · NaN).
    """
    kind = features.values.device.type
    # cast once here: autocast would cast the same values again for every layer that reads them
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return features.values.to(dtype).masked_fill(~features.mask[..., None], 0.0)


@cache
def computes_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for bf16 products; without them they are slower than float32's."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def drop_each(mask: Tensor, rate: float) -> Tensor:
    """Drop every element with probability ``rate``: regions."""
    return keep_drawn(mask, torch.rand(mask.shape, device=mask.device), rate)


DELETED = 0.4  # of the words that Size Augmentation touches: the others are masked or replaced, which states cannot be


def drop_words(mask: Tensor, rate: float) -> Tensor:
    """Drop word states with probability 0.4 · ``rate``, as many as word augmentation deletes; never the first and
    the last of a text, CLS and SEP."""
    place = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, place, -1).amax(dim=1, keepdim=True)
    first = torch.where(mask, place, mask.shape[1]).amin(dim=1, keepdim=True)
    special = mask & ((place == first) | (place == last))
    return special | keep_drawn(mask, torch.rand(mask.shape, device=mask.device), DELETED * rate)


def drop_per_image(mask: Tensor, rate: float) -> Tensor:
    """Draw r ~ U(0, 1) for each image; r ≤ ``rate`` keeps every cell, otherwise each is dropped with ``rate``
    · r.

    This is the rule for grids: at rate 0.2, a fifth of the images stay whole and the others lose 4 to 20 %.
    """
    r = torch.rand(len(mask), 1, device=mask.device)
    return keep_drawn(mask, torch.rand(mask.shape, device=mask.device), torch.where(r <= rate, 0.0, rate * r))


def check_rate(rate: float, name: str = "drop") -> float:
    """The rate itself, if it is one."""
    if not 0.0 <= rate < 1.0:
        raise SettingsError(f"{name}={rate} is not a dropping rate: give a number in [0, 1), such as 0.2.")
    return rate


def keep_drawn(mask: Tensor, draw: Tensor, rate: Tensor | float) -> Tensor:
    """The elements whose ``draw`` (B, L) reaches the rate, and the one with the largest draw of each set."""
    draw = draw.masked_fill(~mask, -1.0)
    return mask & ((draw >= rate) | (draw >= draw.amax(dim=1, keepdim=True)))
