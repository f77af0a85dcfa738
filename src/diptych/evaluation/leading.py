"""The first items of ranked lists: (score descending, column ascending), without sorting what lies behind them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COLUMN = 0xFFFFFFFF  # the part of a sorting key that holds the column
SAMPLED = 4  # rows this many times as long as the depth are sampled for a score that the first items reach
LEAST_SAMPLED = 64  # smallest number of the first items that a sample should contain
WIDEST_STRIDE = 16  # between the columns of a sample
SPREAD = 3.0  # standard deviations by which the score of a sample is lowered


def leading(block: Tensor, depth: int) -> Tensor:
    """The first ``depth`` columns of each row of scores (Q, N) by (value descending, column ascending)."""
    if block.dtype != torch.float32:
        return block.sort(dim=1, descending=True, stable=True).indices[:, :depth]
    if block.device.type == "cpu":
        return torch.from_numpy(_leading_on_cpu(block.contiguous().numpy(), depth))
    keys = (block + 0.0).view(torch.int32)
    keys = torch.bitwise_xor(keys, (keys >> 31) & 0x7FFFFFFF).bitwise_not().to(torch.int64) << 32
    keys |= torch.arange(block.shape[1], device=block.device)
    return keys.topk(depth, dim=1, largest=False, sorted=True).values & COLUMN


def _leading_on_cpu(block: NDArray[np.float32], depth: int) -> NDArray[np.int64]:
    """``leading`` by numpy, which sorts integers with vector instructions, several times as fast as torch.

    Of long rows only what reaches a guessed score is sorted. The guess is a score within a sample of the columns, low
    enough that the first ``depth`` should reach it; a row where fewer do is sorted whole. So the order is exact
    whatever the guess.
    """
    rows, columns = block.shape
    if depth * SAMPLED > columns:
        return np.sort(_keys(block, np.arange(columns)), axis=1)[:, :depth] & COLUMN
    stride = max(1, min(WIDEST_STRIDE, depth // LEAST_SAMPLED))
    sample = block[:, ::stride]
    expected = depth / stride
    place = max(0, sample.shape[1] - int(expected + SPREAD * expected**0.5) - 1)
    guess = np.partition(sample, place, axis=1)[:, place]
    flat = np.flatnonzero(block >= guess[:, None])
    starts = np.arange(rows + 1) * columns
    counts = np.diff(np.searchsorted(flat, starts))
    keys = np.full((rows, max(depth, counts.max())), np.iinfo(np.int64).max)
    places = flat - np.repeat(starts[:-1], counts)
    keys[np.arange(keys.shape[1]) < counts[:, None]] = _keys(block.ravel()[flat], places)
    keys.sort(axis=1)
    ranked = keys[:, :depth] & COLUMN
    for row in np.flatnonzero(counts < depth):
        ranked[row] = np.sort(_keys(block[row], np.arange(columns)))[:depth] & COLUMN
    return ranked


def _keys(values: NDArray[np.float32], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """One integer per score: its bits so that larger scores come first, then its column.

    Integers have no ties, so sorting them gives the order of a stable sort. Adding 0 turns −0 into 0, its equal.
    """
    bits = (values + np.float32(0)).view(np.int32)
    order = np.invert(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF)))
    keys: NDArray[np.int64] = order.astype(np.int64)
    keys <<= 32
    return np.bitwise_or(keys, columns, out=keys)
