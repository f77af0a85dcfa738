"""What every image backbone offers: cells from pixels, the pixels it expects, and a name for its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from diptych.weights import update_digest


class Backbone(nn.Module):
    """Pixels (B, 3, H, W) → cells (B, R, channels).

    ``pixel_format`` holds the arguments of the matching ``PixelInput``: the size, normalisation and resizing
    the weights were trained with.
    """

    channels: int

    def __init__(
        self,
        size: int,
        mean: Iterable[float],
        std: Iterable[float],
        resize: str = "stretch",
        interpolation: str = "bilinear",
    ) -> None:
        super().__init__()
        self.pixel_format: dict[str, Any] = {
            "size": size,
            "mean": list(mean),
            "std": list(std),
            "resize": resize,
            "interpolation": interpolation,
        }

    def forward(self, pixels: Tensor) -> Tensor:
        """Cells (B, R, channels), row by row."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """16 hex digits of the architecture and weights; where they were loaded from does not matter."""
        return weights_fingerprint(self, type(self).__name__)


def weights_fingerprint(module: nn.Module, label: str) -> str:
    """16 hex digits of a label and every tensor of a module."""
    digest = hashlib.sha256(label.encode())
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        update_digest(digest, value)
    return digest.hexdigest()[:16]
