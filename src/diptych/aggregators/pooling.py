"""What every aggregator offers; fixed poolings, GeM with its one parameter, and a head on the first element."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from diptych import ops
from diptych.aggregators.sorting import sort_sets
from diptych.errors import SettingsError, at_least
from diptych.parts import part
from diptych.types import Features


class Aggregator(nn.Module):
    """A padded batch of sets, values (B, L, D) and mask (B, L) → vectors (B, ``dim_of(D)``), float32 or better."""

    def dim_of(self, encoder_dim: int) -> int:
        """Width of the pooled vector; the encoder's, unless a head of another width says its own."""
        return encoder_dim

    def forward(self, features: Features) -> Tensor:
        """(B, L, D) → (B, dim)."""
        raise NotImplementedError


@part
class Mean(Aggregator):
    """Average pooling, v = (1/N) Σ_n x_n (AvgPool, the aggregator of VSE++ in VSE∞'s tables)."""

    def forward(self, features: Features) -> Tensor:
        return ops.masked_mean(ops.at_least_float32(features.values), features.mask)


@part
class Max(Aggregator):
    """Maximum of each channel, v_i = max_n x_ni (MaxPool); tied elements share the gradient."""

    def forward(self, features: Features) -> Tensor:
        valid = features.mask[..., None]
        largest = features.values.masked_fill(~valid, -torch.inf).amax(dim=1)
        return ops.at_least_float32(largest.masked_fill(~valid.any(dim=1), 0))


@part
class KMax(Aggregator):
    """Mean of the k largest values of each channel (K-MaxPool); of all N where the set is smaller than k.

    v_i = (1/K) Σ_{j≤K} sort_j(x_i) with K = min(k, N); k = 1 is Max, k ≥ L is Mean.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = at_least(k, "the k of KMax", 1)

    def forward(self, features: Features) -> Tensor:
        taken = sort_sets(features)[..., -self.k :]  # invalid places are zeros, so a plain sum is right
        return taken.sum(dim=-1) / features.sizes.clamp(1, self.k)[:, None]


@part
class First(Aggregator):
    """The first valid element (the [CLS] token of a transformer, the first state of a BiGRU)."""

    def forward(self, features: Features) -> Tensor:
        return _element(features, features.mask.int().argmax(dim=1))


@part
class Last(Aggregator):
    """The last valid element (VSE++ of 2018: the state of a one-way GRU after the last word)."""

    def forward(self, features: Features) -> Tensor:
        from_end = features.mask.flip(1).int().argmax(dim=1)
        return _element(features, features.mask.shape[1] - 1 - from_end)


@part
class GeM(Aggregator):
    """Generalised mean, v_i = ((1/N) Σ_n max(x_ni, eps)^p)^(1/p), with one learned p ≥ 1.

    p = 1 is Mean and p → ∞ is Max. A power of a negative number is not real, so values under ``eps`` count as
    ``eps`` and receive no gradient: on signed features GeM sees only the positive part. Computed as a
    log-sum-exp, which neither overflows nor divides by zero, and p = 1 + softplus(ρ) cannot leave its range:
    nothing becomes NaN.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        if p <= 1 or eps <= 0:
            raise SettingsError(f"GeM needs p > 1 and eps > 0, not p = {p} and eps = {eps}.")
        self.eps = eps
        inverse_softplus = p - 1 + math.log(-math.expm1(1 - p))
        self.rho = nn.Parameter(torch.tensor(inverse_softplus))

    @property
    def p(self) -> Tensor:
        """The exponent, a scalar above 1."""
        return 1 + nn.functional.softplus(self.rho)

    def forward(self, features: Features) -> Tensor:
        valid = features.mask[..., None]
        values = ops.at_least_float32(features.values).masked_fill(~valid, self.eps)
        logs = (self.p * values.clamp_min(self.eps).log()).masked_fill(~valid, torch.finfo(values.dtype).min)
        size = features.sizes.clamp_min(1)[:, None].to(values.dtype)
        pooled = ((logs.logsumexp(dim=1) - size.log()) / self.p).exp()
        return pooled.masked_fill(~valid.any(dim=1), 0)


def _element(features: Features, place: Tensor) -> Tensor:
    """The element at ``place`` (B,) of each set, zeros where the set is empty."""
    rows = torch.arange(place.shape[0], device=place.device)  # not len(): an exported batch may have any size
    found = ops.at_least_float32(features.values[rows, place])
    return found.masked_fill(~features.mask.any(dim=1, keepdim=True), 0)


STD = 0.02  # standard deviation of a head's weights


def make_head(input_dim: int, dim: int, norm: bool, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    """Linear(input_dim → dim), with ``norm`` a LayerNorm before it; weights ~ N(0, 0.02²), no activation."""
    linear = kind(input_dim, dim)
    nn.init.normal_(linear.weight, std=STD)
    return nn.Sequential(*([nn.LayerNorm(input_dim)] if norm else []), linear)


class WithHead(Aggregator):
    """A pooling with a head behind it: (B, L, input_dim) → (B, dim)."""

    def __init__(self, pooling: Aggregator, input_dim: int, dim: int, norm: bool = False) -> None:
        super().__init__()
        self.pooling, self.dim, self.head = pooling, dim, make_head(input_dim, dim, norm)

    def dim_of(self, encoder_dim: int) -> int:
        return self.dim

    def forward(self, features: Features) -> Tensor:
        out: Tensor = self.head(self.pooling(features).to(self.head[-1].weight.dtype))
        return out


@part
class Projected(WithHead):
    """A pooling, then Linear: (B, L, input_dim) → (B, dim)."""

    def __init__(self, pooling: Aggregator, input_dim: int, dim: int) -> None:
        super().__init__(pooling, input_dim, dim)


@part
class Head(WithHead):
    """The first element of a set → LayerNorm (with ``norm``) → Linear: (B, L, input_dim) → (B, dim).

    The first element is the pooled vector f of a dual encoder (CUSA on CLIP: ``norm``, dim = input_dim), or the class
    token of a transformer (X2-VLM: no norm, 768 → 256).
    """

    def __init__(self, input_dim: int, dim: int, norm: bool = True) -> None:
        super().__init__(First(), input_dim, dim, norm)
