"""Work on whole rows on a GPU: rows of unit length, and how far scores of a batch are from soft labels.

Each is one kernel forward and one backward. Plain torch takes three and eleven for unit rows, a dozen and as many for
the divergence, each over a few thousand numbers: on a GPU they take their time one after the other, not for their work.

Sorting sets of at most 64 elements on a GPU, by counting: the rank of an element is how many are smaller.

A radix sort makes several passes over memory; a set of a few dozen fits in the registers of one block, where comparing
every pair is cheaper than moving anything. The ranks are kept for the backward pass, which only looks up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from diptych.kernels import row_sizes

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


@triton.jit
def _unit_rows(values, unit, lengths, width, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)
    x = tl.load(values + row * width + i, mask=i < width, other=0.0)
    length = tl.sqrt_rn(tl.sum(x * x, axis=0))
    tl.store(unit + row * width + i, x / (length + eps), mask=i < width)
    tl.store(lengths + row, length)


@triton.jit
def _unit_rows_backward(gradient, unit, lengths, result, width, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)
    g = tl.load(gradient + row * width + i, mask=i < width, other=0.0)
    y = tl.load(unit + row * width + i, mask=i < width, other=0.0)
    length = tl.load(lengths + row)
    # the length does not move a row of zeros
    along = tl.where(length > 0, tl.sum(g * y, axis=0) * (length + eps) / length, 0.0)
    tl.store(result + row * width + i, (g - y * along) / (length + eps), mask=i < width)


class UnitRows(torch.autograd.Function):
    """x (…, D) float32 → x / (‖x‖ + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        unit, lengths = torch.empty_like(x), x.new_empty(x.shape[:-1])
        if x.numel():
            with torch.cuda.device(x.device):
                _unit_rows[(lengths.numel(),)](x, unit, lengths, width, eps, **row_sizes(width))
        ctx.save_for_backward(unit, lengths)
        ctx.eps = eps
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """(g − y (g · y) (‖x‖ + eps) / ‖x‖) / (‖x‖ + eps)."""
        unit, lengths = ctx.saved_tensors
        gradient, width = gradients[0].contiguous(), unit.shape[-1]
        result = torch.empty_like(unit)
        if unit.numel():
            with torch.cuda.device(unit.device):
                _unit_rows_backward[(lengths.numel(),)](
                    gradient, unit, lengths, result, width, ctx.eps, **row_sizes(width)
                )
        return result, None


@triton.jit
def _divergence(
    cosines, scores, temperature, values, moves, slopes, rows, columns, down, right, softness,
    entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)
    inside = i < columns
    t = tl.load(temperature)
    x = tl.load(cosines + row * columns + i, mask=inside, other=float("-inf")) / softness
    s = tl.load(scores + row * down + i * right, mask=inside, other=0.0)
    z = tl.where(inside, s / t, float("-inf"))
    x -= tl.max(x, axis=0)
    z -= tl.max(z, axis=0)
    log_q = x - tl.log(tl.sum(tl.exp(x), axis=0))
    log_p = z - tl.log(tl.sum(tl.exp(z), axis=0))
    q = tl.exp(log_q)
    gap = log_q - log_p if entropy else -log_p
    tl.store(values + row, tl.sum(tl.where(inside, q * gap, 0.0), axis=0))
    move = tl.where(inside, (tl.exp(log_p) - q) / (rows * t), 0.0)
    tl.store(moves + row * columns + i, move, mask=inside)
    tl.store(slopes + row, -tl.sum(move * s, axis=0) / t)


@triton.jit
def _divergence_backward(
    gradient, moves, slopes, of_scores, of_temperature, rows, columns, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)
    g = tl.load(gradient)
    if row < rows:
        move = tl.load(moves + row * columns + i, mask=i < columns, other=0.0)
        tl.store(of_scores + row * columns + i, g * move, mask=i < columns)
    else:  # one program more, for the temperature
        total = tl.zeros((block,), tl.float32)
        for start in range(0, rows, block):
            total += tl.load(slopes + start + i, mask=start + i < rows, other=0.0)
        tl.store(of_temperature, g * tl.sum(total, axis=0))


class Divergence(torch.autograd.Function):
    """Mean over rows of KL(softmax(cosines / softness) ‖ softmax(scores / temperature)), all of them float32.

    ``cosines`` (R, B) get no gradient; ``scores`` (R, B) may be a transposed matrix. Without ``entropy`` the value is
    the cross-entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, cosines: Tensor, scores: Tensor, temperature: Tensor, softness: float, entropy: bool
    ) -> Tensor:
        """The value; what each score would add to it is kept."""
        if cosines.shape != scores.shape:
            raise ValueError(f"cosines {tuple(cosines.shape)} for scores {tuple(scores.shape)}")
        cosines = cosines.float().contiguous()
        rows, columns = scores.shape
        moves = torch.empty(rows, columns, device=scores.device)
        values, slopes = moves.new_empty(rows), moves.new_empty(rows)
        with torch.cuda.device(scores.device):
            _divergence[(rows,)](
                cosines, scores, temperature, values, moves, slopes, rows, columns, *scores.stride(), softness,
                entropy, **row_sizes(columns),
            )  # fmt: skip
        ctx.save_for_backward(moves, slopes)
        return values.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, None, None]:
        """What was kept, times the gradient of the value."""
        moves, slopes = ctx.saved_tensors
        rows, columns = moves.shape
        of_scores, of_temperature = torch.empty_like(moves), moves.new_empty(())
        with torch.cuda.device(moves.device):
            _divergence_backward[(rows + 1,)](
                gradients[0], moves, slopes, of_scores, of_temperature, rows, columns, **row_sizes(columns)
            )
        return None, of_scores, of_temperature, None, None


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
