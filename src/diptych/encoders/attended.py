"""Self-attention that sums up a set (SGRAF): a global vector in front of the unit vectors of an encoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych import ops
from diptych.encoders.encoder import Around, Encoder, check_rate
from diptych.encoders.regions import MaskedBatchNorm, RunningNorm
from diptych.errors import DataError
from diptych.parts import part
from diptych.types import Features, Inputs


class RegionNorm(RunningNorm):
    """BatchNorm whose channels are the places of the regions: (B, R, D) over images and dimensions, valid ones only.

    Equal to ``nn.BatchNorm1d(R)`` of (B, R, D) where every region is valid; same names. ``places`` is the most
    regions an image may have.
    """

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        x = ops.at_least_float32(values)
        here = slice(0, x.shape[1])
        mean, var = self.running_mean[here], self.running_var[here]
        if self.training:
            mean, var = self._moments(x, mask, here)
        scale = self.weight[here] * torch.rsqrt(var + self.eps)
        return torch.addcmul((self.bias[here] - mean * scale)[:, None], x, scale[:, None]).to(values.dtype)

    def _moments(self, x: Tensor, mask: Tensor, here: slice) -> tuple[Tensor, Tensor]:
        valid = mask[..., None]
        count = (mask.sum(0) * x.shape[2]).to(x.dtype)  # (R,)
        mean = torch.where(valid, x, 0.0).sum((0, 2)) / count.clamp_min(1)
        var = torch.where(valid, x - mean[:, None], 0.0).square().sum((0, 2)) / count.clamp_min(1)
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp_min(1))
            moved = self.momentum * (count > 0).to(x.dtype)  # a place no image fills stays as it was
            for running, seen in ((self.running_mean, mean), (self.running_var, unbiased)):
                running[here] += (moved * (seen - running[here])).to(running.dtype)
            self.num_batches_tracked += 1
        return mean, var


@part
class VisualSelfAttention(nn.Module):
    """The global vector of an image's regions (SGRAF).

    ::

        m   = mean_r V_r
        a_r = softmax over regions of w · (drop(tanh(BN_R(W_l V_r))) ∘ drop(tanh(BN(W_g m))))
        g   = unit(Σ_r a_r V_r)

    ===================  ==================================================================================
    paper                argument
    ===================  ==================================================================================
    V (R, D)             the regions of an image, R at most ``regions``
    BN_R                 ``local_norm``: its channels are the places of the regions, as published
    dropout              ``dropout``, 0.4
    ===================  ==================================================================================

    The bias of w would leave the softmax unchanged: there is none. Shapes: (B, R, D) → (B, D).
    """

    def __init__(self, dim: int = 1024, regions: int = 36, dropout: float = 0.4) -> None:
        super().__init__()
        self.regions, self.dropout = regions, check_rate(dropout, "dropout")
        self.local, self.overall = ops.xavier_linear(dim, dim), ops.xavier_linear(dim, dim)
        self.local_norm, self.overall_norm = RegionNorm(regions), MaskedBatchNorm(dim)
        self.common = ops.xavier_linear(dim, 1, bias=False)

    def forward(self, features: Features) -> Tensor:
        values, mask = features.values, features.mask
        if values.shape[1] > self.regions:
            raise DataError(
                f"an image has {values.shape[1]} regions, this model was made for {self.regions}: its BatchNorm has "
                f"one channel per region. Give {self.regions} regions per image, or train a new model."
            )
        mean = ops.masked_mean(values, mask)[:, None]  # (B, 1, D)
        local = torch.tanh(self.local_norm(self.local(values), mask))
        everywhere = torch.ones(len(mean), 1, dtype=torch.bool, device=mask.device)
        overall = torch.tanh(self.overall_norm(self.overall(mean), everywhere))
        return _summed(features, self._drop(local) * self._drop(overall), self.common)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


@part
class TextualSelfAttention(nn.Module):
    """The global vector of a text's words (SGRAF): ``VisualSelfAttention`` without any BatchNorm, over true words.

    Shapes: (B, W, D) → (B, D).
    """

    def __init__(self, dim: int = 1024, dropout: float = 0.4) -> None:
        super().__init__()
        self.dropout = check_rate(dropout, "dropout")
        self.local, self.overall = ops.xavier_linear(dim, dim), ops.xavier_linear(dim, dim)
        self.common = ops.xavier_linear(dim, 1, bias=False)

    def forward(self, features: Features) -> Tensor:
        mean = ops.masked_mean(features.values, features.mask)[:, None]
        local, overall = torch.tanh(self.local(features.values)), torch.tanh(self.overall(mean))
        drop = [F.dropout(x, self.dropout, self.training) for x in (local, overall)]
        return _summed(features, drop[0] * drop[1], self.common)


@part
class SelfAttended(Around):
    """An encoder's elements at unit length, behind the global vector that an attention makes of them.

    ``First`` then pools the global vector, and a pair scorer finds it in front of the elements, computed once
    per image or text. Shapes: (B, L, D) → (B, 1 + L, D), zeros at padding.
    """

    wrapped = "encoder"

    def __init__(self, encoder: Encoder, attention: VisualSelfAttention | TextualSelfAttention) -> None:
        super().__init__()
        self.encoder, self.attention = encoder, attention
        self.dim = encoder.dim

    def forward(self, inputs: Inputs) -> Features:
        found: Features = self.encoder(inputs)
        values = ops.unit(ops.at_least_float32(found.values)).masked_fill(~found.mask[..., None], 0.0)
        whole = self.attention(Features(values, found.mask))
        return Features(
            torch.cat([whole[:, None].to(values.dtype), values], dim=1), F.pad(found.mask, (1, 0), value=True)
        )


def _summed(features: Features, gates: Tensor, common: nn.Linear) -> Tensor:
    """unit(Σ softmax(w · gates) · values), over the valid elements."""
    weights = ops.masked_softmax(common(gates).squeeze(-1), features.mask)  # (B, L)
    # under autocast the product is halved
    return ops.unit(
        ops.at_least_float32((weights.to(features.values.dtype)[:, None] @ features.values).squeeze(1))
    )
