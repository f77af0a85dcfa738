"""Coefficient generators of GPO: how the weight of each rank is made from the rank and the size of the set.

A generator gives scores (S, L, K) for S set sizes: K = 1 column shared by all channels, or one column per
channel (``outputs`` = D). ``GPO`` turns them into coefficients with a softmax over the valid ranks. Ranks
count from 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from diptych import ops
from diptych.errors import SettingsError, at_least
from diptych.parts import part


class Generator(nn.Module):
    """Scores from ranks and sizes alone, so that one row per distinct size serves a whole batch."""

    def forward(self, sizes: Tensor, length: int) -> Tensor:
        """Scores (S, length, K) of sets of the given ``sizes`` (S,), arbitrary at ranks ≥ size.

        (1, length, K) where the size plays no part.
        """
        raise NotImplementedError


@part
class CosSinBiGRU(Generator):
    """VSE∞'s generator: Cos/Sin position codes → BiGRU → linear without bias.

    ====================  ==========================================
    paper                 argument
    ====================  ==========================================
    d_p, position code    ``positions``
    hidden size           ``hidden``, the two directions averaged
    MLP                   one linear layer, ``hidden`` → ``outputs``
    ====================  ==========================================

    12,704 parameters at the published sizes.
    """

    def __init__(self, positions: int = 32, hidden: int = 32, outputs: int = 1) -> None:
        super().__init__()
        self.positions = positions
        self.gru = RankBiGRU(positions, hidden)
        self.head = nn.Linear(hidden, outputs, bias=False)

    def forward(self, sizes: Tensor, length: int) -> Tensor:
        codes = cos_sin(length, self.positions, self.head.weight)
        scores: Tensor = self.head(self.gru(codes[None], sizes))
        return scores


@part
class IndexBiGRU(Generator):
    """A learned vector per rank instead of Cos/Sin codes (Index+BiGRU); knows ``ranks`` ranks and no more."""

    def __init__(self, ranks: int = 120, positions: int = 32, hidden: int = 32, outputs: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ranks, positions)
        self.gru = RankBiGRU(positions, hidden)
        self.head = nn.Linear(hidden, outputs, bias=False)

    def forward(self, sizes: Tensor, length: int) -> Tensor:
        known = self.embedding.num_embeddings
        if length > known:
            raise SettingsError(
                f"IndexBiGRU knows {known} ranks, not sets of length {length}: build it with ranks={length}."
            )
        scores: Tensor = self.head(self.gru(self.embedding.weight[None, :length], sizes))
        return scores


@part
class CosSinMLP(Generator):
    """Cos/Sin codes through a two-layer perceptron (Cos/Sin+MLP): the size acts through the softmax alone."""

    def __init__(self, positions: int = 32, hidden: int = 32, outputs: int = 1) -> None:
        super().__init__()
        self.positions = positions
        self.hidden = nn.Linear(positions, hidden)
        self.head = nn.Linear(hidden, outputs, bias=False)

    def forward(self, sizes: Tensor, length: int) -> Tensor:
        codes = cos_sin(length, self.positions, self.head.weight)
        scores: Tensor = self.head(torch.relu(self.hidden(codes)))[None]
        return scores


@part
class CosSinTransformer(Generator):
    """Cos/Sin codes through a Transformer encoder (supplement, Table 3); a size attends to its own ranks.

    The paper gives no depth: one layer of four heads with an inner width of 128, without dropout.
    """

    def __init__(
        self, positions: int = 32, heads: int = 4, inner: int = 128, layers: int = 1, outputs: int = 1
    ) -> None:
        super().__init__()
        if positions % heads:
            raise SettingsError(
                f"{heads} attention heads do not divide the {positions} position channels: choose a divisor."
            )
        self.positions = positions
        layer = nn.TransformerEncoderLayer(positions, heads, inner, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(positions, outputs, bias=False)

    def forward(self, sizes: Tensor, length: int) -> Tensor:
        codes = cos_sin(length, self.positions, self.head.weight).expand(sizes.shape[0], -1, -1)
        invalid = torch.arange(length, device=sizes.device) >= sizes[:, None]  # (S, length)
        if ops.is_exported():
            for layer in self.encoder.layers:
                codes = _post_norm_layer(layer, codes, invalid)
            return self.head(codes)  # type: ignore[no-any-return]
        scores: Tensor = self.head(self.encoder(codes, src_key_padding_mask=invalid))
        return scores


@part
class Interpolation(Generator):
    """A curve of ``pieces`` + 1 learned knots, interpolated linearly at r = k/(N − 1) (Interp., as FSPool).

    A set of one element reads the first knot. FSPool's 20 pieces; unlike FSPool, a softmax follows.
    """

    def __init__(self, pieces: int = 20, outputs: int = 1) -> None:
        super().__init__()
        self.knots = nn.Parameter(torch.zeros(at_least(pieces, "the number of pieces", 1) + 1, outputs))

    def forward(self, sizes: Tensor, length: int) -> Tensor:
        pieces = len(self.knots) - 1
        ranks = torch.arange(length, device=sizes.device, dtype=self.knots.dtype)
        place = (ranks / (sizes[:, None] - 1).clamp_min(1)).clamp_max(1) * pieces  # (S, length)
        left = place.long().clamp_max(pieces - 1)
        fraction = (place - left)[..., None]
        return torch.lerp(self.knots[left], self.knots[left + 1], fraction)


@part
class SortedRowBiGRU(nn.Module):
    """Data-dependent generator (supplement, Table 8): reads [code of k ; projection of the k-th sorted row].

    ``dim`` is the D of the features, projected to ``positions`` channels. Coefficients differ from sample to
    sample, so the BiGRU runs on every row of the batch.
    """

    def __init__(self, dim: int, positions: int = 32, hidden: int = 32, outputs: int = 1) -> None:
        super().__init__()
        self.positions = positions
        self.projection = nn.Linear(dim, positions)
        self.gru = RankBiGRU(2 * positions, hidden)
        self.head = nn.Linear(hidden, outputs, bias=False)

    def forward(self, sizes: Tensor, ranked: Tensor) -> Tensor:
        """Sizes (B,) and sets sorted in ascending order (B, D, L) → scores (B, L, K)."""
        largest_first = ranked.flip(-1).transpose(1, 2)  # (B, L, D)
        rows = self.projection(largest_first.to(self.head.weight.dtype))  # (B, L, positions)
        codes = cos_sin(rows.shape[1], self.positions, self.head.weight).expand(rows.shape[0], -1, -1)
        scores: Tensor = self.head(self.gru(torch.cat([codes, rows], dim=-1), sizes))
        return scores


class RankBiGRU(nn.Module):
    """Mean of the states of two GRUs, one reading ranks 0 … N − 1, the other N − 1 … 0; nothing is packed.

    States of the forward GRU do not depend on what follows, so one run over the longest set serves every size
    when all sets share their inputs. Packing would need the sizes on the host.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.ahead = nn.GRU(inputs, hidden, batch_first=True)
        self.back = nn.GRU(inputs, hidden, batch_first=True)

    def forward(self, inputs: Tensor, sizes: Tensor) -> Tensor:
        """Inputs (S, L, I), or (1, L, I) shared by all sizes, and sizes (S,) → states (S, L, hidden)."""
        length = inputs.shape[1]
        # the rank read at step t, N − 1 − t; its own inverse, so it also puts the states back in order
        mirror = (sizes[:, None] - 1 - torch.arange(length, device=sizes.device)).clamp_min(0)[..., None]
        ahead, _ = self.ahead(inputs)
        reverse = inputs.expand(sizes.shape[0], -1, -1).gather(1, mirror.expand(-1, -1, inputs.shape[2]))
        back, _ = self.back(reverse)
        states: Tensor = (ahead + back.gather(1, mirror.expand(-1, -1, back.shape[2]))) / 2
        return states


def _post_norm_layer(layer: Any, x: Tensor, invalid: Tensor) -> Tensor:
    """What ``nn.TransformerEncoderLayer`` computes: torch's exporter fixes the number of sets in its attention."""
    joint = nn.functional.linear(x, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias)
    # (S, heads, L, ·)
    q, k, v = joint.view(*x.shape[:2], 3, layer.self_attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~invalid[:, None, None])
    x = layer.norm1(x + layer.self_attn.out_proj(mixed.transpose(1, 2).flatten(2)))
    fed: Tensor = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
    return fed


def cos_sin(length: int, width: int, like: Tensor) -> Tensor:
    """Position codes (length, width): sin(p·w_j) at 2j and cos(p·w_j) at 2j + 1, w_j = 10000^(−2j/width)."""
    exact = torch.promote_types(like.dtype, torch.float32)
    pairs = torch.arange(0, width, 2, device=like.device, dtype=exact)
    frequency = torch.exp(pairs * (-math.log(10000.0) / width))
    angle = torch.arange(length, device=like.device, dtype=exact)[:, None] * frequency  # (length, width / 2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).to(like.dtype)
