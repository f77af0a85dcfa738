"""Dual encoders: what both sides share, and what ``hf:ID``, ``open_clip:NAME``, ``lite0+minilm`` or a folder names.

Adapters (LoRA) come from peft, an extra. They are trained beside frozen weights and saved merged into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from diptych.data.images import ImageInput
from diptych.data.text import TextInput
from diptych.encoders.encoder import Backbone, Freezable, weights_fingerprint
from diptych.encoders.known_names import CLASS_WORDS, is_open_clip, is_pretrained_name
from diptych.errors import DataError, MissingExtra, SettingsError
from diptych.storage import MODEL, parse_json
from diptych.types import Features

TARGETS = ("q_proj", "v_proj")  # the attention's queries and values, as in the LoRA paper
SCALE = 2.0  # α / r: the update is SCALE · B A
NAME = "default"  # peft's name of the only adapter


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a transformer and give its queries and values adapters of ``rank``: W x → W x + SCALE · B A x, B = 0."""
    if rank < 1:
        raise SettingsError(f"lora={rank} is not a rank of an adapter: give 1 or more (8 is usual).")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise MissingExtra("peft", "lora", "training with LoRA") from error
    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=list(TARGETS), lora_dropout=0.0)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise SettingsError(
            f"this encoder has no layers called {' or '.join(TARGETS)} for LoRA: tune it in full instead."
        ) from error


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state without adapters that computes the same: W + SCALE · B A in the place of each adapted W."""
    adapted = {name.split(".lora_A.")[0] for name in state if ".lora_A." in name}
    plain = {}
    for name, value in state.items():
        layer, inner, rest = name.partition(".base_layer.")
        if is_adapter(name):
            continue
        if inner and layer in adapted:
            if rest == "weight":
                value = (
                    value
                    + SCALE * state[f"{layer}.lora_B.{NAME}.weight"] @ state[f"{layer}.lora_A.{NAME}.weight"]
                )
            plain[f"{layer}.{rest}"] = value
        else:
            plain[name] = value
    return plain


class DualSide(Freezable):
    """One side of a dual encoder: its network, and the projection to the joint space.

    The output is a set of vectors of ``dim`` numbers, not of unit length. Its first element is the model's own
    pooled vector; the aggregator ``First`` takes it. Vectors that were computed before (``Features`` of ``dim``
    numbers) pass as they are. A frozen side (``trainable=False``) stays in evaluation mode.
    """

    dim: int
    trainable: bool = True
    adapted: bool = False

    def pretrained(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.named_children()) if self.trainable else ()

    def let_train(self, trainable: bool) -> None:
        """Freeze or unfreeze; where there are adapters, they alone are trained."""
        self.trainable = trainable
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trainable and (is_adapter(name) or not self.adapted))
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Training mode for what is trained."""
        super().train(mode and self.trainable)
        self.training = mode
        return self

    def fingerprint(self) -> str:
        return weights_fingerprint(self, f"{type(self).__name__} {self.dim}")

    def stored(self, inputs: Features) -> Features:
        """Vectors that were computed before, once their width has been checked."""
        if inputs.is_ids or inputs.values.shape[-1] != self.dim:
            raise DataError(
                f"the stored vectors have {inputs.values.shape[-1]} numbers, this encoder makes {self.dim}: "
                "they come from another model, compute them again."
            )
        return inputs


class Vectors(Backbone):
    """A frozen image side as a backbone: its vectors (B, L, dim) can be computed once and cached."""

    def __init__(self, side: DualSide) -> None:
        nn.Module.__init__(self)  # the pixels are the side's own input's business
        self.side, self.channels = side, side.dim
        self.pixel_format = {}

    def forward(self, pixels: Tensor) -> Tensor:
        seen: Features = self.side(pixels)
        return seen.values

    def fingerprint(self) -> str:
        return self.side.fingerprint()


class DualImageSide(DualSide):
    """An image side, which also keeps the scale (its logarithm) and the bias of the model's logits."""

    logit_scale: Tensor

    def frozen_part(self) -> nn.Module | None:
        return None if self.trainable else Vectors(self)

    def keep_scale(self, scale: float, bias: float) -> None:
        """Remember the scale s and bias b of the logits e^s · cosine + b; they travel with the weights."""
        self.register_buffer("logit_scale", torch.tensor([scale, bias]))

    @property
    def temperature(self) -> float:
        """The τ of this model: 1 / its logit scale."""
        return float(torch.exp(-self.logit_scale[0]))

    def logits(self, scores: Tensor) -> Tensor:
        """Cosines as the model's own logits: e^s · cosine + b."""
        return scores * self.logit_scale[0].exp() + self.logit_scale[1]


@dataclass(frozen=True)
class DualEncoder:
    """Both sides of a dual encoder and the inputs they read."""

    image: DualImageSide
    text: DualSide
    image_input: ImageInput
    text_input: TextInput


def is_dual_encoder(source: str | Path) -> bool:
    """Whether ``load_dual`` opens it: a name, or a folder in the format of transformers or open_clip."""
    if is_pretrained_name(source) or is_open_clip(source):
        return True
    try:
        config = parse_json(MODEL.read(Path(source) / "config.json"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config


def load_dual(source: str | Path, *, local: bool = False, lora: int = 0) -> DualEncoder:
    """A pretrained dual encoder with its own inputs.

    With ``local`` also the vectors of patches and words; with ``lora`` adapters of that rank, which alone are trained.
    """
    untrained = str(source) == CLASS_WORDS
    if untrained or is_open_clip(source):
        if local or lora:
            wanted = "local features" if local else "adapters for LoRA"
            other = "a CLIP model, as in hf:ID" if untrained else "the hf: form of the model"
            raise SettingsError(f"{source} has no {wanted}: use {other}.")
        if untrained:
            from diptych.encoders.class_words import load_class_words

            return DualEncoder(*load_class_words())
        from diptych.encoders.open_clip_models import load_open_clip

        return DualEncoder(*load_open_clip(source))
    from diptych.encoders import clip

    images, texts = clip.clip_inputs(source)  # first: small files, and most mistakes
    model = clip.load_clip(source)
    image = clip.ClipImage(model, local=local, lora=lora)
    return DualEncoder(image, clip.ClipText(model, local=local, lora=lora), images, texts)
