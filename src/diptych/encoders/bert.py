"""BERT (Devlin et al., 2019) from a folder, in plain torch: the layers, names and numbers of transformers' BertModel.

A search has to answer at once, and importing the models of transformers takes longer than everything else it does.
What is in any way unusual (a decoder, another activation, weights in several files) is left to transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych import ops
from diptych.encoders.pretrained import source_name
from diptych.storage import MODEL, parse_json
from diptych.weights import read_tensors

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "pad_token_id": 0, "use_cache": True, "classifier_dropout": None, "is_decoder": False, "add_cross_attention": False,
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True, "architectures": None,
    "output_hidden_states": False, "return_dict": True, "dtype": None, "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "problem_type": None, "output_attentions": False, "model_type": "bert",
}  # fmt: skip
"""What transformers takes a setting for that config.json does not state."""
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size",
)  # fmt: skip
FIXED = (
    "model_type", "hidden_act", "is_decoder", "add_cross_attention", "chunk_size_feed_forward", "is_encoder_decoder",
    "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id", "problem_type",
)  # fmt: skip
"""Settings that must be as usual for these layers to compute what transformers would."""
EXTRA = {
    "gradient_checkpointing",
    "position_embedding_type",
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
}
LARGEST = 10_000_000  # largest size; transformers refuses larger ones
UNUSED = ("pooler.", "cls.", "embeddings.position_ids", "embeddings.token_type_ids")


class BertConfig(SimpleNamespace):
    """The settings of config.json, those it leaves out included."""

    def to_dict(self) -> dict[str, Any]:
        """All of them."""
        return dict(vars(self))

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        MODEL.write(folder / "config.json", json.dumps(self.to_dict(), indent=2, sort_keys=True))


class States(NamedTuple):
    """What a transformer made of its tokens."""

    last_hidden_state: Tensor  # (B, W, H)


class Embedded(nn.Module):
    """Token ids (B, W) → (B, W, H): pieces + kind + position, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = _table(config.vocab_size, width, config.pad_token_id)
        self.position_embeddings = _table(config.max_position_embeddings, width)
        self.token_type_embeddings = _table(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids → vectors; every token is of the first kind."""
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        kinds = self.token_type_embeddings(torch.zeros_like(ids))
        hidden: Tensor = self.word_embeddings(ids) + kinds + self.position_embeddings(places)
        normal: Tensor = self.dropout(self.LayerNorm(hidden))
        return normal


class SelfAttention(nn.Module):
    """Queries, keys and values of all heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """(B, W, H) → (B, W, H), each token a mean of the values it looks at."""
        split = (*hidden.shape[:2], self.heads, -1)
        query, key, value = (
            part(hidden).view(split).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        rate = self.dropout.p if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate)
        return seen.transpose(1, 2).reshape(hidden.shape)


class Added(nn.Module):
    """A linear map with dropout, added to what came before and normalised."""

    def __init__(self, width: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """LayerNorm(dropout(W hidden + b) + before)."""
        added: Tensor = self.LayerNorm(self.dropout(self.dense(hidden)) + before)
        return added


class Attention(nn.Module):
    """Self-attention and its residual."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Added(config.hidden_size, config)


class Intermediate(nn.Module):
    """The wide layer and its activation."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = nn.GELU()


class Layer(nn.Module):
    """One layer of the transformer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = Added(config.intermediate_size, config)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """(B, W, H) → (B, W, H)."""
        seen = self.attention.output(self.attention.self(hidden, mask), hidden)
        inner = self.intermediate.intermediate_act_fn(self.intermediate.dense(seen))
        after: Tensor = self.output(inner, seen)
        return after


class Layers(nn.Module):
    """The layers in order."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))


class Bert(nn.Module):
    """BERT without its pooling head; weights are called as in transformers' BertModel."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embedded(config)
        self.encoder = Layers(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> States:
        """Ids and mask (B, W) → the last layer's states (B, W, H)."""
        hidden = self.embeddings(input_ids)
        mask = _wide(attention_mask)
        for layer in self.encoder.layer:
            hidden = layer(hidden, mask)
        return States(hidden)


def read_bert(source: str | Path, pretrained: bool) -> Bert | None:
    """BERT from a local folder, with its weights or, for others to follow, drawn as BERT's are; None: not usual."""
    folder = Path(source_name(source))
    try:
        config = _config(folder / "config.json")
        if config is None:
            return None
        with torch.device("meta"):
            model = Bert(config)
        state = (
            _weights(folder / "model.safetensors", set(model.state_dict())) if pretrained else _drawn(model)
        )
        if state is None:
            return None
        model.load_state_dict(state, strict=True, assign=True)
    except Exception:  # missing, damaged or unusual: transformers has the sentence, or reads it after all
        return None
    return model.eval()


def _table(rows: int, width: int, padding: int | None = None) -> nn.Embedding:
    """An embedding whose weights are not drawn: torch imports its compiler to draw on the meta device."""
    return nn.Embedding(rows, width, padding_idx=padding, _weight=torch.empty(rows, width))


def _config(file: Path) -> BertConfig | None:
    found = parse_json(MODEL.read(file))
    if found.get("model_type") != "bert" or set(found) - set(DEFAULTS) - EXTRA:
        return None
    values = {**DEFAULTS, **found}
    usual = all(values[key] == DEFAULTS[key] for key in FIXED)
    sizes = all(type(values[key]) is int and 0 < values[key] <= LARGEST for key in SIZES)
    rates = all(
        isinstance(values[key], float | int) and 0 <= values[key] < 1
        for key in (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "layer_norm_eps",
            "initializer_range",
        )
    )
    if not (usual and sizes and rates) or values.get("position_embedding_type", "absolute") != "absolute":
        return None
    fits = values["hidden_size"] % values["num_attention_heads"] == 0
    padded = type(values["pad_token_id"]) is int and 0 <= values["pad_token_id"] < values["vocab_size"]
    return BertConfig(**values) if fits and padded else None


def _weights(file: Path, wanted: set[str]) -> dict[str, Tensor] | None:
    """The weights of exactly these names, in float32; None where they are others."""
    found = {name.removeprefix("bert."): value for name, value in read_tensors(file).items()}
    kept = {name: value.float() for name, value in found.items() if not name.startswith(UNUSED)}
    return kept if set(kept) == wanted else None


def _drawn(model: Bert) -> dict[str, Tensor]:
    """Weights from N(0, ``initializer_range``), no biases, as BERT starts."""
    state = {name: torch.empty(value.shape) for name, value in model.state_dict().items()}
    for name, value in state.items():
        if name.endswith("LayerNorm.weight"):
            value.fill_(1.0)
        elif name.endswith("bias"):
            value.zero_()
        else:
            value.normal_(0.0, model.config.initializer_range)
    state["embeddings.word_embeddings.weight"][model.config.pad_token_id] = 0.0
    return state


def _wide(mask: Tensor) -> Tensor | None:
    """The mask (B, 1, W, W) of what each token may look at; None where that is everything, which is quicker."""
    watched = (
        torch.compiler.is_compiling()
        or ops.is_exported()
        or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    )
    if not watched and bool(mask.all()):
        return None
    seen = mask.bool()[:, None, None, :]
    return seen.expand(-1, 1, mask.shape[1], -1)
