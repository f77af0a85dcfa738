"""Region features → joint space: the residual MLP of VSE∞, with BatchNorm over the valid rows only.

``RunningNorm`` is what every BatchNorm written here keeps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.encoders.encoder import Encoder, check_rate, drop_each, fit
from diptych.errors import DataError
from diptych.ops import at_least_float32, xavier_linear
from diptych.parts import part
from diptych.types import Features, Inputs


class RunningNorm(nn.Module):
    """The parameters and statistics of a BatchNorm of ``channels`` channels, under the names of ``nn.BatchNorm1d``."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    eps, momentum = 1e-5, 0.1

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))


class MaskedBatchNorm(RunningNorm):
    """BatchNorm1d of (B, L, C) over the valid positions: y = (x − μ) / √(σ² + ε) · weight + bias.

    Equal to ``nn.BatchNorm1d`` on the compacted rows, but from masked sums: nothing is read back to the host, so the
    layer compiles and can be captured. Statistics are float32 or better. Under ``torchrun`` each replica uses its own
    rows.
    """

    def forward(self, values: Tensor, mask: Tensor, padding: Tensor | None = None) -> Tensor:
        """Normalise (B, L, C) by the batch's valid rows while training, else by the running statistics.

        With ``padding`` (C,), the value of a row of padding, the statistics count such rows as well: as many as fill
        every set up to the largest.
        """
        x = at_least_float32(values)
        mean, var = (
            self._moments(x, mask, padding) if self.training else (self.running_mean, self.running_var)
        )
        scale = self.weight * torch.rsqrt(var + self.eps)
        return torch.addcmul(self.bias - mean * scale, x, scale).to(values.dtype)

    def _moments(self, x: Tensor, mask: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        valid = mask[..., None]  # (B, L, 1)
        count = mask.sum().to(x.dtype)
        total = torch.where(valid, x, 0.0).sum((0, 1))
        if padding is None:
            mean = total / count
            var = torch.where(valid, x - mean, 0.0).square().sum((0, 1)) / count
        else:
            empty = (mask.sum(1).max() * len(mask)).to(x.dtype) - count
            mean = (total + empty * padding) / (count + empty)
            squares = torch.where(valid, x - mean, 0.0).square().sum((0, 1))
            var = (squares + empty * (padding - mean).square()) / (count + empty)
            count = count + empty
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp_min(1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
            self.num_batches_tracked += 1
        return mean, var


@part
class Regions(Encoder):
    """Y = W₀x + b₀ + MLP(x), MLP = Linear → BatchNorm → ReLU → Linear; (B, R, input_dim) → (B, R, dim).

    ``drop`` is the Size Augmentation of regions: while training each is dropped with that probability, before
    the MLP, so that dropped regions leave the BatchNorm statistics too. W₀ starts Xavier-uniform with b₀ = 0.

    ``count_padding`` lets the statistics count rows of padding while training, as the public code does: there dropped
    regions are taken out and each set is padded with zeros to the largest of the batch.
    """

    def __init__(self, input_dim: int = 2048, dim: int = 1024, drop: float = 0.2, hidden: int = 512) -> None:
        super().__init__()
        self.count_padding = False  # of training alone, so no part of a saved model
        self.input_dim, self.dim, self.drop = input_dim, dim, check_rate(drop)
        self.linear = xavier_linear(input_dim, dim)
        self.first = nn.Linear(input_dim, hidden)
        self.norm = MaskedBatchNorm(hidden)
        self.second = nn.Linear(hidden, dim)

    def forward(self, inputs: Inputs) -> Features:
        if not isinstance(inputs, Features):
            raise DataError("this model reads region features, not pictures: give (regions, numbers) arrays.")
        if inputs.values.shape[-1] != self.input_dim:
            found = inputs.values.shape[-1]
            raise DataError(f"regions have {found} numbers, this encoder needs {self.input_dim}: give those.")
        mask = drop_each(inputs.mask, self.drop) if self.training and self.drop else inputs.mask
        x = fit(inputs, self.linear.weight)
        padding = self.first.bias if self.count_padding else None
        inner = F.relu(self.norm(self.first(x), mask, padding))
        return Features(self.linear(x) + self.second(inner), mask)
