"""Teachers: their vectors, the cache that is shared and goes on after a kill, live vectors, published files."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small import bert_folder, texts
from torch import Tensor, nn

import diptych.cache.features as cells_module
import diptych.targets.teachers as module
from diptych.cache.features import cache_image_features
from diptych.data.captions import StoredImage
from diptych.data.images import PixelInput
from diptych.data.text import WordPieceInput
from diptych.encoders.encoder import Backbone
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError, SettingsError
from diptych.targets.published_teachers import read_vectors
from diptych.targets.teachers import (
    ImageTeacher,
    Projection,
    StoredTeacher,
    TextTeacher,
    vectors_of_images,
    vectors_of_texts,
)
from diptych.types import as_inputs

SIZE = 8


class Pictures:
    """Coloured squares."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.arrays = np.random.default_rng(seed).integers(0, 255, (count, SIZE, SIZE, 3)).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> StoredImage:
        return Image.fromarray(self.arrays[index])

    def content_key(self, index: int) -> str:
        return self.arrays[index].tobytes().hex()


class Toy(Backbone):
    """Four cells of five channels; ``seen`` counts the pictures."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
        self.channels, self.seen = 5, 0
        self.filters = nn.Parameter(torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(seed)))
        self.dropout = nn.Dropout(0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        self.seen += len(pixels)
        out: Tensor = (
            self.dropout(nn.functional.conv2d(pixels, self.filters, stride=4)).flatten(2).transpose(1, 2)
        )
        return out


def image_teacher(seed: int = 3, **options: Any) -> ImageTeacher:
    toy = Toy(seed)
    return ImageTeacher(toy, PixelInput(**toy.pixel_format), **options)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "CHUNK_IMAGES", 4)
    monkeypatch.setattr(cells_module, "CPU_BATCH", 2)
    monkeypatch.setattr(module, "TEXT_CHUNK", 4)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("bert") / "model")


def text_teacher(folder: Path, **options: Any) -> TextTeacher:
    return TextTeacher(
        TransformerText(folder, projection=False), WordPieceInput(folder, augment=0.0), **options
    )


def norms(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows.astype(np.float64), axis=1)


@pytest.mark.parametrize(("space", "width"), [("pooled", 5), ("tokens", 20)])
def test_image_vectors(tmp_path: Path, space: str, width: int) -> None:
    pictures = Pictures(7)
    teacher = image_teacher(space=space)
    found = vectors_of_images(teacher, pictures, tmp_path)
    assert (found.shape, found.dtype) == ((7, width), np.dtype("float16"))
    with torch.no_grad():
        cells = (
            teacher.backbone(as_inputs(teacher.image_input([pictures[i] for i in range(7)]))).double().numpy()
        )  # type: ignore[arg-type]
    expected = cells.mean(1) if space == "pooled" else cells.reshape(7, -1)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found.rows(range(7)), expected, atol=2e-3)
    np.testing.assert_allclose(norms(found.rows(range(7))), 1, atol=2e-3)
    np.testing.assert_allclose(teacher([pictures[3]])[0], expected[3], atol=1e-6)


def test_text_vectors_are_means_of_the_tokens(tmp_path: Path, bert: Path) -> None:
    teacher, some = text_teacher(bert), texts(9)
    found = vectors_of_texts(teacher, some, tmp_path)
    assert (found.shape[0], found.dtype) == (9, np.dtype("float16"))
    store = teacher.text_input.prepare(some)
    for row in range(9):
        with torch.no_grad():
            states = teacher.encoder.states(as_inputs(store.collate([row]))).values[0].double()
        mean = states.mean(0) / states.mean(0).norm()
        np.testing.assert_allclose(found[row], mean.numpy(), atol=2e-3)


def test_a_second_run_computes_nothing(tmp_path: Path, bert: Path) -> None:
    pictures, some = Pictures(7), texts(9)
    vectors_of_images(image_teacher(), pictures, tmp_path)
    again = image_teacher()
    assert isinstance(again.backbone, Toy)
    vectors_of_images(again, pictures, tmp_path)
    assert again.backbone.seen == 0
    first, second = (vectors_of_texts(text_teacher(bert), some, tmp_path) for _ in range(2))
    assert first.path == second.path
    assert len(list(tmp_path.glob("teacher-*.npy"))) == 2


def test_cells_that_a_run_has_cached_are_not_computed_again(tmp_path: Path) -> None:
    pictures, host = Pictures(7), image_teacher()
    for space in ("pooled", "tokens"):
        expected = vectors_of_images(image_teacher(space=space), pictures, tmp_path / "other")
        cache_image_features(host.backbone, host.image_input, pictures, tmp_path)
        teacher = image_teacher(space=space)
        found = vectors_of_images(teacher, pictures, tmp_path)
        assert isinstance(teacher.backbone, Toy)
        assert teacher.backbone.seen == 0
        np.testing.assert_allclose(found.rows(range(7)), expected.rows(range(7)), atol=2e-3)


@pytest.mark.parametrize("change", ["weights", "data", "order", "space", "projection"])
def test_another_teacher_or_other_data_is_another_file(tmp_path: Path, change: str) -> None:
    pictures = Pictures(5)
    first = vectors_of_images(image_teacher(), pictures, tmp_path)
    options: dict[str, Any] = {"space": {"space": "tokens"}, "projection": {"project": 3}}.get(change, {})
    other = Pictures(5, seed=1) if change == "data" else Pictures(5)
    if change == "order":
        other.arrays = other.arrays[::-1].copy()
    second = vectors_of_images(image_teacher(9 if change == "weights" else 3, **options), other, tmp_path)
    assert first.path != second.path


def test_a_failed_extraction_goes_on(tmp_path: Path, bert: Path) -> None:
    some = texts(11)
    broken = text_teacher(bert)
    compute, calls = broken.encoder.states, []

    def fail(ids: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("killed")
        return compute(ids)

    broken.encoder.states = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        vectors_of_texts(broken, some, tmp_path)
    assert not list(tmp_path.glob("teacher-*.npy"))
    whole = text_teacher(bert)
    counted: list[int] = []
    states = whole.encoder.states
    whole.encoder.states = lambda ids: (counted.append(len(ids.values)), states(ids))[1]  # type: ignore[method-assign]
    found = vectors_of_texts(whole, some, tmp_path)
    assert sum(counted) == 11 - 2 * 4  # two chunks of four were on disk
    np.testing.assert_allclose(found.rows(range(11)), text_teacher(bert)(some), atol=2e-3)


def test_a_killed_extraction_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2]); import test_teachers as t, diptych.cache.features as c\n"
        "c.CHUNK_IMAGES, c.CPU_BATCH = 2, 2\n"
        "forward = t.Toy.forward\n"
        "t.Toy.forward = lambda self, x: (time.sleep(0.2), forward(self, x))[1]\n"
        "t.vectors_of_images(t.image_teacher(), t.Pictures(20), sys.argv[1])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)])
    part = ""
    for _ in range(600):
        part = next((p.name for p in tmp_path.glob(".teacher-*.part") if p.stat().st_size > 300), "")
        if part or process.poll() is not None:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert part
    teacher = image_teacher()
    found = vectors_of_images(teacher, Pictures(20), tmp_path)
    assert isinstance(teacher.backbone, Toy)
    assert 0 < teacher.backbone.seen < 20
    expected = vectors_of_images(image_teacher(), Pictures(20), tmp_path / "other")
    np.testing.assert_array_equal(found.rows(range(20)), expected.rows(range(20)))


def test_live_vectors_are_those_of_the_cache(tmp_path: Path, bert: Path) -> None:
    pictures, some = Pictures(6), texts(6)
    rows = np.array([3, 0, 3, 5])
    for live, cached in (
        (
            vectors_of_images(image_teacher(), pictures, live=True),
            vectors_of_images(image_teacher(), pictures, tmp_path),
        ),
        (
            vectors_of_texts(text_teacher(bert), some, live=True),
            vectors_of_texts(text_teacher(bert), some, tmp_path),
        ),
    ):
        assert (len(live), live.shape) == (6, cached.shape)
        np.testing.assert_allclose(live.rows(rows), cached.rows(rows), atol=2e-3)
        np.testing.assert_allclose(live[2], cached[2], atol=2e-3)
    teacher = image_teacher()
    live = vectors_of_images(teacher, pictures, live=True)
    assert isinstance(teacher.backbone, Toy)
    teacher.backbone.seen = 0
    live.rows([4, 4, 4, 1])
    assert teacher.backbone.seen == 2


def test_teachers_do_not_learn(bert: Path) -> None:
    toy = Toy().train()
    ImageTeacher(toy, PixelInput(**toy.pixel_format))
    teacher = text_teacher(bert)
    for parts in (toy, teacher.encoder):
        assert not parts.training
        assert not any(p.requires_grad for p in parts.parameters())


def test_the_projection_keeps_cosines() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(30, 6000)).astype(np.float32) + 0.5
    small = Projection(2048)(rows)
    assert small.shape == (30, 2048)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    error = np.abs(small @ small.T - unit @ unit.T)
    assert error.mean() < 0.02
    assert error.max() < 0.1
    np.testing.assert_array_equal(small, Projection(2048)(rows))  # the same matrix in every run
    with pytest.raises(SettingsError, match="-1"):
        Projection(-1)
    with pytest.raises(SettingsError, match="grid"):
        image_teacher(space="grid")


class Regions(Pictures):
    """Stored features: the colours of the pixels."""

    def __getitem__(self, index: int) -> StoredImage:
        return self.arrays[index].reshape(-1, 3).astype(np.float32)


def test_stored_features_teach_by_their_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORED_CHUNK", 2)
    store = Regions(5)
    found = vectors_of_images(StoredTeacher(), store, tmp_path)
    expected = store.arrays.reshape(5, -1, 3).mean(1)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found.rows(range(5)), expected, atol=2e-3)
    np.testing.assert_allclose(
        vectors_of_images(StoredTeacher(), store, live=True)[3], expected[3], atol=1e-6
    )


def test_stored_features_and_pictures_are_not_mixed_up(tmp_path: Path) -> None:
    for live in (False, True):
        with pytest.raises(DataError, match="stored"):
            vectors_of_images(image_teacher(), Regions(3), live=live)
        with pytest.raises(DataError, match="lite0"):
            vectors_of_images(StoredTeacher(), Pictures(3), live=live)
    with pytest.raises(DataError):
        vectors_of_images(image_teacher(), Pictures(0), tmp_path)
    assert not list(tmp_path.iterdir())


# --- published files


def published(
    path: Path, count: int = 6, width: int = 8, saved: bool = False, **changes: Any
) -> dict[Any, Any]:
    rng = np.random.default_rng(0)
    content: dict[Any, Any] = {100 + i: rng.normal(size=(1, width)).astype(np.float32) for i in range(count)}
    content.update({int(key): value for key, value in changes.items()})
    if saved:
        np.save(path, content, allow_pickle=True)  # type: ignore[arg-type]
    else:
        path.write_bytes(pickle.dumps(content))
    return content


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("project", [0, 5])
def test_a_published_dict_is_converted_once(tmp_path: Path, saved: bool, project: int) -> None:
    path, cache = tmp_path / "train_unicom.npy", tmp_path / "cache"
    content = published(path, saved=saved)
    ids = ["104", "100", "103"]
    found = read_vectors(path, ids, cache, project=project)
    expected = np.concatenate([content[int(name)] for name in ids])
    if project:
        expected = Projection(project)(expected)
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert (found.shape, found.dtype) == ((3, project or 8), np.dtype("float16"))
    np.testing.assert_allclose(found.rows(range(3)), expected, atol=2e-3)
    stamp = found.path.stat().st_mtime_ns if found.path else 0
    again = read_vectors(path, ids, cache, project=project)
    assert again.path is not None
    assert again.path.stat().st_mtime_ns == stamp
    assert read_vectors(path, ids[:2], cache, project=project).path != again.path  # of other data


def test_a_matrix_is_read_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.ones((4, 3), np.float16))
    assert read_vectors(tmp_path / "m.npy", list("abcd")).shape == (4, 3)
    with pytest.raises(DataError, match=r"\b4\b.*\b5\b"):
        read_vectors(tmp_path / "m.npy", list("abcde"))
    with pytest.raises(DataError, match=r"m\.npy"):
        read_vectors(tmp_path / "m.npy", list("abcd"), project=2)
    broken = np.ones((4, 3), np.float16)
    broken[2, 1] = np.nan
    np.save(tmp_path / "m.npy", broken)
    with pytest.raises(DataError, match=r"m\.npy.*\b2\b"):
        read_vectors(tmp_path / "m.npy", list("abcd"))
    np.save(tmp_path / "m.npy", np.ones((4, 3, 2)))
    with pytest.raises(DataError, match=r"m\.npy"):
        read_vectors(tmp_path / "m.npy", list("abcd"))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


def test_bad_published_files_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, cache = tmp_path / "train_unicom.npy", tmp_path / "cache"
    published(path)
    cases: list[tuple[Any, list[str], str]] = [
        (None, ["100", "7", "8"], r"\b2\b.*'7'.*'100'"),
        (
            {1: np.ones((1, 3)), 2: np.ones((1, 4))},
            ["1", "2"],
            "'2'",
        ),
        ({1: np.ones((2, 3))}, ["1"], "'1'"),
        ({1: np.ones((1, 3), np.int64)}, ["1"], "'1'"),
        ({1: "x"}, ["1"], "'1'"),
        ([np.ones(3)], ["1"], r"train_unicom\.npy"),
        ({1: Evil()}, ["1"], r"builtins\.print"),
        ({1: np.full((1, 3), np.nan)}, ["1"], "'1'"),
    ]
    for content, ids, words in cases:
        if content is not None:
            path.write_bytes(pickle.dumps(content))
        with pytest.raises(DataError, match=words) as error:
            read_vectors(path, ids, cache)
        assert "\n" not in str(error.value)
        assert not [p for p in cache.iterdir() if p.suffix != ".lock"]
    assert "code ran" not in capsys.readouterr().out
    with pytest.raises(DataError, match=r"no\.npy"):
        read_vectors(tmp_path / "no.npy", ["1"], cache)
