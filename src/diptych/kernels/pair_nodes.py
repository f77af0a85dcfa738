"""SGR and SAF on a GPU, without gradients: affinities → similarity vectors → steps of reasoning.

The large tensors of a pair never leave the chip: softmax → context → difference → square → W_loc → unit length is one
kernel, which writes K-d vectors alone; a step of reasoning is another. Halves are multiplied with float32 sums. The
plain forms are in ``interaction/similarity.py`` and ``interaction/sgraf.py``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_SQUARE = 1e-24  # smallest squared length of a context, as in the plain form

_LOCAL = [
    triton.Config({"BM": 128, "BD": 64}, num_warps=8, num_stages=3),
    triton.Config({"BM": 128, "BD": 64}, num_warps=8, num_stages=2),
    triton.Config({"BM": 64, "BD": 64}, num_warps=4, num_stages=3),
]
_REASON = [
    triton.Config({"BM": 64}, num_warps=4, num_stages=2),
    triton.Config({"BM": 128}, num_warps=8, num_stages=2),
]


@triton.autotune(configs=_LOCAL, key=["d", "K", "RP"])
@triton.jit
def _local_nodes(
    s_ptr, scale_ptr, mask_ptr, v_ptr, e_ptr, gram_ptr, w_ptr, b_ptr, out_ptr,
    n, words, rows, r, d, eps, least,
    RP: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One image against BM words: softmax, context, difference, square, W_loc, unit length."""
    image = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    region = tl.arange(0, RP)
    live = row < rows
    text = row // words
    inside = live[:, None] & (region[None, :] < r)
    at = image * r + region[None, :]
    width = n.to(tl.int64) * r
    s = tl.load(s_ptr + row[:, None] * width + at, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + text[:, None] * width + at, mask=inside, other=0.0)
    there = tl.load(mask_ptr + image * r + region, mask=region < r, other=0)
    logits = tl.where((there != 0)[None, :], s * scale, -1e30)
    logits = logits - tl.max(logits, axis=1)[:, None]
    p = tl.where((region < r)[None, :], tl.exp(logits), 0.0)
    p = p / tl.sum(p, axis=1)[:, None]
    square_at = region[:, None] * r + region[None, :]
    square_inside = (region[:, None] < r) & (region[None, :] < r)
    gram = tl.load(gram_ptr + image * r * r + square_at, mask=square_inside, other=0.0)
    half = gram.dtype
    length = tl.sum(tl.dot(p.to(half), gram) * p, axis=1)
    p = (p / (tl.sqrt(tl.maximum(length, least)) + eps)[:, None]).to(half)
    column = tl.arange(0, K)
    total = tl.zeros((BM, K), dtype=tl.float32)
    for start in range(0, d, BD):
        depth = start + tl.arange(0, BD)
        v = tl.load(
            v_ptr + (image * r + region[:, None]) * d + depth[None, :], mask=(region < r)[:, None], other=0.0
        )
        e = tl.load(e_ptr + row[:, None] * d + depth[None, :], mask=live[:, None], other=0.0)
        difference = tl.dot(p, v) - e.to(tl.float32)
        w = tl.load(w_ptr + depth[:, None] * K + column[None, :])
        total = tl.dot((difference * difference).to(half), w, total)
    total += tl.load(b_ptr + column).to(tl.float32)[None, :]
    total = total / (tl.sqrt(tl.sum(total * total, axis=1)) + eps)[:, None]
    texts = rows // words
    place = (image * texts + text) * (words + 1) + 1 + row % words
    tl.store(out_ptr + place[:, None] * K + column[None, :], total.to(half), mask=live[:, None])


@triton.autotune(configs=_REASON, key=["K"])
@triton.jit
def _reasoned(
    x_ptr, mask_ptr, a_ptr, a_bias_ptr, r_ptr, r_bias_ptr, out_ptr,
    pairs, texts, p,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The nodes of as many whole pairs as fit into BM rows: edges are masked to stay inside a pair."""
    group = BM // p
    row = tl.arange(0, BM)
    pair = tl.program_id(0).to(tl.int64) * group + row // p
    node = row % p
    live = (row < group * p) & (pair < pairs)
    place = pair * p + node
    column = tl.arange(0, K)
    x = tl.load(x_ptr + place[:, None] * K + column[None, :], mask=live[:, None], other=0.0)
    half = x.dtype
    edges = tl.zeros((BM, BM), dtype=tl.float32)
    for start in range(0, K, BN):
        some = start + tl.arange(0, BN)
        a = tl.load(a_ptr + column[:, None] * K + some[None, :])
        asked = tl.dot(x, a) + tl.load(a_bias_ptr + some).to(tl.float32)[None, :]
        part = tl.load(x_ptr + place[:, None] * K + some[None, :], mask=live[:, None], other=0.0)
        edges = tl.dot(asked.to(half), tl.trans(part), edges)
    known = tl.load(mask_ptr + (pair % texts) * p + node, mask=live, other=0)
    open_edge = (row[:, None] // p == row[None, :] // p) & (known != 0)[None, :]
    edges = tl.where(open_edge, edges, -1e30)
    edges = tl.exp(edges - tl.max(edges, axis=1)[:, None])
    edges = tl.where(open_edge, edges, 0.0)
    edges = edges / tl.maximum(tl.sum(edges, axis=1), 1e-30)[:, None]
    mixed = tl.dot(edges.to(half), x).to(half)
    for start in range(0, K, BN):
        some = start + tl.arange(0, BN)
        r = tl.load(r_ptr + column[:, None] * K + some[None, :])
        new = tl.dot(mixed, r) + tl.load(r_bias_ptr + some).to(tl.float32)[None, :]
        tl.store(
            out_ptr + place[:, None] * K + some[None, :], tl.maximum(new, 0.0).to(half), mask=live[:, None]
        )


@triton.jit
def _mixed_first(
    x_ptr, asked_ptr, mask_ptr, out_ptr, pairs, texts, p, K: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """softmax(asked · Nᵀ) N of BP pairs, in one pass over their nodes."""
    pair = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    live = pair < pairs
    column = tl.arange(0, K)
    asked = tl.load(asked_ptr + pair[:, None] * K + column[None, :], mask=live[:, None], other=0.0)
    asked = asked.to(tl.float32)
    top = tl.full((BP,), -1e30, dtype=tl.float32)
    weight = tl.zeros((BP,), dtype=tl.float32)
    total = tl.zeros((BP, K), dtype=tl.float32)
    for node in range(p):
        known = tl.load(mask_ptr + (pair % texts) * p + node, mask=live, other=0) != 0
        x = tl.load(x_ptr + (pair[:, None] * p + node) * K + column[None, :], mask=live[:, None], other=0.0)
        x = x.to(tl.float32)
        edge = tl.where(known, tl.sum(asked * x, axis=1), -1e30)
        above = tl.maximum(top, edge)
        kept, share = tl.exp(top - above), tl.where(known, tl.exp(edge - above), 0.0)
        weight = weight * kept + share
        total = total * kept[:, None] + share[:, None] * x
        top = above
    total = total / tl.maximum(weight, 1e-30)[:, None]
    tl.store(
        out_ptr + pair[:, None] * K + column[None, :], total.to(out_ptr.dtype.element_ty), mask=live[:, None]
    )


def local_nodes(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, Tensor],
    out: Tensor,
    sizes: tuple[int, int, int, int, int, int],
    eps: float,
) -> None:
    """Fill out[:, :, 1:]; inputs are s, scale, mask of regions, regions, words and the regions' products."""
    n, m, words, r, d, k = sizes
    s, scale, mask, v, e, gram = inputs
    padded = max(16, triton.next_power_of_2(r))

    def grid(meta: Any) -> tuple[int, int]:
        return (triton.cdiv(m * words, meta["BM"]), n)

    _local_nodes[grid](
        s, scale, mask.to(torch.uint8), v, e, gram, *weights, out,
        n, words, m * words, r, d, eps, LEAST_SQUARE, RP=padded, K=k,
    )  # fmt: skip


def reasoned(
    nodes: Tensor, mask: Tensor, folded: tuple[Tensor, Tensor], mix: tuple[Tensor, Tensor], out: Tensor
) -> None:
    """Fill ``out`` with the nodes (n, m, P, K) after one step."""
    n, m, p, k = nodes.shape

    def grid(meta: Any) -> tuple[int]:
        return (triton.cdiv(n * m, meta["BM"] // p),)

    _reasoned[grid](nodes, mask.to(torch.uint8), *folded, *mix, out, n * m, m, p, K=k, BN=min(64, k))


def mixed_first(nodes: Tensor, asked: Tensor, mask: Tensor, out: Tensor) -> None:
    """Fill ``out`` (n·m, K) with what the first node of each pair mixes."""
    n, m, p, k = nodes.shape
    _mixed_first[(triton.cdiv(n * m, 8),)](
        nodes, asked, mask.to(torch.uint8), out, n * m, m, p, K=k, BP=8, num_warps=4
    )
