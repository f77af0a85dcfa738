"""Sorting every channel of every set, the costly part of pooling by rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych import kernels, ops
from diptych.types import Features

SHORT = 64  # elements of a set that the kernel for GPUs sorts; longer ones go through torch.sort
WORTH_A_THREAD = 2**18  # values to sort; a thread costs as much as sorting about a tenth of this


def sort_sets(features: Features) -> Tensor:
    """Each channel in ascending order, invalid places first, as zeros: (B, L, D) → (B, D, L).

    Ascending, so that the k-th largest value of a set lies at L − k whatever its size, and NaN among the
    valid values counts as the largest and is never hidden. Channels before places, since contiguous rows sort
    3 times faster. On the CPU the order comes from numpy, whose vectorised sort takes a quarter of the time; on a
    GPU sets of at most 64 elements are sorted by a kernel of our own (``kernels/rows.py``).
    """
    found = features.values
    fits = found.dtype != torch.float64 and found.shape[1] <= SHORT and kernels.on_gpu(found.device)
    if fits and not torch.compiler.is_compiling():
        from diptych.kernels.rows import SortSets

        return SortSets.apply(features.values, features.mask)  # type: ignore[no-any-return, no-untyped-call]
    values = ops.at_least_float32(features.values)
    if values.device.type == "cpu" and not (torch.compiler.is_compiling() or ops.is_exported()):
        ranked: Tensor = _SortOnCPU.apply(values, features.mask)  # type: ignore[no-untyped-call]
        return ranked
    rows = values.transpose(1, 2).masked_fill(~features.mask[:, None], -torch.inf).contiguous()  # (B, D, L)
    return rows.sort(dim=-1).values.masked_fill(_places_of_invalid(features.mask), 0)


def _places_of_invalid(mask: Tensor) -> Tensor:
    """Where the invalid elements lie once sorted: the first L − N places, (B, 1, L)."""
    length = mask.shape[1]
    first_valid = length - mask.sum(dim=1, keepdim=True)  # (B, 1)
    return (torch.arange(length, device=mask.device) < first_valid)[:, None]


class _SortOnCPU(torch.autograd.Function):
    """The same work in few passes: buffers are filled in place, nothing is masked when all is valid."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        padded = not bool(mask.all())
        rows = values.transpose(1, 2).clone(memory_format=torch.contiguous_format)  # (B, D, L)
        if padded:
            rows.masked_fill_(~mask[:, None], -torch.inf)
        if ctx.needs_input_grad[0]:
            order = torch.from_numpy(_on_threads(np.argsort, rows.numpy(), np.int64))
            ranked = rows.gather(-1, order)
        else:  # values alone: half the time
            order, ranked = mask, torch.from_numpy(_on_threads(np.sort, rows.numpy(), rows.numpy().dtype))
        if padded:
            ranked.masked_fill_(_places_of_invalid(mask), 0)
        ctx.save_for_backward(order, mask)
        ctx.padded = padded
        return ranked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        order, mask = ctx.saved_tensors
        gradient = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        gradient.scatter_(-1, order, gradients[0])
        if ctx.padded:
            gradient.masked_fill_(~mask[:, None], 0)
        return gradient.transpose(1, 2), None


def _on_threads(work: Callable[..., NDArray[Any]], rows: NDArray[Any], kind: Any) -> NDArray[Any]:
    """``work`` along the last axis, on as many threads as torch may use: numpy releases the lock."""
    threads = min(torch.get_num_threads(), len(rows), rows.size // WORTH_A_THREAD)
    if threads < 2:
        return work(rows, axis=-1)
    found = np.empty(rows.shape, dtype=kind)

    def fill(piece: slice) -> None:
        found[piece] = work(rows[piece], axis=-1)

    bounds = np.linspace(0, len(rows), threads + 1, dtype=int)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, map(slice, bounds[:-1], bounds[1:])))
    return found
