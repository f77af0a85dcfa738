"""Bring stored features to the precision a layer computes in."""

from __future__ import annotations

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
