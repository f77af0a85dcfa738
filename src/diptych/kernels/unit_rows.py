"""Rows of unit length on a GPU: one kernel forward and one backward, where plain torch takes three and eleven."""

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
def _forward(values, unit, lengths, width, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)
    x = tl.load(values + row * width + i, mask=i < width, other=0.0)
    length = tl.sqrt_rn(tl.sum(x * x, axis=0))
    tl.store(unit + row * width + i, x / (length + eps), mask=i < width)
    tl.store(lengths + row, length)


@triton.jit
def _backward(gradient, unit, lengths, result, width, eps, block: tl.constexpr):
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
                _forward[(lengths.numel(),)](x, unit, lengths, width, eps, **row_sizes(width))
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
                _backward[(lengths.numel(),)](
                    gradient, unit, lengths, result, width, ctx.eps, **row_sizes(width)
                )
        return result, None
