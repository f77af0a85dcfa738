from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from dual_folders import clip_folder
from small import pictures

from diptych.aggregators import First
from diptych.encoders.dual import load_dual
from diptych.encoders.dual_side import is_adapter
from diptych.errors import MissingExtra, SettingsError
from diptych.model.retriever import Retriever, Tower

TEXTS = ["a red dog", "two big cats near a house"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("models") / "clip")


def adapted(clip: Path) -> Retriever:
    dual = load_dual(clip, lora=2)
    return Retriever(Tower(dual.image, First()), Tower(dual.text, First()), dual.image_input, dual.text_input)


def moved(retriever: Retriever) -> Retriever:
    """Adapters after some training: B is no longer zero."""
    torch.manual_seed(0)
    for name, parameter in retriever.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.3)
    return retriever


def test_adapters_begin_as_nothing_and_alone_are_trained(clip: Path, tmp_path: Path) -> None:
    plain, retriever = Retriever.from_pretrained(clip), adapted(clip)
    assert torch.allclose(retriever.encode_text(TEXTS), plain.encode_text(TEXTS), atol=1e-6)
    trained = [name for name, parameter in retriever.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(is_adapter(name) for name in trained)
    assert len(trained) == 2 * 2 * 2 * 2  # sides, layers, queries and values, A and B
    retriever.image.encoder.let_train(False)
    assert not any(parameter.requires_grad for parameter in retriever.image.parameters())
    retriever.image.encoder.let_train(True)
    assert [name for name, parameter in retriever.named_parameters() if parameter.requires_grad] == trained


def test_a_saved_model_is_plain_and_gives_the_same_vectors(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = moved(adapted(clip))
    before = retriever.encode_image(pictures(tmp_path / "p")), retriever.encode_text(TEXTS)
    assert not torch.allclose(before[1], Retriever.from_pretrained(clip).encode_text(TEXTS), atol=1e-2)
    retriever.save_pretrained(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "peft", None)  # who uses the model does not need it
    again = Retriever.from_pretrained(tmp_path / "saved")
    assert not any(is_adapter(name) for name, _ in again.named_parameters())
    assert torch.allclose(again.encode_image(pictures(tmp_path / "p")), before[0], atol=1e-5)
    assert torch.allclose(again.encode_text(TEXTS), before[1], atol=1e-5)
    assert again.fingerprint() == retriever.fingerprint()


def test_lora_is_an_extra(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"diptych\[lora\]"):
        load_dual(clip, lora=2)


def test_a_rank_below_one_is_refused(clip: Path) -> None:
    with pytest.raises(SettingsError, match=r"\b1\b"):
        load_dual(clip, lora=-1)
