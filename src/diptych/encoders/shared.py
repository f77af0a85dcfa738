"""COOKIE's weight-sharing transformer encoder: one transformer on top of both sides' own encoders."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.encoders.encoder import Encoder, check_rate, fit
from diptych.errors import SettingsError
from diptych.parts import part
from diptych.types import Features, Inputs


class Layer(nn.Module):
    """One post-norm layer: h = LN(x + attention(x)), y = LN(h + W₂ GELU(W₁ h)).

    Every token attends to the valid tokens of its own set; no position is added.
    """

    def __init__(self, dim: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.joint = nn.Linear(dim, 3 * dim)  # queries, keys and values
        self.out = nn.Linear(dim, dim)
        self.first, self.second = nn.Linear(dim, feedforward), nn.Linear(feedforward, dim)
        self.attended, self.fed = nn.LayerNorm(dim), nn.LayerNorm(dim)
        nn.init.xavier_uniform_(self.joint.weight)
        for linear in (self.joint, self.out):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self._heads(x)
        rate = self.dropout if self.training else 0.0
        # (B, H, L, D/H)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=_keys(mask), dropout_p=rate)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))
        h = self.attended(x + F.dropout(mixed, self.dropout, self.training))
        inner = F.dropout(F.gelu(self.first(h)), self.dropout, self.training)
        y: Tensor = self.fed(h + F.dropout(self.second(inner), self.dropout, self.training))
        return y

    def weights(self, x: Tensor, mask: Tensor) -> Tensor:
        """The attention weights (B, heads, L, L), queries in rows, without dropout."""
        q, k, _ = self._heads(x)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return torch.softmax(scores.masked_fill(~_keys(mask), -torch.inf), dim=-1)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, H, L, D/H)
        return parts[0], parts[1], parts[2]


@part
class TokenTransformer(nn.Module):
    """A small transformer encoder over the tokens of a set (B, L, D), with no positions: order must be in the tokens.

    The supplement gives no sizes. Defaults: one layer of width 1024, 8 heads, feed-forward 4096, GELU, dropout 0.1,
    post-norm. ``depth=0`` passes the tokens through unchanged. What stands at padded positions never reaches a valid
    token.
    """

    def __init__(
        self, dim: int = 1024, depth: int = 1, heads: int = 8, feedforward: int = 4096, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if depth < 0:
            raise SettingsError(f"depth={depth} is not a count of layers: give 0 (none), 1 or more.")
        if dim % heads:
            raise SettingsError(f"dim={dim} does not divide over {heads} heads: choose a multiple of them.")
        self.dim, self.heads = dim, heads
        check_rate(dropout, "dropout")
        self.layers = nn.ModuleList(Layer(dim, heads, feedforward, dropout) for _ in range(depth))

    def forward(self, features: Features) -> Features:
        if not len(self.layers):
            return features
        x = self._ready(features)
        for layer in self.layers:
            x = layer(x, features.mask)
        return replace(features, values=x)  # what an encoder says of its tokens stays

    def attention(self, features: Features) -> Tensor:
        """How much each token is looked at in the last layer, (B, L): the mean over heads and valid queries.

        The valid tokens of a set sum to 1, the others are 0. Without a layer every token counts the same.
        """
        mask = features.mask
        sizes = features.sizes.clamp_min(1)
        if not len(self.layers):
            return mask / sizes[:, None]
        x = self._ready(features)
        for layer in list(self.layers)[:-1]:
            x = layer(x, mask)
        last = self.layers[-1]
        assert isinstance(last, Layer)
        weights = last.weights(x, mask).mean(dim=1)  # (B, L, L)
        return (weights * mask[:, :, None]).sum(dim=1) / sizes[:, None] * mask

    def _ready(self, features: Features) -> Tensor:
        first = self.layers[0]
        assert isinstance(first, Layer)
        return fit(features, first.joint.weight)


@part
class Contextual(Encoder):
    """An encoder with a transformer on top: y = transformer(inner(x)), (B, L, D).

    COOKIE gives both towers the same ``transformer`` object: "weight sharing". Given one each, the towers share
    nothing. What of ``inner`` is frozen may be cached as before; what is pretrained keeps its learning-rate factor.
    """

    def __init__(self, inner: Encoder, transformer: TokenTransformer) -> None:
        super().__init__()
        if inner.dim != transformer.dim:
            raise SettingsError(
                f"the encoder makes {inner.dim} numbers per token, the transformer reads {transformer.dim}: "
                "build both with the same dim."
            )
        self.inner, self.transformer, self.dim = inner, transformer, transformer.dim

    def forward(self, inputs: Inputs) -> Features:
        features: Features = self.transformer(self.inner(inputs))
        return features

    def frozen_part(self) -> nn.Module | None:
        return self.inner.frozen_part()

    def pretrained(self) -> tuple[str, ...]:
        return tuple(f"inner.{name}" for name in self.inner.pretrained())

    def packs(self, device: torch.device) -> bool:
        return self.inner.packs(device)


def _keys(mask: Tensor) -> Tensor:
    """(B, 1, 1, L): the tokens that may be attended to; all of them in an empty set, which has no valid result."""
    return (mask | ~mask.any(dim=1, keepdim=True))[:, None, None]
