"""The Python API: what may be encoded, in which order, and what is saved and loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from small import pictures, precomputed, texts

from diptych import Retriever
from diptych.aggregators import GPO, Mean
from diptych.data.formats import open_captions
from diptych.data.images import PixelInput, RegionInput
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import Grid
from diptych.encoders.lite0 import Lite0
from diptych.encoders.regions import Regions
from diptych.errors import CheckpointError, DataError, ImageError
from diptych.model.retriever import Tower

DIM = 12


def retriever(image: torch.nn.Module, image_input: Any) -> Retriever:
    words = build_vocabulary(texts(200), min_count=1)
    text = Tower(BiGRU(len(words), 6, DIM), GPO())
    return Retriever(Tower(image, Mean()), text, image_input, WordInput(words))


@pytest.fixture(scope="module")
def model() -> Retriever:
    torch.manual_seed(0)
    return retriever(Regions(16, DIM, hidden=8), RegionInput(16))


@pytest.fixture(scope="module")
def seeing() -> Retriever:
    torch.manual_seed(0)
    backbone = Lite0(size=64)
    return retriever(Grid(backbone, DIM), PixelInput(**backbone.pixel_format))


def test_a_picture_may_come_in_any_form(seeing: Retriever, tmp_path: Path) -> None:
    path, other = pictures(tmp_path, 2)
    with Image.open(path) as file:
        picture = file.convert("RGB")
    rows = [
        seeing.encode_image(form)
        for form in (path, str(path), picture, np.asarray(picture), [path], [picture])
    ]
    assert all(row.shape == (1, DIM) for row in rows)
    assert all(torch.equal(row, rows[0]) for row in rows)
    mixed = seeing.encode_image([other, picture, str(path)])
    torch.testing.assert_close(mixed[1], rows[0][0])
    torch.testing.assert_close(mixed[2], rows[0][0])
    assert not torch.allclose(mixed[0], mixed[1])


def test_batches_change_neither_order_nor_values(model: Retriever, tmp_path: Path) -> None:
    captions = open_captions(precomputed(tmp_path / "toy_precomp"))
    images = model.encode_image(captions.images)
    assert images.shape == (34, DIM)
    torch.testing.assert_close(model.encode_image(captions.images, batch_size=5), images)
    torch.testing.assert_close(model.encode_image(np.asarray(captions.images[3])), images[3:4])
    lines = texts(40, seed=5)  # of different lengths, which are batched together
    rows = model.encode_text(lines)
    torch.testing.assert_close(model.encode_text(lines, batch_size=3), rows)
    torch.testing.assert_close(model.encode_text(lines[::-1]), rows.flip(0))
    for number in (0, 17, 39):
        torch.testing.assert_close(model.encode_text(lines[number]), rows[number : number + 1])
    prepared = model.text_input.prepare(lines)
    torch.testing.assert_close(model.encode_text(prepared), rows)


def test_scores_are_cosines_in_images_by_texts(model: Retriever) -> None:
    images = model.encode_image(
        [np.random.default_rng(n).normal(size=(5, 16)).astype(np.float32) for n in range(3)]
    )
    lines = model.encode_text(texts(4))
    for rows in (images, lines):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
        assert not rows.requires_grad
    scores = model.similarity(images, lines)
    assert scores.shape == (3, 4)
    expected = torch.nn.functional.cosine_similarity(images[:, None], lines[None], dim=-1)
    torch.testing.assert_close(scores, expected)


def test_nothing_gives_no_rows(model: Retriever) -> None:
    assert model.encode_text([]).shape == (0, DIM)
    assert model.encode_image([]).shape == (0, DIM)


def test_encoding_leaves_the_modes_as_they_were(model: Retriever) -> None:
    model.train()
    model.text.eval()
    before = [module.training for module in model.modules()]
    first = model.encode_text("a red dog")
    assert [module.training for module in model.modules()] == before
    model.eval()
    assert torch.equal(model.encode_text("a red dog"), first)  # encoded without dropout while training


def test_words_it_does_not_know_and_no_words(model: Retriever) -> None:
    rows = model.encode_text(["zzz qqq", "", "a dog"])
    assert torch.isfinite(rows).all()
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(3))


def test_what_cannot_be_encoded_is_named(model: Retriever, seeing: Retriever, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"nowhere\.jpg"):
        seeing.encode_image(tmp_path / "nowhere.jpg")
    with pytest.raises(DataError, match=r"\b12\b.*\b16\b"):
        model.encode_image(np.zeros((5, 12), np.float32))
    with pytest.raises(DataError, match=r"\b16\b"):
        model.encode_image(pictures(tmp_path, 1)[0])


def test_a_saved_model_is_plain_files_and_the_same_model(seeing: Retriever, tmp_path: Path) -> None:
    place = tmp_path / "model"
    seeing.save_pretrained(place, card="# first\n")
    seeing.save_pretrained(place, card="# second\n")  # over the old one
    names = {path.name for path in place.iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= names
    assert all(name.endswith((".json", ".safetensors", ".md")) for name in names)  # nothing pickled
    assert (place / "README.md").read_text() == "# second\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing left beside it
    loaded = Retriever.from_pretrained(str(place))
    assert loaded.fingerprint() == seeing.fingerprint()
    assert not loaded.training
    picture = pictures(tmp_path / "pictures", 1)[0]
    assert torch.equal(loaded.encode_image(picture), seeing.encode_image(picture))


def test_a_crash_while_replacing_a_model_loses_nothing(model: Retriever, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".old-model")  # what a crash between the two renamings leaves
    assert Retriever.from_pretrained(tmp_path / "model").fingerprint() == model.fingerprint()


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "not exist"),
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json"),
    "no object": (lambda d: (d / "config.json").write_text("[]"), r"config\.json"),
    "no retriever": (edited(lambda c: c.pop("retriever")), r"config\.json"),
    "newer format": (edited(lambda c: c.update(format=99)), "99"),
    "unknown part": (edited(lambda c: c["retriever"].update(part="New")), "'New'"),
    "unknown argument": (edited(lambda c: c["retriever"]["image"].update(x=1)), "'Tower'"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"config\.json"),
    "half the weights": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:500]),
        r"config\.json",
    ),
    "a tensor less": (tensors(lambda s: s.popitem()), "Missing key"),
    "a tensor more": (tensors(lambda s: s.update(more=torch.ones(1))), "Unexpected key.*more"),
    "another shape": (
        tensors(lambda s: s.update({next(iter(s)): torch.ones(2, 2, 2)})),
        "size mismatch",
    ),
    "no vocabulary": (lambda d: (d / "vocabulary.json").unlink(), r"vocabulary\.json"),
    "half a vocabulary": (lambda d: (d / "vocabulary.json").write_text('["a", '), r"vocabulary\.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(DAMAGE))
def test_a_damaged_model_is_refused_by_name(what: str, model: Retriever, tmp_path: Path) -> None:
    place = tmp_path / "model"
    model.save_pretrained(place)
    damage, message = DAMAGE[what]
    damage(place)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as raised:
        Retriever.from_pretrained(place)
    assert str(place) in str(raised.value) or "'" in message  # a part of the configuration


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when the compiler is imported
def test_encoding_leaves_the_compiler_alone() -> None:
    made = retriever(Regions(16, DIM, hidden=8), RegionInput(16))
    plain = made.encode_text(["a dog"]), made.encode_image(np.ones((3, 16), dtype=np.float32))
    made.compile_encoders()
    torch._dynamo.utils.counters.clear()
    again = made.encode_text(["a dog"]), made.encode_image(np.ones((3, 16), dtype=np.float32))
    assert not torch._dynamo.utils.counters["frames"]
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


def test_batches_of_any_size_encode_alike(model: Retriever) -> None:
    block = np.random.default_rng(0).standard_normal((9, 5, 16)).astype(np.float32)
    every = model.encode_image(list(block))
    for size in (1, 4, 9):
        torch.testing.assert_close(model.encode_image(list(block), batch_size=size), every)
        torch.testing.assert_close(model.encode_text(texts(9), batch_size=size), model.encode_text(texts(9)))
