"""Transformers that both towers may share: COOKIE's on top of the encoders, and that of label-wise retrieval.

COOKIE's (``TokenTransformer``, ``Contextual``) is post-norm. That of label-wise retrieval (``SharedBlocks``,
``SharingEncoder``) is pre-norm, over region tokens and over word tokens, with tokens masked inside. A masked token is
replaced before anything looks at it, so its content cannot be read from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych import ops
from diptych.encoders.bigru import valid_first
from diptych.encoders.encoder import Around, Encoder, check_rate, drop_each, fit
from diptych.encoders.pretrained import load_config, load_model, source_name
from diptych.errors import SettingsError, at_least
from diptych.parts import part
from diptych.types import Features, Inputs

SPREAD_OF_BLANK = 0.02  # standard deviation the learned blank starts from


@dataclass(frozen=True, slots=True)
class TokenStates(Features):
    """Encoded tokens, with what the objectives of label-wise retrieval ask about them.

    ``front`` (B, D) is the mean of the tokens before the shared blocks. While training with masking, ``chosen`` (B, L)
    says which tokens were replaced, and ``words`` (B, L) are the ids of a text before that.
    """

    front: Tensor
    chosen: Tensor | None = None
    words: Tensor | None = None


class UnbiasedNorm(nn.LayerNorm):
    """(x − mean) / (std + 1e-6) · weight + bias with the unbiased deviation: the LayerNorm of the authors' code."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.weight * (x - mean) / (std + self.eps) + self.bias


def norm_of(dim: int, authors: bool) -> nn.LayerNorm:
    """The norm of a block: torch's, or the authors'."""
    return UnbiasedNorm(dim) if authors else nn.LayerNorm(dim)


class PreNormBlock(nn.Module):
    """One pre-norm block: h = x + attention(LN(x)), y = h + W₂ ReLU(W₁ LN(h)).

    Every token attends to the valid tokens of its own set; no position is added. Weights start Xavier-uniform.
    """

    def __init__(self, dim: int, heads: int, feedforward: int, dropout: float, authors: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = norm_of(dim, authors), norm_of(dim, authors)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.first, self.second = nn.Linear(dim, feedforward), nn.Linear(feedforward, dim)
        for linear in (self.query, self.key, self.value, self.out, self.first, self.second):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        seen = self.before(x)
        q, k, v = (
            linear(seen).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, L, D/H)
            for linear in (self.query, self.key, self.value)
        )
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=_keys(mask), dropout_p=rate)
        h = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), rate, self.training)
        inner = F.dropout(F.relu(self.first(self.between(h))), rate, self.training)
        y: Tensor = h + F.dropout(self.second(inner), rate, self.training)
        return y


@part
class SharedBlocks(nn.Module):
    """ReLU(LN(blocks(x))) over the tokens of a set, (B, L, dim) → (B, L, dim).

    The sizes of the supplement: 6 blocks, 8 heads; of the authors' code: width 1024, feed-forward 2048, dropout 0.1.
    Given to both towers, the same weights read regions and words. Published code attends to padding; here it never
    reaches a valid token. ``authors`` is the form of their code: it halves the tokens, ``(x + w · position) / 2`` with
    w ≤ 1e-4, and divides by the unbiased deviation in its norms. Positions are left out in both forms.
    """

    LATER = ("authors",)

    def __init__(
        self,
        dim: int = 1024,
        depth: int = 6,
        heads: int = 8,
        feedforward: int = 2048,
        dropout: float = 0.1,
        authors: bool = False,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise SettingsError(f"dim={dim} does not divide over {heads} heads: choose a multiple of them.")
        self.dim, self.authors = dim, authors
        check_rate(dropout, "dropout")
        self.blocks = nn.ModuleList(
            PreNormBlock(dim, heads, feedforward, dropout, authors)
            for _ in range(at_least(depth, "depth", 1))
        )
        self.norm = norm_of(dim, authors)

    def forward(self, features: Features) -> Features:
        first = self.blocks[0]
        assert isinstance(first, PreNormBlock)
        x = fit(features, first.query.weight)
        x = x / 2 if self.authors else x
        for block in self.blocks:
            x = block(x, features.mask)
        return Features(F.relu(self.norm(x)), features.mask)


@part
class SharingEncoder(Around):
    """One side of label-wise retrieval: blocks(mask(front(x))), (B, L, dim).

    ==========================  =================================================================================
    front end of a modality     ``front``: a linear layer per region, or a BiGRU over words
    shared encoder              ``blocks``: one object for both towers, or one each for two separate networks
    masking rate 0.15           ``mask_rate``, of the valid tokens, each by itself; 0 for no masking
    ``<mask>``                  ``mask_id``: the id that replaces a word, before the front end; None on images
    blanked region              ``blank``: a learned vector that replaces a token of the front end, which must treat
                                every region by itself
    ==========================  =================================================================================

    Tokens are masked only while training. One token of each set is always seen, and words in ``untouched`` (padding,
    start, end, unknown) are neither masked nor predicted.
    """

    wrapped = "front"

    def __init__(
        self,
        front: Encoder,
        blocks: SharedBlocks,
        mask_rate: float = 0.0,
        mask_id: int | None = None,
        untouched: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if front.dim != blocks.dim:
            raise SettingsError(f"the front end has dim={front.dim}, the blocks {blocks.dim}: use one.")
        self.front, self.blocks, self.dim = front, blocks, blocks.dim
        self.mask_rate, self.mask_id = check_rate(mask_rate, "mask_rate"), mask_id
        self.untouched = list(untouched)
        self.blank = None
        if mask_rate and mask_id is None:
            self.blank = nn.Parameter(SPREAD_OF_BLANK * torch.randn(self.dim))

    def forward(self, inputs: Inputs) -> TokenStates:
        if not (self.training and self.mask_rate):
            return self._encode(self.front(inputs), None, None)
        if self.blank is not None:
            features: Features = self.front(inputs)
            chosen = self._choose(features.mask)
            blanked = torch.where(chosen[..., None], self.blank.to(features.values.dtype), features.values)
            return self._encode(Features(blanked, features.mask), chosen, None)
        ids = valid_first(inputs, 0)
        chosen = self._choose(ids.mask & ~torch.isin(ids.values, torch.tensor(self.untouched).to(ids.values)))
        masked = ids.values.masked_fill(chosen, self.mask_id or 0)
        return self._encode(self.front(Features(masked, ids.mask)), chosen, ids.values)

    def _choose(self, able: Tensor) -> Tensor:
        """(B, L) True where a token is masked; every set keeps one that is not."""
        return able & ~drop_each(able, self.mask_rate)

    def _encode(self, tokens: Features, chosen: Tensor | None, words: Tensor | None) -> TokenStates:
        front = ops.masked_mean(tokens.values.float(), tokens.mask)
        states = self.blocks(tokens)
        return TokenStates(states.values, states.mask, front, chosen, words)


def start_from_bert(blocks: SharedBlocks, source: str | Path) -> None:
    """Copy the first layers of a BERT into ``blocks``; ``source`` is a folder or a hub id.

    ==============================  =========================================================================
    BERT's layer i                  block i
    ==============================  =========================================================================
    query, key, value, output       the same; the number of heads changes no shape
    intermediate, output            ``first``, ``second``
    LayerNorm after attention       ``between``: in BERT, too, the norm that the feed-forward layer reads through
    LayerNorm after feed-forward    ``before`` of block i + 1; of the last layer taken ``norm``
    LayerNorm of the embeddings     ``before`` of block 0
    ==============================  =========================================================================

    The blocks stay what they are: pre-norm, with ReLU where BERT has GELU.
    """
    name = source_name(source)
    config = load_config(source)
    if config.model_type != "bert":
        raise SettingsError(f"{name} is a '{config.model_type}', not a BERT: give the folder or id of one.")
    own = [block for block in blocks.blocks if isinstance(block, PreNormBlock)]
    if config.num_hidden_layers < len(own):
        raise SettingsError(
            f"{name} has {config.num_hidden_layers} layers for {len(own)} blocks: give fewer --blocks."
        )
    wanted = config.hidden_size, config.intermediate_size
    if (blocks.dim, own[0].first.out_features) != wanted:
        raise SettingsError(
            f"{name} is {wanted[0]} wide and {wanted[1]} inside a layer, the blocks {blocks.dim} and "
            f"{own[0].first.out_features}: give --dim {wanted[0]} --feedforward {wanted[1]}."
        )
    bert = load_model(source, config, pretrained=True).get_submodule
    norms = [bert("embeddings.LayerNorm")]
    for number, block in enumerate(own):
        layer = f"encoder.layer.{number}"
        for target, place in (
            (block.query, "attention.self.query"),
            (block.key, "attention.self.key"),
            (block.value, "attention.self.value"),
            (block.out, "attention.output.dense"),
            (block.between, "attention.output.LayerNorm"),
            (block.first, "intermediate.dense"),
            (block.second, "output.dense"),
        ):
            _copy(bert(f"{layer}.{place}"), target)
        norms.append(bert(f"{layer}.output.LayerNorm"))
    for norm, target in zip(norms, [*(block.before for block in own), blocks.norm], strict=True):
        _copy(norm, target)


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module) -> None:
    for name, parameter in target.named_parameters():
        parameter.copy_(source.get_parameter(name))


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
        if dim % heads:
            raise SettingsError(f"dim={dim} does not divide over {heads} heads: choose a multiple of them.")
        self.dim, self.heads = dim, heads
        check_rate(dropout, "dropout")
        self.layers = nn.ModuleList(
            Layer(dim, heads, feedforward, dropout) for _ in range(at_least(depth, "depth", 0))
        )

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
class Contextual(Around):
    """An encoder with a transformer on top: y = transformer(inner(x)), (B, L, D).

    COOKIE gives both towers the same ``transformer`` object: "weight sharing". Given one each, the towers share
    nothing. What of ``inner`` is frozen may be cached as before; what is pretrained keeps its learning-rate factor.
    """

    wrapped = "inner"

    def __init__(self, inner: Encoder, transformer: TokenTransformer) -> None:
        super().__init__()
        if inner.dim != transformer.dim:
            raise SettingsError(f"an encoder of {inner.dim}, transformer of {transformer.dim}: use one dim.")
        self.inner, self.transformer, self.dim = inner, transformer, transformer.dim

    def forward(self, inputs: Inputs) -> Features:
        features: Features = self.transformer(self.inner(inputs))
        return features

    def packs(self, device: torch.device) -> bool:
        return self.inner.packs(device)


def _keys(mask: Tensor) -> Tensor:
    """(B, 1, 1, L): the tokens that may be attended to; all of them in an empty set, which has no valid result."""
    return (mask | ~mask.any(dim=1, keepdim=True))[:, None, None]
