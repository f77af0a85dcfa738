"""Self-attention inside each document of a packed batch: one operator, a kernel on a GPU, plain torch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych import kernels


@torch.library.custom_op("diptych::attend", mutates_args=())
def attend(qkv: Tensor, starts: Tensor, seed: Tensor, heads: int, longest: int, dropout: float) -> Tensor:
    """softmax(QKᵀ / √width) V in each head of each document, the weights dropped with probability ``dropout``.

    ============  ==================================================================================
    ``qkv``       (T, 3 · heads · width): queries, keys and values of all tokens, documents end to end
    ``starts``    (documents + 1,) int32: the first token of each; tokens from the last entry on get zeros
    ``seed``      (1,) int64, of the dropout, on the device: a recorded step draws a new one each time
    ``longest``   at least the tokens of the longest document, at most ``data.packing.LONGEST``
    ============  ==================================================================================

    Returns (T, heads · width).
    """
    if kernels.on_gpu(qkv.device):
        from diptych.kernels import document_attention as kernel

        return kernel.forward(qkv, starts, seed, heads, longest, dropout)
    _, _, value, weights, keep = _plain(qkv, starts, seed, heads, dropout)
    return _joined((weights * keep) @ value)


@torch.library.custom_op("diptych::attend_backward", mutates_args=())
def attend_backward(
    gradient: Tensor, qkv: Tensor, starts: Tensor, seed: Tensor, heads: int, longest: int, dropout: float
) -> Tensor:
    """The gradient of ``attend`` with respect to ``qkv``."""
    if kernels.on_gpu(qkv.device):
        from diptych.kernels import document_attention as kernel

        return kernel.backward(gradient, qkv, starts, seed, heads, longest, dropout)
    query, key, value, weights, keep = _plain(qkv, starts, seed, heads, dropout)
    g = _by_head(gradient, heads)
    of_weights = (g @ value.mT) * keep
    of_scores = (
        weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * query.shape[-1] ** -0.5
    )
    found = (of_scores @ key, of_scores.mT @ query, (weights * keep).mT @ g)
    return torch.cat([_joined(part) for part in found], dim=1)


@attend.register_fake
def _(qkv: Tensor, starts: Tensor, seed: Tensor, heads: int, longest: int, dropout: float) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)


@attend_backward.register_fake
def _(
    gradient: Tensor, qkv: Tensor, starts: Tensor, seed: Tensor, heads: int, longest: int, dropout: float
) -> Tensor:
    return torch.empty_like(qkv)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found: Tensor = attend_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return found, None, None, None, None, None


attend.register_autograd(_gradients, setup_context=_keep_inputs)


def _plain(
    qkv: Tensor, starts: Tensor, seed: Tensor, heads: int, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values (heads, T, width), the weights (heads, T, T) and the factors of their dropout."""
    query, key, value = (_by_head(part, heads) for part in qkv.chunk(3, dim=1))
    token = torch.arange(len(qkv), device=qkv.device)
    document = torch.bucketize(token, starts[1:].long(), right=True)
    apart = (document[:, None] != document[None, :])[None]  # (1, T, T)
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(apart, -torch.inf), dim=-1)
    weights = weights * (token < starts[-1])[None, :, None]  # the rest belongs to no document
    keep = torch.ones_like(weights)
    if dropout > 0:
        generator = torch.Generator(qkv.device).manual_seed(int(seed))
        draw = torch.rand(weights.shape, generator=generator, device=qkv.device)
        keep = (draw >= dropout).to(weights.dtype) / (1 - dropout)
    return query, key, value, weights, keep


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(len(x), heads, -1).transpose(0, 1)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1).contiguous()
