"""The precision layers compute in: what a device is quick at, and stored features brought to it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from diptych.types import Features


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
