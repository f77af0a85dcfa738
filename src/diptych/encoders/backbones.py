"""Image backbones of other packages.

``HubBackbone``: transformers (ViT, DINO, CLIP, SigLIP, Swin, ConvNeXt, ResNet, …). ``TimmBackbone``: timm, behind the
extra ``timm``, which needs torchvision; nothing else here does.
"""

from __future__ import annotations

import inspect
import json
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from diptych.encoders.encoder import Backbone, weights_fingerprint
from diptych.encoders.pretrained import (
    PREPROCESSOR,
    config_identity,
    free_name,
    import_package,
    load_config,
    load_model,
    read_processor,
)
from diptych.entries import MODEL
from diptych.errors import SettingsError, reason_of
from diptych.parts import part

INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers, as image processors store them


@part
class HubBackbone(Backbone):
    """Pixels (B, 3, H, W) → the last tokens or feature map of a transformers model, (B, R, channels).

    ``source`` is a folder or a hub id, with or without ``hf:``; of a two-sided model (CLIP) the vision side
    is taken. Class and register tokens are left out unless ``class_token``. ``size`` is the picture side, by
    default the one the model was trained with; position embeddings are interpolated where the model can.
    """

    def __init__(
        self,
        source: str | Path,
        class_token: bool = False,
        pretrained: bool = True,
        size: int | None = None,
    ) -> None:
        config = load_config(source)
        config = getattr(config, "vision_config", config)
        processor = read_processor(source)
        super().__init__(**_pixel_format(processor, config, size))
        self.class_token = class_token
        self.processor = processor
        self.model = load_model(source, config, pretrained)
        self.patch = _pair(getattr(config, "patch_size", 0) or 0)
        parameters = inspect.signature(self.model.forward).parameters
        self.trained_size = getattr(config, "image_size", None)
        self.interpolates = "interpolate_pos_encoding" in parameters
        self.channels = self._channels(str(source))

    def forward(self, pixels: Tensor) -> Tensor:
        options: dict[str, Any] = {}
        if self.interpolates and tuple(pixels.shape[-2:]) != _pair(self.trained_size):
            options["interpolate_pos_encoding"] = True
        output: Tensor = self.model(pixel_values=pixels, **options).last_hidden_state
        if output.dim() == 4:  # a feature map (B, C, h, w)
            return output.flatten(2).transpose(1, 2)
        if self.class_token or 0 in self.patch:
            return output
        # what exceeds the patches stands before them: a class token, registers
        cells = (pixels.shape[-2] // self.patch[0]) * (pixels.shape[-1] // self.patch[1])
        return output[:, max(output.shape[1] - cells, 0) :]

    def fingerprint(self) -> str:
        """16 hex digits of the architecture, the weights and the choice of tokens."""
        kind = config_identity(self.model.config)
        return weights_fingerprint(self, f"{kind}{' with class token' if self.class_token else ''}")

    def save_assets(self, folder: Path) -> dict[str, object]:
        name = free_name(folder, "image_backbone")
        self.model.config.save_pretrained(folder / name)  # type: ignore[operator, union-attr]
        MODEL.write(folder / name / PREPROCESSOR, json.dumps(self.processor, indent=2))
        return {"source": name, "pretrained": False}

    def content_arguments(self) -> dict[str, object]:
        return {"source": [config_identity(self.model.config), self.processor], "pretrained": False}

    def _channels(self, source: str) -> int:
        """Seen by looking at one grey picture: configurations name their width in a dozen ways."""
        size = self.pixel_format["size"]
        self.model.eval()
        try:
            with torch.no_grad():
                return int(self(torch.zeros(1, 3, size, size)).shape[-1])
        except (ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
            reason = reason_of(error, 160)
            raise SettingsError(
                f"{source} makes no cells of {size}-pixel pictures ({reason}): choose its own size, or another."
            ) from error


def _pixel_format(processor: dict[str, Any], config: Any, size: int | None) -> dict[str, Any]:
    crop = bool(processor.get("do_center_crop", False)) and "crop_size" in processor
    if size is None:
        size = _side(processor.get("crop_size") if crop else processor.get("size"))
    if size is None:
        size = max(_pair(getattr(config, "image_size", None) or 224))
    normalised = bool(processor.get("do_normalize", True))
    return {
        "size": size,
        "mean": processor.get("image_mean", (0.5, 0.5, 0.5)) if normalised else (0.0, 0.0, 0.0),
        "std": processor.get("image_std", (0.5, 0.5, 0.5)) if normalised else (1.0, 1.0, 1.0),
        "resize": "crop" if crop else "stretch",
        "interpolation": INTERPOLATIONS.get(processor.get("resample", 2), "bilinear"),
    }


def _side(size: Any) -> int | None:
    if isinstance(size, dict):
        known = [size[key] for key in ("shortest_edge", "height", "width", "longest_edge") if size.get(key)]
        return int(known[0]) if known else None
    return int(size) if isinstance(size, int) else None


def _pair(value: Any) -> tuple[int, int]:
    if value is None:
        return 0, 0
    return (int(value[0]), int(value[1])) if isinstance(value, list | tuple) else (int(value), int(value))


PREFIX = "timm:"


@part
class TimmBackbone(Backbone):
    """Pixels (B, 3, H, W) → ``forward_features`` of a timm model, (B, R, channels).

    ``name`` is a timm name, with or without ``timm:``. Class and register tokens are left out unless
    ``class_token``. ``size`` is the picture side, by default the one the weights were trained with.
    """

    def __init__(
        self,
        name: str,
        class_token: bool = False,
        pretrained: bool = True,
        size: int | None = None,
    ) -> None:
        import_package("timm.data", "timm", "timm", "a timm: backbone")
        timm = import_module("timm")
        known = name.removeprefix(PREFIX)
        if not timm.is_model(known):
            near = get_close_matches(known.split(".")[0], timm.list_models()) or ["resnet50"]
            raise SettingsError(f"timm has no model '{known}': choose one of its names, such as {near[0]}.")
        model = _create(timm, known, pretrained)
        data: dict[str, Any] = timm.data.resolve_model_data_config(model)
        trained_size = data["input_size"][-1]
        if size not in (None, trained_size) and hasattr(model, "patch_embed"):
            model = _create(timm, known, pretrained, img_size=size)  # position embeddings are resampled
        interpolation = data["interpolation"]
        super().__init__(
            size=size or trained_size,
            mean=data["mean"],
            std=data["std"],
            interpolation=interpolation if interpolation in ("bilinear", "bicubic") else "bilinear",
        )
        self.model = model
        self.class_token = class_token
        self.channels = int(model.num_features)

    def forward(self, pixels: Tensor) -> Tensor:
        output: Tensor = self.model.forward_features(pixels)
        if output.dim() == 4:  # (B, C, h, w), but Swin gives (B, h, w, C)
            last = output.shape[1] != self.channels
            return output.flatten(1, 2) if last else output.flatten(2).transpose(1, 2)
        return output if self.class_token else output[:, int(getattr(self.model, "num_prefix_tokens", 0)) :]

    def fingerprint(self) -> str:
        return f"{super().fingerprint()}{'-tokens' if self.class_token else ''}"

    def save_assets(self, folder: object) -> dict[str, object]:
        return {"pretrained": False}

    def content_arguments(self) -> dict[str, object]:
        return {"pretrained": False}


def _create(timm: ModuleType, name: str, pretrained: bool, **options: Any) -> Any:
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        reason = reason_of(error, 160)
        raise SettingsError(f"timm cannot make '{name}' ({reason}): check its weights and size.") from error
