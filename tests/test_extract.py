from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import kill_when
from PIL import Image
from torch import Tensor, nn

import diptych.cache.features as cells_module
from diptych.cache.features import cache_image_features
from diptych.data.captions import Captions, StoredImage
from diptych.data.decode.opening import open_image
from diptych.data.images import PixelInput
from diptych.data.readers import precomputed
from diptych.encoders.encoder import Backbone
from diptych.errors import DataError
from diptych.runs.extract import extract
from diptych.types import as_inputs

SIZE = 8


class Toy(Backbone):
    """Four cells of five channels; ``seen`` counts the pictures."""

    def __init__(self, pause: float = 0.0, seed: int = 3) -> None:
        super().__init__(size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
        self.channels, self.seen, self.pause = 5, 0, pause
        self.filters = nn.Parameter(torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(seed)))

    def forward(self, pixels: Tensor) -> Tensor:
        time.sleep(self.pause)
        self.seen += len(pixels)
        return nn.functional.conv2d(pixels, self.filters, stride=4).flatten(2).transpose(1, 2)


class Files:
    """Pictures in files, opened as the readers do."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> StoredImage:
        return open_image(self.paths[index])

    def content_key(self, index: int) -> str:
        return str(self.paths[index].stat().st_size) + self.paths[index].name


def data_set(folder: Path, texts: list[int], splits: list[str]) -> Captions:
    """Small pictures on disk with the given numbers of texts and splits."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, paths = np.random.default_rng(0), []
    for row in range(len(texts)):
        paths.append(folder / f"{row}.png")
        Image.fromarray(rng.integers(0, 255, (SIZE, SIZE, 3)).astype(np.uint8)).save(paths[-1])
    pairs = [(row, f"text {n} of {row}") for row, count in enumerate(texts) for n in range(count)]
    order = rng.permutation(len(pairs))  # texts of an image need not lie together in the data
    return Captions(
        images=Files(paths),
        texts=[pairs[i][1] for i in order],
        image_of=np.array([pairs[i][0] for i in order], dtype=np.int64),
        image_ids=[f"id{row}" for row in range(len(texts))],
        splits=splits,
    )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cells_module, "CHUNK_IMAGES", 2)
    monkeypatch.setattr(cells_module, "CPU_BATCH", 2)


def pixel_input() -> PixelInput:
    return PixelInput(**Toy().pixel_format)


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def cells_of(captions: Captions, row: int) -> np.ndarray:
    with torch.no_grad():
        return Toy()(as_inputs(pixel_input()([captions.images[row]])))[0].numpy().astype(np.float16)


def test_the_published_layout(tmp_path: Path) -> None:
    captions = data_set(
        tmp_path / "images", [5] * 7, ["train", "val", "train", "test", "train", "val", "train"]
    )
    result = extract(captions, Toy(), pixel_input(), tmp_path / "out", show_progress=False)
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")) == [
        f"{split}_{end}" for split in ("dev", "test", "train") for end in ("caps.txt", "ids.txt", "ims.npy")
    ]
    features = np.load(tmp_path / "out" / "train_ims.npy")
    assert features.dtype == np.float16
    assert features.shape == (4, 4, 5)
    for place, row in enumerate([0, 2, 4, 6]):
        assert np.array_equal(features[place], cells_of(captions, row))
    assert lines(tmp_path / "out" / "dev_ids.txt") == ["id1", "id5"]
    texts = lines(tmp_path / "out" / "train_caps.txt")
    assert len(texts) == 20
    assert [text.split()[-1] for text in texts] == [str(row) for row in (0, 2, 4, 6) for _ in range(5)]
    assert result.images == {"train": 4, "val": 2, "test": 1}
    assert result.texts == {"train": 20, "val": 10, "test": 5}
    assert "train_ims.npy: 4 × (4, 5), 20 texts" in str(result)


def test_other_numbers_of_texts_come_with_their_images(tmp_path: Path) -> None:
    captions = data_set(tmp_path / "images", [2, 0, 3], ["train"] * 3)
    captions = dataclasses.replace(captions, texts=[f"two\nlines, {text}" for text in captions.texts])
    extract(captions, Toy(), pixel_input(), tmp_path / "out", show_progress=False)
    texts = lines(tmp_path / "out" / "train_caps.txt")
    rows = [int(line) for line in lines(tmp_path / "out" / "train_image_of.txt")]
    assert rows == [0, 0, 2, 2, 2]
    assert [int(text.split()[-1]) for text in texts] == rows
    assert texts[0].startswith("two lines, text")


@pytest.mark.parametrize("texts", [[5] * 6, [1, 4, 2, 5, 3, 7]])
def test_the_reader_of_the_layout_gives_the_data_back(texts: list[int], tmp_path: Path) -> None:
    captions = data_set(tmp_path / "images", texts, ["train", "val", "train", "test", "val", "train"])
    extract(captions, Toy(), pixel_input(), tmp_path / "out", show_progress=False)
    found = precomputed.READER.read(tmp_path / "out")
    for split in ("train", "val", "test"):
        one, two = found.split(split), captions.split(split)
        assert list(one.image_ids) == list(two.image_ids)
        assert list(one.texts) == list(two.texts)
        assert one.image_of.tolist() == two.image_of.tolist()
        for row in range(len(two.images)):
            assert np.array_equal(one.images[row], cells_of(two, row))


def test_unreadable_pictures_are_skipped_with_their_texts_and_listed(tmp_path: Path) -> None:
    captions = data_set(tmp_path / "images", [5] * 6, ["train"] * 6)
    (tmp_path / "images" / "1.png").write_bytes(b"no picture")
    (tmp_path / "images" / "4.png").unlink()
    captions.images.content_key = lambda row: str(row)
    result = extract(captions, Toy(), pixel_input(), tmp_path / "out", show_progress=False)
    assert list(result.skipped) == ["id1", "id4"]
    assert "skipped 2 images" in str(result)
    assert np.load(tmp_path / "out" / "train_ims.npy").shape == (4, 4, 5)
    assert lines(tmp_path / "out" / "train_ids.txt") == ["id0", "id2", "id3", "id5"]
    assert len(lines(tmp_path / "out" / "train_caps.txt")) == 20
    listed = lines(tmp_path / "out" / "train_skipped.txt")
    assert [line.split("\t")[0] for line in listed] == ["id1", "id4"]
    assert "1.png is not an image" in listed[0]
    again = extract(captions, Toy(), pixel_input(), tmp_path / "out", show_progress=False)
    assert again.skipped == result.skipped


def test_a_picture_that_is_gone_has_no_content_key(tmp_path: Path) -> None:
    captions = data_set(tmp_path / "images", [5] * 3, ["train"] * 3)
    (tmp_path / "images" / "1.png").unlink()
    assert list(extract(captions, Toy(), pixel_input(), tmp_path / "out", show_progress=False).skipped) == [
        "id1"
    ]


def test_nothing_readable_or_nothing_at_all(tmp_path: Path) -> None:
    captions = data_set(tmp_path / "images", [5] * 2, ["train"] * 2)
    for row in range(2):
        (tmp_path / "images" / f"{row}.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"train.*0\.png"):
        extract(captions, Toy(), pixel_input(), tmp_path / "out", show_progress=False)
    assert not list((tmp_path / "out").glob("*_ims.npy"))
    with pytest.raises(DataError):
        extract(
            data_set(tmp_path / "none", [], []), Toy(), pixel_input(), tmp_path / "out", show_progress=False
        )


def test_a_second_run_computes_nothing_and_another_backbone_is_refused(tmp_path: Path) -> None:
    captions, backbone = data_set(tmp_path / "images", [5] * 5, ["train"] * 5), Toy()
    extract(captions, backbone, pixel_input(), tmp_path / "out", show_progress=False)
    assert backbone.seen == 5
    extract(captions, backbone, pixel_input(), tmp_path / "out", show_progress=False)
    assert backbone.seen == 5
    before = (tmp_path / "out" / "train_ims.npy").read_bytes()
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        extract(captions, Toy(seed=4), pixel_input(), tmp_path / "out", show_progress=False)
    assert (tmp_path / "out" / "train_ims.npy").read_bytes() == before


def test_features_that_were_there_before_are_not_overwritten(tmp_path: Path) -> None:
    captions = data_set(tmp_path / "images", [5] * 2, ["train"] * 2)
    np.save(tmp_path / "train_ims.npy", np.zeros((2, 36, 8), dtype=np.float32))
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        extract(captions, Toy(), pixel_input(), tmp_path, show_progress=False)
    assert np.load(tmp_path / "train_ims.npy").shape == (2, 36, 8)
    assert not (tmp_path / "train_caps.txt").exists()


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import diptych.cache.features as cells
from test_extract import Toy, data_set, extract, pixel_input

cells.CHUNK_IMAGES = cells.CPU_BATCH = 2
folder = Path(sys.argv[1])
captions = data_set(folder / "images", [5] * 40, ["train"] * 30 + ["val"] * 10)
cache = sys.argv[3] == "cache"
extract(captions, Toy(pause=0.05), pixel_input(), folder / "out", cache=cache, show_progress=False)
"""


@pytest.mark.parametrize("cache", [True, False])
def test_extraction_goes_on_after_kill_9(cache: bool, tmp_path: Path) -> None:
    how = "cache" if cache else "no cache"
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent), how]
    child = subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})
    log = tmp_path / "out" / ".train_ims.npy.log"

    def written() -> int:
        if cache:
            return sum(index.stat().st_size // 32 for index in tmp_path.glob("cache/images/*/index"))
        return 2 * log.read_bytes().count(b"\n") if log.exists() else 0

    kill_when(child, lambda: written() >= 12)
    assert not (tmp_path / "out" / "train_ims.npy").exists()
    captions = data_set(tmp_path / "images", [5] * 40, ["train"] * 30 + ["val"] * 10)
    backbone = Toy()
    extract(captions, backbone, pixel_input(), tmp_path / "out", cache=cache, show_progress=False)
    assert 10 <= backbone.seen <= 30
    extract(captions, Toy(), pixel_input(), tmp_path / "whole", cache=False, show_progress=False)
    for name in ("train_ims.npy", "dev_ims.npy", "train_caps.txt", "dev_ids.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_pictures_that_another_command_has_seen_are_not_computed_again(tmp_path: Path) -> None:
    captions, backbone = data_set(tmp_path / "images", [5] * 5, ["train"] * 5), Toy()
    cache_image_features(backbone, pixel_input(), captions.subset([3, 1]).images, show_progress=False)
    extract(captions, backbone, pixel_input(), tmp_path / "out", show_progress=False)
    assert backbone.seen == 5
    extract(captions, backbone, pixel_input(), tmp_path / "apart", cache=False, show_progress=False)
    assert backbone.seen == 10
    one, other = (tmp_path / folder / "train_ims.npy" for folder in ("out", "apart"))
    assert one.read_bytes() == other.read_bytes()
