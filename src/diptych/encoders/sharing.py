"""Label-wise retrieval: one pre-norm transformer over region tokens and over word tokens, with tokens masked inside.

A masked token is replaced before anything looks at it, so its content cannot be read from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych import ops
from diptych.encoders.bigru import valid_first
from diptych.encoders.encoder import Encoder, check_rate, drop_each, fit
from diptych.encoders.pretrained import load_config, load_model, source_name
from diptych.errors import SettingsError
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


class Block(nn.Module):
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
        keys = (mask | ~mask.any(dim=1, keepdim=True))[
            :, None, None
        ]  # an empty set has no valid result anyway
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, dropout_p=rate)
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
        if depth < 1:
            raise SettingsError(f"depth={depth} is not a count of blocks: give 1 or more (6 in the paper).")
        if dim % heads:
            raise SettingsError(f"dim={dim} does not divide over {heads} heads: choose a multiple of them.")
        self.dim, self.authors = dim, authors
        check_rate(dropout, "dropout")
        self.blocks = nn.ModuleList(Block(dim, heads, feedforward, dropout, authors) for _ in range(depth))
        self.norm = norm_of(dim, authors)

    def forward(self, features: Features) -> Features:
        first = self.blocks[0]
        assert isinstance(first, Block)
        x = fit(features, first.query.weight)
        x = x / 2 if self.authors else x
        for block in self.blocks:
            x = block(x, features.mask)
        return Features(F.relu(self.norm(x)), features.mask)


@part
class SharingEncoder(Encoder):
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
            raise SettingsError(
                f"the front end makes {front.dim} numbers per token, the shared blocks read {blocks.dim}: "
                "build both with the same dim."
            )
        self.front, self.blocks, self.dim = front, blocks, blocks.dim
        self.mask_rate, self.mask_id, self.untouched = (
            check_rate(mask_rate, "mask_rate"),
            mask_id,
            list(untouched),
        )
        self.blank = None
        if mask_rate and mask_id is None:
            self.blank = nn.Parameter(SPREAD_OF_BLANK * torch.randn(self.dim))

    def frozen_part(self) -> nn.Module | None:
        return self.front.frozen_part()

    def pretrained(self) -> tuple[str, ...]:
        return tuple(f"front.{name}" for name in self.front.pretrained())

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
    own = [block for block in blocks.blocks if isinstance(block, Block)]
    if config.num_hidden_layers < len(own):
        raise SettingsError(
            f"{name} has {config.num_hidden_layers} layers, fewer than the {len(own)} blocks: give fewer --blocks."
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
