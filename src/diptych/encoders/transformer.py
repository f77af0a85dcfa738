"""Words → joint space by a BERT-like transformer from a local folder or the hub.

``pack`` puts the tokens of a batch end to end, so that no padding is computed, ``packed_states`` walks the layers of
BERT and its close relatives over them, and ``attend`` is the self-attention inside each text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych import kernels
from diptych.data.text import COUNT_FROM_PAD
from diptych.encoders.encoder import (
    AroundNetwork,
    check_rate,
    check_stored,
    drop_words,
    fit,
    text_inputs,
    weights_fingerprint,
)
from diptych.encoders.pretrained import config_identity, free_name, load_config, load_model
from diptych.ops import xavier_linear
from diptych.parts import part
from diptych.types import Features, Inputs

MULTIPLE = 128  # packed lengths are multiples of it: few shapes to compile or to record, and whole tiles of a product
LONGEST = 64  # tokens of a text whose scores stay in registers; batches with a longer one stay padded


@dataclass(frozen=True, slots=True)
class PackedIds(Features):
    """Token ids (B, W) that also say how they are packed into T tokens, T ≥ the valid ones.

    An encoder that does not pack reads ``values`` and ``mask`` as ever.
    """

    places: Tensor  # (T,) int64: the place b · W + w of each token, B · W for the rest
    starts: Tensor  # (B + 1,) int32: the token at which each text begins; the last counts the valid tokens

    def map(self, change: Callable[[Tensor], Tensor]) -> Features:  # type: ignore[override]
        """Apply ``change`` to every tensor (a move, a pin); a slice of rows is no longer packed."""
        before = (self.values, self.mask, self.places, self.starts)
        values, mask, places, starts = (change(tensor) for tensor in before)
        same = all(a.shape == b.shape for a, b in zip((values, mask, places, starts), before, strict=True))
        return PackedIds(values, mask, places, starts) if same else Features(values, mask)


def pack(ids: Features, multiple: int = MULTIPLE) -> Features:
    """The same texts with their packed form, computed on the CPU; unchanged where they are not ids or too long."""
    rows, width = ids.values.shape[:2]
    if not ids.is_ids or width > LONGEST or not rows:
        return ids
    mask = ids.mask.numpy()
    tokens = np.flatnonzero(mask)
    places = np.full(-(-max(len(tokens), 1) // multiple) * multiple, mask.size, dtype=np.int64)
    places[: len(tokens)] = tokens
    starts = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(mask.sum(axis=1), out=starts[1:])
    return PackedIds(ids.values, ids.mask, torch.from_numpy(places), torch.from_numpy(starts))


@torch.library.custom_op("diptych::attend", mutates_args=())
def attend(qkv: Tensor, starts: Tensor, seed: Tensor, heads: int, longest: int, dropout: float) -> Tensor:
    """softmax(QKᵀ / √width) V in each head of each document, the weights dropped with probability ``dropout``.

    ============  ==================================================================================
    ``qkv``       (T, 3 · heads · width): queries, keys and values of all tokens, documents end to end
    ``starts``    (documents + 1,) int32: the first token of each; tokens from the last entry on get zeros
    ``seed``      (1,) int64, of the dropout, on the device: a recorded step draws a new one each time
    ``longest``   at least the tokens of the longest document, at most ``LONGEST``
    ============  ==================================================================================

    Returns (T, heads · width).
    """
    if kernels.on_gpu(qkv.device):
        from diptych.kernels import document_attention as kernel

        return kernel.forward(qkv, starts, seed, heads, longest, dropout)
    _, _, value, weights, keep = _plain(qkv, starts, seed, heads, dropout)
    return _join((weights * keep) @ value)


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
    return torch.cat([_join(part) for part in found], dim=1)


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


def _join(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1).contiguous()


COUNT_FROM_ZERO = ("bert",)
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


@part
class TransformerText(AroundNetwork):
    """Token ids (B, W) → last hidden states (B, W, H) → linear → (B, W, dim), specials included.

    States that were computed before (``Features`` of H channels) skip the transformer. ``drop`` is the Size
    Augmentation of such states; ids are augmented by the text input before. ``projection=False`` leaves out the linear
    layer, and ``dim`` becomes H. Ids that come packed go through BERT, RoBERTa, XLM-RoBERTa and CamemBERT without their
    padding.
    """

    network = "model"

    def __init__(
        self,
        source: str | Path,
        dim: int = 1024,
        trainable: bool = True,
        drop: float = 0.0,
        pretrained: bool = True,
        projection: bool = True,
    ) -> None:
        super().__init__()
        self.drop = check_rate(drop)
        self.model = load_model(source, load_config(source), pretrained)
        self.hidden = int(self.model.config.hidden_size)  # type: ignore[arg-type, union-attr]
        self.dim = dim if projection else self.hidden
        self.linear = xavier_linear(self.hidden, dim) if projection else nn.Identity()
        self.can_pack = can_pack(self.model)
        self.let_train(trainable)

    def forward(self, inputs: Inputs) -> Features:
        inputs = text_inputs(inputs)
        if isinstance(inputs, PackedIds) and self.can_pack:
            return Features(unpack(self.linear(packed_states(self.model, inputs)), inputs), inputs.mask)
        states = inputs
        if inputs.is_ids:
            states = self.states(inputs)
        elif self.training and self.drop:
            states = Features(inputs.values, drop_words(inputs.mask, self.drop))
        check_stored(states, self.hidden, "text states")
        if isinstance(self.linear, nn.Linear):
            return Features(self.linear(fit(states, self.linear.weight)), states.mask)
        return states

    def states(self, ids: Features) -> Features:
        """Last hidden states (B, W, H) of token ids, before the projection."""
        hidden: Tensor = self.model(input_ids=ids.values, attention_mask=ids.mask.long()).last_hidden_state
        return Features(hidden, ids.mask)

    def packs(self, device: torch.device) -> bool:
        """On NVIDIA GPUs, where the model can."""
        return can_pack(self.model) and kernels.on_gpu(device)  # asked again: adapters may have been added

    def frozen_part(self) -> TransformerText | None:
        return None if self.trainable else self

    def fingerprint(self) -> str:
        """16 hex digits of the transformer's weights, the projection left out: what its states depend on."""
        return weights_fingerprint(self.model, config_identity(self.model.config))

    def save_assets(self, folder: Path) -> dict[str, object]:
        name = free_name(folder, "text_encoder")
        self.model.config.save_pretrained(folder / name)  # type: ignore[operator, union-attr]
        return {"source": name, "pretrained": False}

    def content_arguments(self) -> dict[str, object]:
        return {"source": config_identity(self.model.config), "pretrained": False}
