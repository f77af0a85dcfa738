"""Small tensor functions and layers that the parts share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diptych import kernels
from diptych.types import Features

MOST_TENSORS = 256  # tensors that a part keeps; texts batched by length need a few dozen


def unit(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Rows of unit length, x / (‖x‖ + eps); a zero row stays zero."""
    if kernels.takes_rows(x):
        from diptych.kernels.rows import UnitRows

        rows: Tensor = UnitRows.apply(x, eps)  # type: ignore[no-untyped-call]
        return rows
    unit_rows: Tensor = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + eps)
    return unit_rows


def is_exported() -> bool:
    """Whether torch writes down what is computed as ONNX: every step must be torch's, and sizes stay free."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


class TensorCache(nn.Module):
    """A part that keeps what it makes of its weights alone while it encodes, until they or its mode change."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[Hashable, Tensor] = {}
        self._versions: tuple[tuple[int, int], ...] = ()

    def train(self, mode: bool = True) -> Self:
        """Switch mode; what was kept is forgotten."""
        self._tensors.clear()
        return super().train(mode)

    def cached(self, weights: Sequence[Tensor], key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gives, which depends on these weights and on ``key`` alone."""
        # a momentum twin evaluates too, but it moves; weights made in inference mode carry no version
        if self.training or not torch.is_inference_mode_enabled() or any(w.is_inference() for w in weights):
            return make()
        versions = tuple((weight.data_ptr(), weight._version) for weight in weights)
        if versions != self._versions or len(self._tensors) > MOST_TENSORS:
            self._tensors, self._versions = {}, versions
        if key not in self._tensors:
            with torch.inference_mode(False), torch.no_grad():  # an ordinary tensor, copied with the module
                self._tensors[key] = make()
        return self._tensors[key]


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision becomes float32: ranks, sums over a set and soft labels need more than 8 bits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def cosine_scores(image: Tensor, text: Tensor) -> Tensor:
    """Scores (images, texts) of unit rows: the one orientation used everywhere."""
    return image @ text.T


def same_image(a: Tensor, b: Tensor) -> Tensor:
    """(len(a), len(b)) bool, True where two image ids are equal."""
    return a[:, None] == b[None, :]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of (B, L, D) over the valid positions of (B, L)."""
    weights = mask.to(values.dtype)[..., None]  # (B, L, 1)
    valid = torch.where(mask[..., None], values, torch.zeros((), dtype=values.dtype, device=values.device))
    return valid.sum(1) / weights.sum(1).clamp_min(1)


def masked_softmax(scores: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Softmax over the valid positions, exact zeros elsewhere, in float32 or better."""
    work = at_least_float32(scores)
    filled = work.masked_fill(~mask, torch.finfo(work.dtype).min)
    return torch.softmax(filled, dim=dim) * mask


def gather_rows(x: Tensor) -> Tensor:
    """Rows of every process, in rank order, with gradients back to their owner; ``x`` itself when alone.

    A plain ``all_gather`` carries no gradient, which makes contrastive gradients over gathered rows wrong.
    """
    if processes() == 1:
        return x
    gathered: Tensor = _GatherRows.apply(x)  # type: ignore[no-untyped-call]
    return gathered


def processes() -> int:
    """How many processes share a step."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_features(features: Features) -> Features:
    """The sets of every process, in rank order, with gradients; padded to the longest set of all of them."""
    if processes() == 1:
        return features
    length = torch.tensor(features.mask.shape[1], device=features.mask.device)
    dist.all_reduce(length, dist.ReduceOp.MAX)
    missing = int(length) - features.mask.shape[1]
    values = torch.nn.functional.pad(features.values, (0, 0, 0, missing))
    mask = torch.nn.functional.pad(features.mask, (0, missing))
    return Features(gather_rows(values), gather_rows(mask.to(torch.uint8)).bool())


def own_rows(rows: int) -> slice:
    """Which rows of a gathered batch are this process's, given how many it has itself."""
    return slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows) if processes() > 1 else slice(None)


class _GatherRows(torch.autograd.Function):
    """All rows forward; backward, the sum over processes of the gradients of this process's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        start = dist.get_rank() * ctx.rows
        return total[start : start + ctx.rows]


def xavier_linear(
    inputs: int, outputs: int, bias: bool = True, kind: type[nn.Linear] = nn.Linear
) -> nn.Linear:
    """A linear layer that starts with Xavier-uniform weights and a bias of zero."""
    layer = kind(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
