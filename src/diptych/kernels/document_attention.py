"""Self-attention inside each document of a packed batch, forward and backward, with dropout.

A text of a caption data set has a dozen tokens: queries, keys, values and scores of one head fit in the registers of
one block, so a program does one head of one document from end to end and nothing is padded. The backward pass computes
the scores again and draws the same dropout from the same seed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST_BLOCK = 16  # smallest tile of the matrix units


@triton.jit
def _weights(
    q, k, inside, seed, place, scale, dropout: tl.constexpr, exact: tl.constexpr, block: tl.constexpr
):
    """Softmax weights (block, block), and what dropout makes of them."""
    s = tl.dot(q, tl.trans(k), input_precision=exact) * scale
    s = tl.where(inside[None, :], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    if dropout > 0:
        i = tl.arange(0, block)
        draw = tl.rand(seed, place * block * block + i[:, None] * block + i[None, :])
        keep = tl.where(draw >= dropout, 1.0 / (1.0 - dropout), 0.0)
    else:
        keep = tl.full((block, block), 1.0, tl.float32)
    return p, keep


@triton.jit
def _forward(
    qkv, starts, seeds, out, tokens, documents, heads, scale,
    dropout: tl.constexpr, exact: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    document, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + document)
    i, c = tl.arange(0, block), tl.arange(0, width)
    row = heads * width
    if document == documents:  # the rest of the packed length belongs to nobody
        for start in range(first, tokens, block):
            at = (start + i)[:, None] * row + head * width + c[None, :]
            nothing = tl.zeros((block, width), out.dtype.element_ty)
            tl.store(out + at, nothing, mask=(start + i < tokens)[:, None])
    else:
        inside = i < tl.load(starts + document + 1) - first
        at = (first + i)[:, None] * (3 * row) + head * width + c[None, :]
        q = tl.load(qkv + at, mask=inside[:, None], other=0)
        k = tl.load(qkv + at + row, mask=inside[:, None], other=0)
        v = tl.load(qkv + at + 2 * row, mask=inside[:, None], other=0)
        seed = tl.load(seeds)
        p, keep = _weights(q, k, inside, seed, document * heads + head, scale, dropout, exact, block)
        o = tl.dot((p * keep).to(v.dtype), v, input_precision=exact)
        to = (first + i)[:, None] * row + head * width + c[None, :]
        tl.store(out + to, o.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _backward(
    qkv, starts, seeds, gradient, out, tokens, documents, heads, scale,
    dropout: tl.constexpr, exact: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    document, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + document)
    i, c = tl.arange(0, block), tl.arange(0, width)
    row = heads * width
    if document == documents:
        nothing = tl.zeros((block, width), out.dtype.element_ty)
        for start in range(first, tokens, block):
            at = (start + i)[:, None] * (3 * row) + head * width + c[None, :]
            left = (start + i < tokens)[:, None]
            tl.store(out + at, nothing, mask=left)
            tl.store(out + at + row, nothing, mask=left)
            tl.store(out + at + 2 * row, nothing, mask=left)
    else:
        inside = i < tl.load(starts + document + 1) - first
        at = (first + i)[:, None] * (3 * row) + head * width + c[None, :]
        q = tl.load(qkv + at, mask=inside[:, None], other=0)
        k = tl.load(qkv + at + row, mask=inside[:, None], other=0)
        v = tl.load(qkv + at + 2 * row, mask=inside[:, None], other=0)
        of = (first + i)[:, None] * row + head * width + c[None, :]
        do = tl.load(gradient + of, mask=inside[:, None], other=0)
        seed = tl.load(seeds)
        p, keep = _weights(q, k, inside, seed, document * heads + head, scale, dropout, exact, block)
        dv = tl.dot(tl.trans((p * keep).to(do.dtype)), do, input_precision=exact)
        dp = tl.dot(do, tl.trans(v), input_precision=exact) * keep
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
        dq = tl.dot(ds, k, input_precision=exact)
        dk = tl.dot(tl.trans(ds), q, input_precision=exact)
        tl.store(out + at, dq.to(out.dtype.element_ty), mask=inside[:, None])
        tl.store(out + at + row, dk.to(out.dtype.element_ty), mask=inside[:, None])
        tl.store(out + at + 2 * row, dv.to(out.dtype.element_ty), mask=inside[:, None])


def forward(qkv: Tensor, starts: Tensor, seed: Tensor, heads: int, longest: int, dropout: float) -> Tensor:
    """Queries, keys and values (T, 3 · heads · width) of documents that begin at ``starts`` → (T, heads · width)."""
    out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    _launch(_forward, (qkv, starts, seed, out), heads, longest, dropout)
    return out


def backward(
    gradient: Tensor, qkv: Tensor, starts: Tensor, seed: Tensor, heads: int, longest: int, dropout: float
) -> Tensor:
    """The gradient of queries, keys and values, (T, 3 · heads · width)."""
    out = torch.empty_like(qkv)
    _launch(_backward, (qkv, starts, seed, gradient.contiguous(), out), heads, longest, dropout)
    return out


def _launch(kernel: object, tensors: tuple[Tensor, ...], heads: int, longest: int, dropout: float) -> None:
    qkv, starts = tensors[:2]
    documents, width = len(starts) - 1, qkv.shape[1] // (3 * heads)
    block = max(SMALLEST_BLOCK, triton.next_power_of_2(longest))
    with torch.cuda.device(qkv.device):
        kernel[(documents + 1, heads)](  # type: ignore[index]
            *tensors, len(qkv), documents, heads, width**-0.5,
            dropout=dropout, exact="tf32x3" if qkv.dtype == torch.float32 else "tf32", block=block, width=width,
            num_warps=2 if block <= 16 else 4,
        )  # fmt: skip
