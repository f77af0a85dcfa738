"""Packed texts: the tokens of a batch end to end, so that a transformer computes no padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diptych.types import Features

MULTIPLE = 128  # packed lengths are multiples of it: few shapes to compile or to record, and whole tiles of a product
LONGEST = 64  # tokens of a text whose scores stay in registers; batches with a longer one stay padded


@dataclass(frozen=True, slots=True)
class PackedIds(Features):
    """Token ids (B, W) that also say how they are packed into T tokens, T ≥ the valid ones.

    An encoder that does not pack reads ``values`` and ``mask`` as ever.
    """

    places: Tensor  # (T,) int64: the place b · W + w of each token, B · W for the rest
    starts: (
        Tensor  # (B + 1,) int32: the token at which each text begins; the last is the number of valid tokens
    )

    def map(self, change: Callable[[Tensor], Tensor]) -> Features:
        """Apply ``change`` to every tensor (a move, a pin); a slice of rows is no longer packed."""
        before = (self.values, self.mask, self.places, self.starts)
        values, mask, places, starts = (change(tensor) for tensor in before)
        same = all(a.shape == b.shape for a, b in zip((values, mask, places, starts), before, strict=True))
        return PackedIds(values, mask, places, starts) if same else Features(values, mask)


def pack(ids: Features, multiple: int = MULTIPLE) -> Features:
    """The same texts with their packed form, computed on the CPU; unchanged where they are not ids or too long."""
    rows, width = ids.values.shape[:2]
    if not ids.is_ids or width > LONGEST or not rows:
        return ids
    mask = ids.mask.numpy()
    tokens = np.flatnonzero(mask)
    places = np.full(-(-max(len(tokens), 1) // multiple) * multiple, mask.size, dtype=np.int64)
    places[: len(tokens)] = tokens
    starts = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(mask.sum(axis=1), out=starts[1:])
    return PackedIds(ids.values, ids.mask, torch.from_numpy(places), torch.from_numpy(starts))
