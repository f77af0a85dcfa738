"""Sorting sets of at most 64 elements on a GPU, by counting: the rank of an element is how many are smaller.

A radix sort makes several passes over memory; a set of a few dozen fits in the registers of one block, where comparing
every pair is cheaper than moving anything. The ranks are kept for the backward pass, which only looks up.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of one program: 16 for each thread, so that everything stays in registers


@triton.jit
def _forward(
    values, mask, ranked, ranks, length, dim, keep: tl.constexpr, places: tl.constexpr, channels: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * channels + tl.arange(0, channels)
    i = tl.arange(0, places)
    inside = (i < length)[:, None] & (d < dim)[None, :]
    valid = tl.load(mask + row * length + i, mask=i < length, other=0) != 0
    values += row * length * dim
    own = i[:, None] * dim + d[None, :]
    x = tl.load(values + own, mask=inside & valid[:, None], other=0).to(tl.float32)
    rank = tl.zeros((places, channels), tl.int32)
    for j in range(length):
        there = tl.load(mask + row * length + j) != 0
        y = tl.load(values + j * dim + d, mask=(d < dim) & there, other=0).to(tl.float32)
        y = y[None, :]
        # invalid < valid, numbers < NaN, equal ones in the order in which they stand
        less = (y < x) | ((x != x) & (y == y))
        same = (y == x) | ((x != x) & (y != y))
        before = less | (same & (j < i)[:, None])
        both = valid[:, None] & there
        neither = (valid[:, None] == 0) & (there == 0)
        rank += ((both & before) | (valid[:, None] & (there == 0)) | (neither & (j < i)[:, None])).to(
            tl.int32
        )
    place = d[None, :] * length + rank
    tl.store(ranked + row * length * dim + place, tl.where(valid[:, None], x, 0.0), mask=inside)
    if keep:
        tl.store(ranks + row * length * dim + own, rank.to(tl.uint8), mask=inside)


@triton.jit
def _backward(gradient, mask, ranks, result, length, dim, places: tl.constexpr, channels: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * channels + tl.arange(0, channels)
    i = tl.arange(0, places)
    inside = (i < length)[:, None] & (d < dim)[None, :]
    valid = tl.load(mask + row * length + i, mask=i < length, other=0) != 0
    at = row * length * dim
    own = i[:, None] * dim + d[None, :]
    rank = tl.load(ranks + at + own, mask=inside, other=0).to(tl.int32)
    place = d[None, :] * length + rank
    g = tl.load(gradient + at + place, mask=inside & valid[:, None], other=0)
    tl.store(result + at + own, g.to(result.dtype.element_ty), mask=inside)


class SortSets(torch.autograd.Function):
    """(B, L, D) and mask (B, L) → each channel ascending, invalid places first, as zeros: (B, D, L) float32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        """Sort; the ranks are kept where a gradient is wanted."""
        values, mask = values.contiguous(), mask.contiguous()
        rows, length, dim = values.shape
        keep = ctx.needs_input_grad[0]
        ranked = torch.empty(rows, dim, length, dtype=torch.float32, device=values.device)
        ranks = torch.empty(values.shape if keep else 1, dtype=torch.uint8, device=values.device)
        grid, sizes = _grid(rows, length, dim)
        if rows:
            with torch.cuda.device(values.device):
                _forward[grid](values, mask.view(torch.uint8), ranked, ranks, length, dim, keep, **sizes)
        ctx.save_for_backward(ranks, mask)
        ctx.dtype = values.dtype
        return ranked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Every element takes the gradient of the place it went to."""
        ranks, mask = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        rows, length, dim = ranks.shape
        result = torch.empty(rows, length, dim, dtype=ctx.dtype, device=gradient.device)
        grid, sizes = _grid(rows, length, dim)
        if rows:
            with torch.cuda.device(gradient.device):
                _backward[grid](gradient, mask.view(torch.uint8), ranks, result, length, dim, **sizes)
        return result, None


def _grid(rows: int, length: int, dim: int) -> tuple[tuple[int, int], dict[str, int]]:
    places = triton.next_power_of_2(length)
    channels = TILE // max(places, 16)
    return (rows, triton.cdiv(dim, channels)), {"places": places, "channels": channels, "num_warps": 4}
