"""Work on whole rows on a GPU: rows of unit length, and how far scores of a batch are from soft labels.

Each is one kernel forward and one backward. Plain torch takes three and eleven for unit rows, a dozen and as many for
the divergence, each over a few thousand numbers: on a GPU they take their time one after the other, not for their work.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from diptych.kernels import row_sizes


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
        """Divide; the lengths are kept."""
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


# mypy: disable-error-code="no-untyped-def, untyped-decorator"


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
