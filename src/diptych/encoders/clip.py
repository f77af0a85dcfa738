"""Dual encoders of transformers: the two sides of a CLIP, SigLIP or SigLIP 2 model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diptych.data.images import ImageInput
from diptych.data.processors import processor_input
from diptych.data.text import TextInput, WordPieceInput
from diptych.data.text_inputs import FixedLengthInput
from diptych.encoders.dual_side import DualImageSide, DualSide, add_lora
from diptych.encoders.encoder import check_stored, text_inputs, weights_fingerprint
from diptych.encoders.pretrained import (
    config_identity,
    free_name,
    load_config,
    load_model,
    quiet_lookup,
    read_json,
    read_processor,
    source_name,
)
from diptych.errors import DataError, MissingExtra
from diptych.parts import part
from diptych.types import Features, Inputs

FAMILIES = ("clip", "metaclip_2", "siglip", "siglip2")  # model types of transformers
FIXED_LENGTH = ("siglip", "siglip2")  # padding is part of the text
GRID_NUMBERS = 2  # numbers at the end of a NaFlex patch: the height and width of its grid


class _TransformersSide(DualSide):
    """One side of a model of transformers. Its first vector is that of ``get_image_features`` or
    ``get_text_features``; with ``local`` the projected patches or words follow, for pair scorers and other poolings.
    With ``lora`` only adapters of that rank are trained (see ``add_lora``). ``source`` is a folder, a hub id with or
    without ``hf:``, or the loaded model.
    """

    kind: Literal["vision", "text"]
    asset: str

    def __init__(
        self,
        source: str | Path | nn.Module,
        trainable: bool = True,
        local: bool = False,
        pretrained: bool = True,
        lora: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.projection, self.config, scale = _half(source, self.kind, pretrained)
        self.dim, self.local, self.adapted = _width(self.config, self.kind), local, lora != 0
        if lora:
            add_lora(self.model, lora)
        self._take_scale(*scale)
        self.let_train(trainable)

    def _take_scale(self, scale: float, bias: float) -> None:
        """Told the scale and bias of the model's logits, once this side of it is there."""

    def fingerprint(self) -> str:
        return weights_fingerprint(self, f"{config_identity(self.config)} {self.local}")

    def save_assets(self, folder: Path) -> dict[str, object]:
        name = free_name(folder, self.asset)
        self.config.save_pretrained(folder / name)
        return {"source": name, "pretrained": False, "lora": 0}

    def content_arguments(self) -> dict[str, object]:
        return {"source": config_identity(self.config), "pretrained": False, "lora": 0}

    def _set(self, pooled: Tensor, others: Tensor, mask: Tensor | None) -> Features:
        """The pooled vector (B, dim), then the ``others`` (B, L, dim) where they are asked for."""
        first = Features.whole(pooled[:, None])
        if not self.local:
            return first
        rest = Features.whole(others) if mask is None else Features(others, mask)
        return Features(torch.cat([first.values, rest.values], 1), torch.cat([first.mask, rest.mask], 1))


@part
class ClipImage(_TransformersSide, DualImageSide):
    """The image side: pixels (B, 3, H, W) or NaFlex patches → Features (B, 1, dim), with ``local`` (B, 1 + R, dim)."""

    kind, asset = "vision", "image_encoder"

    def _take_scale(self, scale: float, bias: float) -> None:
        self.keep_scale(scale, bias)
        vision = self.config.vision_config
        self.patch = int(vision.patch_size) ** 2 * int(getattr(vision, "num_channels", 3)) + GRID_NUMBERS

    def forward(self, inputs: Inputs) -> Features:
        naflex = self.config.model_type == "siglip2"
        if isinstance(inputs, Features) and not (naflex and inputs.values.shape[-1] == self.patch):
            return check_stored(inputs, self.dim, "vectors")
        if naflex != isinstance(inputs, Features):
            raise DataError("this model reads patches of pictures: prepare them with the model's own input.")
        mask = None
        if isinstance(inputs, Features):
            mask = inputs.mask
            shapes = inputs.values[:, 0, -GRID_NUMBERS:].round().long()
            seen = self.model(
                pixel_values=inputs.values[..., :-GRID_NUMBERS],
                pixel_attention_mask=mask.long(),
                spatial_shapes=shapes,
            )
        else:
            seen = self.model(pixel_values=inputs)
        pooled = self.projection(seen.pooler_output)
        return self._set(pooled, self._patches(seen.last_hidden_state) if self.local else pooled, mask)

    def frozen_part(self) -> nn.Module | None:
        """All of it, unless it is trained; NaFlex patches differ in number, and are not cached."""
        return None if self.config.model_type == "siglip2" else super().frozen_part()

    def _patches(self, states: Tensor) -> Tensor:
        """Local vectors (B, R, dim): as the pooled one is made of the class token, or SigLIP's states."""
        if self.config.model_type in FIXED_LENGTH:
            return states
        normed: Tensor = self.model.post_layernorm(states[:, 1:])  # type: ignore[operator]
        projected: Tensor = self.projection(normed)
        return projected


@part
class ClipText(_TransformersSide):
    """The text side: token ids (B, W) → Features (B, 1, dim), with ``local`` (B, 1 + W, dim)."""

    kind, asset = "text", "text_encoder"

    def forward(self, inputs: Inputs) -> Features:
        texts = text_inputs(inputs)
        if not texts.is_ids:
            return check_stored(texts, self.dim, "vectors")
        seen = self.model(input_ids=texts.values, attention_mask=texts.mask.long())
        pooled = self.projection(seen.pooler_output)
        return self._set(pooled, self._words(seen.last_hidden_state) if self.local else pooled, texts.mask)

    def _words(self, states: Tensor) -> Tensor:
        """Local vectors (B, W, dim), projected as the pooled one is."""
        head = self.model.head if self.config.model_type in FIXED_LENGTH else self.projection
        projected: Tensor = head(states)  # type: ignore[operator]
        return projected


def load_clip(source: str | Path) -> nn.Module:
    """The whole dual encoder of a folder or hub id, every weight of it, in float32."""
    return load_model(source, _dual_config(source), pretrained=True)


def clip_inputs(source: str | Path) -> tuple[ImageInput, TextInput]:
    """The inputs of a dual encoder: its own image processor and tokenizer."""
    config, name = _dual_config(source), source_name(source)
    size = getattr(config.vision_config, "image_size", None) or 224
    images = processor_input(read_processor(source), int(size))
    length = int(config.text_config.max_position_embeddings)
    texts: FixedLengthInput | WordPieceInput
    with quiet_lookup(name):
        if config.model_type in FIXED_LENGTH:
            _check_sentencepiece(source)
            texts = FixedLengthInput(name, length)
            if type(texts.tokenizer).__name__.startswith("Gemma"):
                # SigLIP 2 read lower-cased texts; Gemma's tokenizer, which its files name, keeps the case
                texts = FixedLengthInput(name, length, lower=True)
        else:
            texts = WordPieceInput(name, augment=0.0)
            if texts.max_length > length:  # a tokenizer that does not know its model's limit
                texts = WordPieceInput(name, augment=0.0, max_length=length)
    if texts.vocabulary_size > config.text_config.vocab_size:
        raise DataError(
            f"the tokenizer of {name} has {texts.vocabulary_size} tokens, its model reads "
            f"{config.text_config.vocab_size}: they belong to different models, copy both again."
        )
    return images, texts


def _check_sentencepiece(source: str | Path) -> None:
    """Without sentencepiece transformers falls back on a tokenizer that keeps case and punctuation."""
    kind = str((read_json(source, "tokenizer_config.json") or {}).get("tokenizer_class", ""))
    if kind.startswith("SiglipTokenizer") and find_spec("sentencepiece") is None:
        raise MissingExtra("sentencepiece", "siglip", "the tokenizer of a SigLIP model")


def _dual_config(source: str | Path) -> Any:
    config = load_config(source)
    if config.model_type not in FAMILIES:
        raise DataError(
            f"{source_name(source)} is a '{config.model_type}', which does not embed pictures and texts: give a "
            "CLIP, SigLIP or SigLIP 2 model."
        )
    return config


def _half(
    source: str | Path | nn.Module, kind: str, pretrained: bool
) -> tuple[nn.Module, nn.Module, Any, tuple[float, float]]:
    """One side's transformer, its projection, the whole configuration, and the scale and bias of the logits."""
    name = "visual_projection" if kind == "vision" else "text_projection"
    if isinstance(source, nn.Module) or pretrained:
        dual = source if isinstance(source, nn.Module) else load_clip(source)
        bias = getattr(dual, "logit_bias", None)
        scale = dual.logit_scale.item(), 0.0 if bias is None else bias.item()  # type: ignore[operator]
        half: nn.Module = getattr(dual, f"{kind}_model")
        return half, getattr(dual, name, None) or nn.Identity(), dual.config, scale
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config = _dual_config(source)
    with torch.device("meta"):  # to see how the parts are called; only this side is then made
        whole = MODEL_MAPPING[type(config)](config)
    half = type(getattr(whole, f"{kind}_model"))(getattr(config, f"{kind}_config"))
    shape = getattr(whole, name, None)
    projection = (
        nn.Identity() if shape is None else nn.Linear(shape.in_features, shape.out_features, bias=False)
    )
    return half, projection, config, (0.0, 0.0)  # the weights bring them


def _width(config: Any, kind: str) -> int:
    if config.model_type not in FIXED_LENGTH:
        return int(config.projection_dim)
    return int(config.vision_config.hidden_size if kind == "vision" else config.text_config.projection_size)
