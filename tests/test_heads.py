from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dual_folders import clip_folder
from small import pictures
from torch import nn

from diptych.aggregators import First
from diptych.aggregators.pooling import Head
from diptych.branches.branch import FirstVectors, UniModalHeads
from diptych.data.images import open_image
from diptych.encoders.dual import load_dual
from diptych.model.retriever import Retriever, Tower
from diptych.types import Features, as_inputs

TEXTS = ["a red dog", "two big cats near a house"]


def layer_norm_then_linear(head: nn.Sequential, rows: torch.Tensor) -> torch.Tensor:
    """W · ((x − mean) / √(var + ε) · γ + β) + b, row by row, in float64."""
    norm, linear = head
    out = []
    for row in rows.double():
        centred = row - row.mean()
        scaled = (
            centred / torch.sqrt((centred**2).mean() + norm.eps) * norm.weight.double() + norm.bias.double()
        )
        out.append(linear.weight.double() @ scaled + linear.bias.double())
    return torch.stack(out)


def test_a_head_is_layer_norm_and_linear_on_the_first_element() -> None:
    torch.manual_seed(0)
    head = Head(6, 4)
    torch.nn.init.normal_(head.head[0].weight)
    torch.nn.init.normal_(head.head[0].bias)
    features = Features.whole(torch.randn(3, 5, 6))
    with torch.no_grad():
        found = head(features)
        assert torch.allclose(
            found.double(), layer_norm_then_linear(head.head, features.values[:, 0]), atol=1e-6
        )
        assert torch.equal(found, head(Features.whole(features.values[:, :1])))
    assert head.dim_of(6) == 4
    assert len(Head(6, 4, norm=False).head) == 1
    assert Head(600, 400).head[1].weight.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("models") / "clip")


def with_heads(clip: Path) -> Retriever:
    torch.manual_seed(0)
    dual = load_dual(clip)
    towers = [Tower(side, Head(side.dim, side.dim)) for side in (dual.image, dual.text)]
    uni = UniModalHeads(7, dual.image.dim, dual.text.dim, True, First(), First())
    return Retriever(*towers, dual.image_input, dual.text_input, {"uni": uni}).eval()


def test_uni_modal_heads_are_a_view_beside_the_score(clip: Path, tmp_path: Path) -> None:
    retriever, files = with_heads(clip), pictures(tmp_path / "p", 3)
    assert retriever.dim == 12
    raw = Retriever.from_pretrained(clip)
    with torch.no_grad():
        f = raw.image.encoder(as_inputs(raw.image_input([open_image(p) for p in files]))).values[:, 0]
        uni, cross = retriever.branches["uni"], retriever.image.aggregator.head
        expected = layer_norm_then_linear(uni.image_head, f)
        crossed = layer_norm_then_linear(cross, f)
    unit = torch.nn.functional.normalize
    assert torch.allclose(retriever.encode_image(files, view="uni").double(), unit(expected), atol=1e-5)
    assert torch.allclose(retriever.encode_image(files).double(), unit(crossed), atol=1e-5)
    assert retriever.encode_text(TEXTS, view="uni").shape == (2, 7)


def test_heads_are_saved_and_loaded(clip: Path, tmp_path: Path) -> None:
    retriever = with_heads(clip)
    retriever.save_pretrained(tmp_path / "saved")
    again = Retriever.from_pretrained(tmp_path / "saved")
    for view in (None, "uni"):
        assert torch.equal(again.encode_text(TEXTS, view=view), retriever.encode_text(TEXTS, view=view))
    assert again.fingerprint() == retriever.fingerprint()


def test_without_heads_the_encoders_own_vectors_are_the_view(clip: Path) -> None:
    dual = load_dual(clip)
    towers = [Tower(side, Head(side.dim, side.dim)) for side in (dual.image, dual.text)]
    retriever = Retriever(*towers, dual.image_input, dual.text_input, {"uni": FirstVectors(12)}).eval()
    plain = Retriever.from_pretrained(clip)
    assert torch.allclose(retriever.encode_text(TEXTS, view="uni"), plain.encode_text(TEXTS), atol=1e-6)
    assert not list(retriever.branches.parameters())
