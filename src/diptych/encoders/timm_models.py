"""Image backbones of timm, behind the extra ``timm`` (which needs torchvision; nothing else here does)."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from diptych.encoders.backbone import Backbone
from diptych.encoders.torchvision_packages import import_package
from diptych.errors import SettingsError
from diptych.parts import part

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
        timm = _timm()
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
        """Cells (B, R, channels), row by row."""
        output: Tensor = self.model.forward_features(pixels)
        if output.dim() == 4:  # (B, C, h, w), but Swin gives (B, h, w, C)
            last = output.shape[1] != self.channels
            return output.flatten(1, 2) if last else output.flatten(2).transpose(1, 2)
        return output if self.class_token else output[:, int(getattr(self.model, "num_prefix_tokens", 0)) :]

    def fingerprint(self) -> str:
        """16 hex digits of the architecture, the weights and the choice of tokens."""
        return f"{super().fingerprint()}{'-tokens' if self.class_token else ''}"

    def save_assets(self, folder: object) -> dict[str, object]:
        """The weights travel with the model."""
        return {"pretrained": False}

    def content_arguments(self) -> dict[str, object]:
        """Where the weights came from does not matter."""
        return {"pretrained": False}


def _create(timm: ModuleType, name: str, pretrained: bool, **options: Any) -> Any:
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise SettingsError(f"timm cannot make '{name}' ({reason}): check its weights and size.") from error


def _timm() -> ModuleType:
    import_package("timm.data", "timm", "timm", "a timm: backbone")
    return import_module("timm")
