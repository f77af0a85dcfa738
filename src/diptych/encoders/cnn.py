"""What a backbone sees, as features: its cells in the joint space, from pixels or cached, or its tokens as they are."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from diptych.encoders.encoder import (
    AroundNetwork,
    Backbone,
    Encoder,
    check_rate,
    check_stored,
    drop_per_image,
    fit,
)
from diptych.errors import DataError
from diptych.ops import unit, xavier_linear
from diptych.parts import part
from diptych.types import Features, Inputs


@part
class Grid(AroundNetwork):
    """Pixels (B, 3, H, W) → backbone → cells (B, R, C) → linear → (B, R, dim).

    Cells that were computed before (``Features`` of C channels) skip the backbone. ``drop`` is the Size Augmentation of
    grids. BatchNorm of the backbone always uses its stored statistics, also while it is trained.
    """

    network = "backbone"

    def __init__(
        self, backbone: Backbone, dim: int = 1024, drop: float = 0.2, trainable: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.drop = dim, check_rate(drop)
        self.backbone = backbone
        self.linear = xavier_linear(backbone.channels, dim)
        self.let_train(trainable)

    def forward(self, inputs: Inputs) -> Features:
        cells = inputs if isinstance(inputs, Features) else Features.whole(self.backbone(inputs))
        return _project(cells, self.linear, self.drop if self.training else 0.0)

    def train(self, mode: bool = True) -> Self:
        """Training mode for what is trained; BatchNorm inside the backbone never leaves evaluation mode."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self


def over_cells(found: Encoder | Backbone, dim: int, drop: float, trainable: bool) -> Encoder:
    """An encoder as it is, or the one over the cells of a backbone."""
    return Grid(found, dim, drop, trainable) if isinstance(found, Backbone) else found


@part
class PrecomputedGrid(Encoder):
    """Stored cells or global vectors (B, R, input_dim) → linear → (B, R, dim), without the backbone they came
    from.

    ``unit_input`` gives each vector unit length first, as VSE++ (2018) does with its global CNN vectors.
    """

    def __init__(self, input_dim: int, dim: int = 1024, drop: float = 0.2, unit_input: bool = False) -> None:
        super().__init__()
        self.input_dim, self.dim, self.drop, self.unit_input = input_dim, dim, check_rate(drop), unit_input
        self.linear = xavier_linear(input_dim, dim)

    def forward(self, inputs: Inputs) -> Features:
        if not isinstance(inputs, Features):
            raise DataError("this model reads grid features, not pictures: give (cells, channels) arrays.")
        cells = Features(unit(inputs.values.float()), inputs.mask) if self.unit_input else inputs
        return _project(cells, self.linear, self.drop if self.training else 0.0)


def _project(cells: Features, linear: nn.Linear, drop: float) -> Features:
    if cells.values.dim() != 3 or cells.values.shape[-1] != linear.in_features:
        raise DataError(
            f"the cells have shape {tuple(cells.values.shape)}, this encoder reads (images, cells, "
            f"{linear.in_features}): they come from another backbone, extract them again."
        )
    mask = drop_per_image(cells.mask, drop) if drop else cells.mask
    projected: Tensor = linear(fit(Features(cells.values, mask), linear.weight))
    return Features(projected, mask)


@part
class Tokens(AroundNetwork):
    """Pixels (B, 3, H, W) → backbone → tokens (B, R, channels), class token first where the backbone keeps it.

    Tokens that were computed before (``Features`` of ``channels`` numbers) pass as they are. A frozen backbone
    (``trainable=False``) stays in evaluation mode.
    """

    network = "backbone"

    def __init__(self, backbone: Backbone, trainable: bool = True) -> None:
        super().__init__()
        self.backbone, self.dim = backbone, backbone.channels
        self.let_train(trainable)

    def forward(self, inputs: Inputs) -> Features:
        if not isinstance(inputs, Features):
            return Features.whole(self.backbone(inputs))
        return check_stored(inputs, self.dim, "tokens")
