"""What the sides of every dual encoder share: freezing, stored vectors, the scale of the logits, low-rank adapters.

The adapters (LoRA) come from peft, an extra. They are trained beside frozen weights and saved merged into them.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from diptych.encoders.encoder import Backbone, Encoder, weights_fingerprint
from diptych.errors import SettingsError, at_least, import_extra
from diptych.types import Features

TARGETS = ("q_proj", "v_proj")  # the attention's queries and values, as in the LoRA paper
SCALE = 2.0  # α / r: the update is SCALE · B A
NAME = "default"  # peft's name of the only adapter


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a transformer and give its queries and values adapters of ``rank``: W x → W x + SCALE · B A x, B = 0."""
    peft = import_extra("peft", "lora", "training with LoRA")
    config = peft.LoraConfig(
        r=at_least(rank, "lora, the rank of an adapter,", 1),
        lora_alpha=SCALE * rank,
        target_modules=list(TARGETS),
        lora_dropout=0.0,
    )
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise SettingsError(
            f"this encoder has no layers called {' or '.join(TARGETS)} for LoRA: tune it in full."
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


class DualSide(Encoder):
    """One side of a dual encoder: its network, and the projection to the joint space.

    The output is a set of vectors of ``dim`` numbers; its first element is the model's own pooled vector, which
    ``First`` takes. Vectors that were computed before pass as they are.
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
        super().train(mode and self.trainable)
        self.training = mode
        return self

    def fingerprint(self) -> str:
        return weights_fingerprint(self, f"{type(self).__name__} {self.dim}")


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
