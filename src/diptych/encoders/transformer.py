"""Words → joint space by a BERT-like transformer from a local folder or the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from diptych import kernels
from diptych.encoders.encoder import (
    AroundNetwork,
    check_rate,
    drop_words,
    fit,
    text_inputs,
    weights_fingerprint,
)
from diptych.encoders.packing import PackedIds, can_pack, packed_states, unpack
from diptych.encoders.pretrained import config_identity, free_name, load_config, load_model
from diptych.errors import DataError
from diptych.ops import xavier_linear
from diptych.parts import part
from diptych.types import Features, Inputs


@part
class TransformerText(AroundNetwork):
    """Token ids (B, W) → last hidden states (B, W, H) → linear → (B, W, dim), specials included.

    States that were computed before (``Features`` of H channels) skip the transformer, so a frozen one runs
    once per text. ``drop`` is the Size Augmentation of such states, dropped by mask while training; ids are
    augmented by the text input before. ``projection=False`` leaves out the linear layer, and ``dim`` becomes
    H. A frozen transformer (``trainable=False``) stays in evaluation mode: no dropout.

    Ids that come packed (``data.packing``) go through BERT, RoBERTa, XLM-RoBERTa and CamemBERT without their padding;
    other models read them padded.
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
        """Token ids, or states computed before, → Features (B, W, dim)."""
        inputs = text_inputs(inputs)
        if isinstance(inputs, PackedIds) and self.can_pack:
            return Features(unpack(self.linear(packed_states(self.model, inputs)), inputs), inputs.mask)
        states = inputs
        if inputs.is_ids:
            states = self.states(inputs)
        elif self.training and self.drop:
            states = Features(inputs.values, drop_words(inputs.mask, self.drop))
        if states.values.shape[-1] != self.hidden:
            raise DataError(
                f"the stored text states have {states.values.shape[-1]} numbers, this transformer makes "
                f"{self.hidden}: they come from another model, compute them again."
            )
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
        """The transformer's states, unless it is trained."""
        return None if self.trainable else self

    def fingerprint(self) -> str:
        """16 hex digits of the transformer's weights, the projection left out: what its states depend on."""
        return weights_fingerprint(self.model, config_identity(self.model.config))

    def save_assets(self, folder: Path) -> dict[str, object]:
        """The transformer's configuration in a folder of its own; the weights travel with the model."""
        name = free_name(folder, "text_encoder")
        self.model.config.save_pretrained(folder / name)  # type: ignore[operator, union-attr]
        return {"source": name, "pretrained": False}

    def content_arguments(self) -> dict[str, object]:
        """The architecture, wherever it came from."""
        return {"source": config_identity(self.model.config), "pretrained": False}
