"""BERT and its close relatives on packed texts: the same layers and weights, walked without padding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.encoders.documents import attend
from diptych.encoders.packing import PackedIds

COUNT_FROM_ZERO = ("bert",)
COUNT_FROM_PAD = (
    "roberta",
    "xlm-roberta",
    "camembert",
)  # the first position has the number of the pad token, plus 1

WIDTHS = (16, 32, 64, 128)  # widths of a head that the matrix units take


def can_pack(model: nn.Module) -> bool:
    """Whether ``packed_states`` computes what ``model`` does: an encoder of the BERT family, its layers unchanged."""
    config: Any = model.config
    if config.model_type not in COUNT_FROM_ZERO + COUNT_FROM_PAD or getattr(config, "is_decoder", False):
        return False
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return False
    layers: Any = model.encoder.layer  # type: ignore[union-attr]
    parts = [getattr(layer.attention.self, name) for layer in layers for name in ("query", "key", "value")]
    width = config.hidden_size // config.num_attention_heads
    return width in WIDTHS and all(type(part) is nn.Linear for part in parts)  # no adapters


def packed_states(model: Any, ids: PackedIds) -> Tensor:
    """The last hidden states of the packed tokens, (T, H); those beyond the last text are arbitrary, but finite."""
    config = model.config
    width = ids.values.shape[1]
    tokens = ids.values.flatten()[ids.places.clamp_max(ids.values.numel() - 1)]  # (T,)
    positions = ids.places % width
    if config.model_type in COUNT_FROM_PAD:
        positions = positions + config.pad_token_id + 1
    tables = model.embeddings
    hidden: Tensor = tables.word_embeddings(tokens) + tables.token_type_embeddings.weight[0]
    hidden = tables.dropout(tables.LayerNorm(hidden + tables.position_embeddings(positions)))
    # drawn on the device, so that a recorded step draws new ones each time it is replayed
    seeds = torch.randint(2**31, (len(model.encoder.layer),), device=tokens.device)
    for number, layer in enumerate(model.encoder.layer):
        own, after = layer.attention.self, layer.attention.output
        three = (own.query, own.key, own.value)
        # one product instead of three
        qkv = F.linear(hidden, torch.cat([x.weight for x in three]), torch.cat([x.bias for x in three]))
        rate = own.dropout.p if own.training else 0.0
        seen = attend(qkv, ids.starts, seeds[number : number + 1], config.num_attention_heads, width, rate)
        hidden = after.LayerNorm(after.dropout(after.dense(seen)) + hidden)
        inner = layer.intermediate.intermediate_act_fn(layer.intermediate.dense(hidden))
        hidden = layer.output.LayerNorm(layer.output.dropout(layer.output.dense(inner)) + hidden)
    return hidden


def unpack(packed: Tensor, ids: PackedIds) -> Tensor:
    """Rows (T, D) of packed tokens back to (B, W, D), zeros where there is no token."""
    rows, width = ids.values.shape
    padded = packed.new_zeros(rows * width + 1, packed.shape[1])  # the last takes what belongs to no text
    return padded.index_copy(0, ids.places, packed)[:-1].view(rows, width, -1)
