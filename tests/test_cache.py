from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import kill_when
from PIL import Image
from torch import Tensor, nn

import diptych.cache.features as cells_module
from diptych.cache.feature_pack import FeaturePack
from diptych.cache.features import (
    CachedImages,
    cache_folder,
    cache_image_features,
    cache_text_states,
    cached_image_features,
    compute_cells,
)
from diptych.cache.rows import RowFile
from diptych.data.arrays import ArrayStore
from diptych.data.captions import StoredImage
from diptych.data.images import PixelInput
from diptych.data.text import TokenTexts
from diptych.encoders.encoder import Backbone
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError, ImageError, StorageError
from diptych.types import as_inputs

SIZE = 8


class Pictures:
    """Coloured squares; ``opened`` counts the openings."""

    def __init__(self, count: int, seed: int = 0, broken: tuple[int, ...] = ()) -> None:
        rng = np.random.default_rng(seed)
        self.arrays = rng.integers(0, 255, (count, SIZE, SIZE, 3)).astype(np.uint8)
        self.broken, self.opened = broken, 0

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> StoredImage:
        self.opened += 1
        if index in self.broken:
            raise ImageError(f"picture {index} is damaged: replace it.")
        return Image.fromarray(self.arrays[index])

    def content_key(self, index: int) -> str:
        return str(hash(self.arrays[index].tobytes()))


class Toy(Backbone):
    """Four cells of five channels; ``seen`` counts the pictures, dropout shows the mode."""

    def __init__(self) -> None:
        super().__init__(size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
        self.channels, self.seen = 5, 0
        generator = torch.Generator().manual_seed(3)
        self.filters = nn.Parameter(torch.randn(5, 3, 4, 4, generator=generator))
        self.dropout = nn.Dropout(0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        self.seen += len(pixels)
        grid = nn.functional.conv2d(pixels, self.filters, stride=4)
        out: Tensor = self.dropout(grid).flatten(2).transpose(1, 2)
        return out


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "CHUNK_IMAGES", 4)
    monkeypatch.setattr(cells_module, "CPU_BATCH", 2)


def pixel_input() -> PixelInput:
    return PixelInput(**Toy().pixel_format)


def expected_cells(store: Pictures) -> np.ndarray:
    backbone, pixels = Toy().eval(), as_inputs(pixel_input()([Image.fromarray(a) for a in store.arrays]))
    with torch.no_grad():
        return backbone(pixels).numpy().astype(np.float16)


def pack_of(folder: Path) -> Path:
    (found,) = (folder / "images").iterdir()
    return found


def test_cells_are_computed_once_and_read_back(tmp_path: Path) -> None:
    backbone, store = Toy(), Pictures(11)
    cached = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert backbone.seen == store.opened == 11
    assert isinstance(cached, ArrayStore)
    assert cached.pictures is store
    assert cached.dtype == np.float16
    assert cached.shape == (11, 4, 5)
    assert np.array_equal(cached.rows(range(11)), expected_cells(store))
    assert np.array_equal(cached.rows([7, 2, 3, 3]), expected_cells(store)[[7, 2, 3, 3]])
    assert np.array_equal(cached[-1], expected_cells(store)[-1])
    assert cached.content_key(3) == store.content_key(3)
    again = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert backbone.seen == store.opened == 11
    assert np.array_equal(again[5], cached[5])
    with pytest.raises(IndexError):
        cached.rows([11])


def test_another_list_of_the_same_pictures_computes_only_what_is_new(tmp_path: Path) -> None:
    backbone, store = Toy(), Pictures(11)
    cache_image_features(backbone, pixel_input(), store, tmp_path)
    other = Pictures(4, seed=1)
    other.arrays = np.concatenate([store.arrays[::-2], other.arrays, store.arrays[:1]])
    backbone.seen = 0
    cached = cache_image_features(backbone, pixel_input(), other, tmp_path)
    assert backbone.seen == other.opened == 4
    assert np.array_equal(cached.rows(range(len(other))), expected_cells(other))
    assert len(FeaturePack(pack_of(tmp_path))) == 15


def test_equal_pictures_are_computed_once(tmp_path: Path) -> None:
    backbone, store = Toy(), Pictures(3)
    store.arrays = store.arrays[[0, 1, 0, 2, 1]]
    cached = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert backbone.seen == 3
    assert np.array_equal(cached.rows(range(5)), expected_cells(store))


def test_another_backbone_input_or_picture_is_computed_anew(tmp_path: Path) -> None:
    backbone, store = Toy(), Pictures(3)
    first = cache_image_features(backbone, pixel_input(), store, tmp_path)
    other = Toy()
    nn.init.normal_(other.filters)
    assert cache_image_features(other, pixel_input(), store, tmp_path).pack.folder != first.pack.folder
    changed = PixelInput(**{**Toy().pixel_format, "mean": (0.4,) * 3})
    assert cache_image_features(Toy(), changed, store, tmp_path).pack.folder != first.pack.folder
    cropped = PixelInput(**Toy().pixel_format, crop_ratio=(0.9, 1.0), flip=0.0)  # for training alone
    assert cache_image_features(Toy(), cropped, store, tmp_path).pack.folder == first.pack.folder
    with torch.autocast("cpu", torch.bfloat16):
        assert cache_image_features(Toy(), pixel_input(), store, tmp_path).pack.folder != first.pack.folder
    store.arrays[1] += 1
    backbone.seen = 0
    cached = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert backbone.seen == 1
    assert np.array_equal(cached.rows(range(3)), expected_cells(store))


@pytest.mark.parametrize("stop", [0, 3, 4, 7, 10])
def test_an_interrupted_run_goes_on(stop: int, tmp_path: Path) -> None:
    store, backbone = Pictures(11, broken=(stop,)), Toy()
    with pytest.raises(ImageError):
        cache_image_features(backbone, pixel_input(), store, tmp_path)
    store.broken, backbone.seen = (), 0
    cached = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert backbone.seen == 11 - stop // 4 * 4
    assert np.array_equal(cached.rows(range(11)), expected_cells(store))


def test_unreadable_pictures_are_noted_and_tried_again(tmp_path: Path) -> None:
    store, backbone = Pictures(11, broken=(2, 9)), Toy()
    cached = cache_image_features(backbone, pixel_input(), store, tmp_path, skip=True)
    assert cached.unreadable == {
        2: "picture 2 is damaged: replace it.",
        9: "picture 9 is damaged: replace it.",
    }
    good = [row for row in range(11) if row not in (2, 9)]
    assert np.array_equal(cached.rows(good), expected_cells(store)[good])
    assert not cached[2].any()
    assert cached_image_features(backbone, pixel_input(), store, tmp_path) is None
    store.broken, backbone.seen = (), 0
    assert not cache_image_features(backbone, pixel_input(), store, tmp_path, skip=True).unreadable
    assert backbone.seen == 2
    known = cached_image_features(backbone, pixel_input(), store, tmp_path)
    assert known is not None
    assert np.array_equal(known.rows(range(11)), expected_cells(store))


def test_records_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cache.feature_pack.FILE_BYTES", 3 * 4 * 5 * 2)
    store, backbone = Pictures(11), Toy()
    cached = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert len(list(pack_of(tmp_path).glob("rows-*.f16"))) == 4
    assert np.array_equal(cached.rows([10, 2, 3, 4, 0]), expected_cells(store)[[10, 2, 3, 4, 0]])
    files = cached.pack.files()
    assert [file.pictures for file in files] == [3, 3, 3, 2]
    assert not FeaturePack(pack_of(tmp_path)).remove([0, 2])  # somebody reads it
    del cached
    assert FeaturePack(pack_of(tmp_path)).remove([0, 2])
    backbone.seen = 0
    again = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert backbone.seen == 6
    assert np.array_equal(again.rows(range(11)), expected_cells(store))


def damage(path: Path, offset: int) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def records(pack: Path) -> Path:
    return pack / "rows-000000.f16"


ROW = 4 * 5 * 2  # bytes of a record


@pytest.mark.parametrize(
    ("harm", "redone"),
    [
        (lambda pack: damage(records(pack), 5 * ROW), 1),
        (lambda pack: damage(records(pack), 0), 1),
        (lambda pack: os.truncate(records(pack), 9 * ROW), 2),
        (lambda pack: os.truncate(records(pack), 10), 11),
        (lambda pack: records(pack).write_bytes(records(pack).read_bytes() + b"more"), 0),
        (lambda pack: os.utime(records(pack)), 0),  # touched, not changed
        (lambda pack: records(pack).unlink(), 11),
        (lambda pack: (pack / "index").unlink(), 11),
        (lambda pack: os.truncate(pack / "index", 9 * 32 + 7), 2),  # an entry cut off
        (lambda pack: damage(pack / "index", 4 * 32 + 3), 1),
        (lambda pack: (pack / "stamps.json").unlink(), 0),
        (lambda pack: (pack / "stamps.json").write_text("{"), 0),
    ],
)
def test_a_damaged_record_is_never_used(harm, redone: int, tmp_path: Path) -> None:
    store, backbone = Pictures(11), Toy()
    cache_image_features(backbone, pixel_input(), store, tmp_path)
    harm(pack_of(tmp_path))
    for expected in (redone, 0):
        backbone.seen = 0
        cached = cache_image_features(backbone, pixel_input(), store, tmp_path)
        assert backbone.seen == expected
        assert np.array_equal(cached.rows(range(11)), expected_cells(store))


def test_damage_found_by_one_run_is_known_to_the_next(tmp_path: Path) -> None:
    """The run that notices it may not need the picture."""
    store, backbone = Pictures(11), Toy()
    cache_image_features(backbone, pixel_input(), store, tmp_path)
    damage(records(pack_of(tmp_path)), 5 * ROW)
    assert len(FeaturePack(pack_of(tmp_path))) == 10
    assert len(FeaturePack(pack_of(tmp_path))) == 10
    cached = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert np.array_equal(cached.rows(range(11)), expected_cells(store))


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    pack = FeaturePack(tmp_path / "pack")
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    pack.append(["a", "b"], rows[:2])
    with (pack.folder / "rows-000000.f16").open("ab") as file:
        file.write(b"records without entries" * 9)
    with (pack.folder / "index").open("ab") as file:
        file.write(b"half an entry")
    again = FeaturePack(pack.folder)
    assert len(again) == 2
    again.append(["c", "a", "d"], rows[2:5])
    fresh = FeaturePack(pack.folder)
    assert len(fresh) == 4
    pack.refresh()
    for found in (again, fresh, pack):
        out = np.empty((4, 4), np.float16)
        found.read(found.find("abcd"), out)
        assert np.array_equal(out, rows[[0, 1, 2, 4]])
    assert (fresh.find(["e"]) == -1).all()


def test_a_pack_of_another_size_or_format_is_refused(tmp_path: Path) -> None:
    pack = FeaturePack(tmp_path / "pack")
    pack.append(["a"], np.ones((1, 2)))
    with pytest.raises(DataError, match=r"\b3\b"):
        pack.append(["b"], np.ones((1, 3)))
    with pytest.raises(DataError, match=r"1e\+06"):
        pack.append(["b"], np.full((1, 2), 1e6))
    (pack.folder / "pack.json").write_text('{"format": 9, "shape": [2]}')
    with pytest.raises(DataError, match=r"pack\.json"):
        FeaturePack(pack.folder)


def test_files_of_an_earlier_version_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "images-0123.npy", np.zeros((500, 1000)))
    for seed in (0, 1):
        cache_image_features(Toy(), pixel_input(), Pictures(2, seed), tmp_path)
    said = capsys.readouterr().err
    assert said.count("1 feature file of an earlier version (4.0 MB), which nothing reads any more") == 1
    assert "diptych cache clear --old" in said


def test_a_half_written_chunk_is_redone(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    with RowFile(path, "k") as file:
        file.append(rows[:3], 3)
    with file.part.open("ab") as part:
        part.write(b"rubbish after the last chunk")
    with file.log.open("ab") as log:
        log.write(b'{"done": 4, "ro')
    with RowFile(path, "k") as file:
        assert (file.progress.done, file.progress.rows) == (3, 3)
        file.append(rows[3:], 3)
        file.finish()
    assert np.array_equal(np.load(path), rows)


def test_a_kill_between_renaming_and_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with RowFile(path, "k") as file:
        file.append(np.ones((3, 2)), 3)
        file.finish()
    lines = file.log.read_text().splitlines(keepends=True)
    file.log.write_text("".join(lines[:-1]))
    with RowFile(path, "k") as file:
        assert not file.finished
        assert file.progress.done == 3
        file.finish()
    assert np.load(path).shape == (3, 2)


def test_files_of_another_key_are_refused_unless_they_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(3))
    with pytest.raises(DataError, match=r"a\.npy"), RowFile(path, "k"):
        pass
    assert np.array_equal(np.load(path), np.arange(3))
    with RowFile(path, "k", overwrite=True) as file:
        assert file.progress.done == 0
        file.append(np.ones((1, 2)), 1)
    with pytest.raises(DataError, match=r"a\.npy"), RowFile(path, "other"):
        pass


def test_features_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with RowFile(tmp_path / "a.npy", "k") as file:
        with pytest.raises(DataError, match=r"1e\+06"):
            file.append(np.full((1, 2), 1e6), 1)
        with pytest.raises(DataError, match=r"\b1\b"):
            file.append(np.array([[np.nan, 1.0]]), 1)
        file.append(np.ones((1, 2)), 1)
        with pytest.raises(DataError, match=r"a\.npy"):
            file.append(np.ones((1, 3)), 1)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="images"):
        cache_image_features(Toy(), pixel_input(), Pictures(1), tmp_path / "x")


def test_a_full_disk_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, backbone, sync, count = Pictures(11), Toy(), os.fsync, [0]

    def full(handle: int) -> None:
        count[0] += 1
        if (
            count[0] == 6
        ):  # pack.json, data, index and stamps of the first chunk, data of the second, its index
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="images"):
        cache_image_features(backbone, pixel_input(), store, tmp_path)
    monkeypatch.setattr(os, "fsync", sync)
    backbone.seen = 0
    cached = cache_image_features(backbone, pixel_input(), store, tmp_path)
    assert backbone.seen <= 7
    assert np.array_equal(cached.rows(range(11)), expected_cells(store))


def test_tests_leave_the_cache_of_the_user_alone(session_cache: Path) -> None:
    assert cache_folder() == session_cache
    assert not session_cache.is_relative_to(Path.home() / ".cache")


def test_the_folder_is_chosen_by_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "diptych"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/diptych")
    monkeypatch.setenv("DIPTYCH_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    assert cache_folder("/else") == Path("/else")


def test_features_are_not_extracted_from_features(tmp_path: Path) -> None:
    class Stored(Pictures):
        def __getitem__(self, index: int) -> StoredImage:
            return np.zeros((2, 5), dtype=np.float32)

    with pytest.raises(DataError):
        cache_image_features(Toy(), pixel_input(), Stored(2), tmp_path)


def test_chunks_are_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "CHUNK_IMAGES", 1000)
    monkeypatch.setattr(cells_module, "CHUNK_BYTES", 4 * 5 * 4 * 6)
    sizes = [chunk.images for chunk in compute_cells(Toy(), pixel_input(), Pictures(11))]
    assert sizes == [6, 5]


# ------------------------------------------------------------------------------------------------ processes


class Keyed(Pictures):
    """Some of the pictures of a seed, whose keys are the same in every process, which Python's hash is not."""

    def __init__(self, count: int, start: int = 0, of: int | None = None) -> None:
        super().__init__(of or count)
        self.start, self.arrays = start, self.arrays[start : start + count]

    def content_key(self, index: int) -> str:
        return str(self.start + index)


def test_two_runs_at_once_share_the_work(tmp_path: Path) -> None:
    """Each opens the lock file on its own, as two processes do."""

    class Slow(Toy):
        def forward(self, pixels: Tensor) -> Tensor:
            time.sleep(0.01)
            return super().forward(pixels)

    backbones = [Slow(), Slow()]
    with ThreadPoolExecutor(2) as executor:
        found = list(
            executor.map(lambda b: cache_image_features(b, pixel_input(), Keyed(24), tmp_path), backbones)
        )
    assert sorted(backbone.seen for backbone in backbones) == [0, 24]
    for cached in found:
        assert np.array_equal(cached.rows(range(24)), expected_cells(Pictures(24)))


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[2])
import torch
import test_cache
from test_cache import Keyed, Toy, cells_module, pixel_input
from diptych.cache.features import cache_image_features

cells_module.CHUNK_IMAGES, cells_module.CPU_BATCH = 4, 2
class Slow(Toy):
    def forward(self, pixels):
        time.sleep(0.02)
        return super().forward(pixels)
Slow.__name__ = "Toy"
start, end = int(sys.argv[3]), int(sys.argv[4])
some = Keyed(end - start, start, of=400)
cache_image_features(Slow(), pixel_input(), some, sys.argv[1], show_progress=False)
"""


def test_a_killed_process_loses_one_chunk_at_most(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent), "0", "400"]
    child = subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def index() -> Path | None:
        return next(tmp_path.glob("images/*/index"), None)

    kill_when(child, lambda: (found := index()) is not None and found.stat().st_size >= 12 * 32)
    pack = index()
    assert pack is not None
    written = len(FeaturePack(pack.parent))
    assert 12 <= written < 400
    backbone = Toy()
    cached = cache_image_features(backbone, pixel_input(), Keyed(400), tmp_path)
    assert backbone.seen == 400 - written
    assert np.array_equal(cached.rows(range(400)), expected_cells(Pictures(400)))


def test_two_processes_with_overlapping_lists(tmp_path: Path) -> None:
    """They do not wait for each other, and no record is lost or stored twice."""
    ranges = [("0", "60"), ("30", "90")]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent), *some],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for some in ranges
    ]
    assert [child.wait(120) for child in children] == [0, 0]
    assert len(FeaturePack(pack_of(tmp_path))) == 90
    assert (pack_of(tmp_path) / "index").stat().st_size == 90 * 32
    backbone = Toy()
    cached = cache_image_features(backbone, pixel_input(), Keyed(90, of=400), tmp_path)
    assert backbone.seen == 0
    assert np.array_equal(cached.rows(range(90)), expected_cells(Pictures(400))[:90])


# ---------------------------------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TransformerText:
    from transformers import BertConfig, BertModel

    from diptych.encoders.pretrained import quiet

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with quiet():
        BertModel(config).save_pretrained(folder)
    return TransformerText(folder, dim=8, trainable=False)


def tokens(count: int, seed: int = 0) -> TokenTexts:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, count)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = rng.integers(1, 50, offsets[-1]).astype(np.int32)
    return TokenTexts(ids, np.zeros_like(ids), offsets, pad_id=0)


def test_text_states_are_those_of_the_transformer(
    encoder: TransformerText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.cache.features.TEXT_CHUNK", 7)
    texts = tokens(20)
    cached = cache_text_states(encoder, texts, tmp_path, batch_size=3)
    assert len(cached) == 20
    rows = [3, 17, 0, 8]
    found, ids = as_inputs(cached.collate(rows)), as_inputs(texts.collate(rows))
    assert torch.equal(found.mask, ids.mask)
    with torch.no_grad():
        expected = encoder.states(ids)
        assert torch.allclose(found.values[found.mask], expected.values[ids.mask], atol=2e-3)
        close = encoder.eval()(found).values - encoder(ids).values
    assert close[found.mask].abs().max() < 5e-3
    calls: list[int] = []
    monkeypatch.setattr(encoder, "states", lambda ids: calls.append(1))
    again = cache_text_states(encoder, texts, tmp_path)
    assert calls == []
    assert torch.equal(as_inputs(again.collate(rows)).values, found.values)
    with pytest.raises(DataError):
        cache_text_states(encoder, cached, tmp_path)


def test_text_states_go_on_after_an_interruption(
    encoder: TransformerText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tokens(20)
    expected = as_inputs(cache_text_states(encoder, texts, tmp_path / "whole").collate(range(20)))
    monkeypatch.setattr("diptych.cache.features.TEXT_CHUNK", 6)
    states, calls = encoder.states, [0]

    def failing(ids):
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return states(ids)

    monkeypatch.setattr(encoder, "states", failing)
    with pytest.raises(KeyboardInterrupt):
        cache_text_states(encoder, texts, tmp_path / "halves")
    monkeypatch.setattr("diptych.cache.features.TEXT_CHUNK", 5)  # chunks need not be those of the first run
    found = as_inputs(cache_text_states(encoder, texts, tmp_path / "halves").collate(range(20)))
    assert torch.allclose(found.values, expected.values, atol=2e-3)


def test_other_texts_are_another_file(encoder: TransformerText, tmp_path: Path) -> None:
    for seed in (0, 1):
        cache_text_states(encoder, tokens(5, seed), tmp_path)
    assert len(list(tmp_path.glob("texts-*.npy"))) == 2


def test_the_store_travels_to_another_process(tmp_path: Path) -> None:
    import pickle

    cached = cache_image_features(Toy(), pixel_input(), Pictures(3), tmp_path)
    cached[0]
    twin = pickle.loads(pickle.dumps(cached))
    assert isinstance(twin, CachedImages)
    assert np.array_equal(twin[2], cached[2])
