"""The one way in: photos opened once, decoded no larger than needed; folders that vanish, and two processes."""

from __future__ import annotations

import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colour_model import ColourModel, colour_photos
from numpy.typing import NDArray
from PIL import Image

from diptych.data.images import PixelInput
from diptych.errors import DataError, IndexFault
from diptych.index.engines.opening import empty_index, open_index
from diptych.index.ingest import photos as photo_files
from diptych.index.ingest.build import index_collection
from diptych.index.ingest.photos import Decoder, PhotoFile
from diptych.progress import PATIENCE, track
from diptych.vectors.embed import embed
from diptych.vectors.load import open_sources

opened: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if opened is not None and event == "open":
        opened.append(str(arguments[0]))


sys.addaudithook(_note)


@contextmanager
def counting_opens() -> Iterator[list[str]]:
    """The files that this process opens meanwhile."""
    global opened
    opened = []
    try:
        yield opened
    finally:
        opened = None


def photos(folder: Path, count: int = 5, size: tuple[int, int] = (64, 48), suffix: str = ".jpg") -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for n in range(count):
        soft = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        exif = Image.Exif()
        exif[0x0110] = f"camera {n}"
        soft.resize(size, Image.Resampling.BICUBIC).save(folder / f"{n}{suffix}", exif=exif)
    return folder


def encoded(path: Path) -> tuple[Image.Image, bool]:
    with PhotoFile(path) as photo:
        return Decoder(224).decode(photo)


def test_a_photo_is_opened_once(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    with counting_opens() as files:
        index_collection(ColourModel(), folder, tmp_path / "i")
    assert sorted(Path(file).name for file in files if file.endswith(".jpg")) == [
        f"{n}.jpg" for n in range(5)
    ]
    with open_index(tmp_path / "i") as index:
        assert [item and item.metadata["camera"] for item in index.get(["3.jpg"])] == ["camera 3"]
    with counting_opens() as files:
        assert index_collection(ColourModel(), folder, tmp_path / "i").unchanged == 5
    assert not [file for file in files if file.endswith(".jpg")]


def test_a_photo_in_a_tar_is_opened_once(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, file.name)
    sources = open_sources(tmp_path / "all.tar")
    data = sources.open(sources.names[0])
    with counting_opens() as files:
        index_collection(ColourModel(), data.captions, tmp_path / "i")
    assert sum(file.endswith(".tar") for file in files) == 5


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_a_large_photo_is_decoded_no_larger_than_needed(suffix: str, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 1, (4000, 2000), suffix)
    picture, reduced = encoded(folder / f"0{suffix}")
    assert (picture.size, reduced) == ((1000, 500), True)
    small = photos(tmp_path / "small", 1, (800, 600), suffix)
    assert encoded(small / f"0{suffix}")[1] is False
    with PhotoFile(folder / f"0{suffix}") as photo:
        assert Decoder(None).decode(photo)[0].size == (4000, 2000)


def test_a_turned_photo_is_reduced_and_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4000, 2000)).save(tmp_path / "a.jpg", exif=exif)
    assert encoded(tmp_path / "a.jpg")[0].size == (500, 1000)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_pixels_in_flight_are_limited(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pictures fit, and one that is larger than the limit is decoded alone."""
    monkeypatch.setattr(photo_files, "DECODING", 2 * 64 * 48)
    files = sorted(photos(tmp_path / "photos", 8, suffix=".png").iterdir())
    Image.new("RGB", (200, 100)).save(tmp_path / "large.png")
    lock, now, most, whole = threading.Lock(), [0], [0], photo_files.to_rgb

    def slow(image: Image.Image, label: str) -> Image.Image:
        pixels = image.width * image.height
        with lock:
            now[0] += pixels
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= pixels
        return whole(image, label)

    monkeypatch.setattr(photo_files, "to_rgb", slow)
    decoder = Decoder(None)

    def decode(path: Path) -> None:
        with PhotoFile(path) as photo:
            decoder.decode(photo)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(decode, files))
        assert most[0] == min(threads, 2) * 64 * 48
        list(pool.map(decode, [tmp_path / "large.png", *files]))
    assert most[0] == 200 * 100


class Caching(ColourModel):
    """Says what it resizes pictures to, and has a cache of features."""

    image_input = PixelInput(64)

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[str] = []

    def cell_cache(self) -> Caching:
        return self

    def find(self, key: str) -> None:
        return None

    def compute(self, keys: Sequence[str], pictures: Sequence[Any], *, store: bool = True) -> NDArray[Any]:
        self.stored += list(keys) * store
        return np.zeros((len(keys), 1, 4), np.float16)

    def encode_image(self, images: Sequence[Any], *, batch_size: int = 64) -> np.ndarray:
        assert all(isinstance(image, np.ndarray) for image in images)
        return np.eye(1, self.dim, dtype=np.float32).repeat(len(images), 0)


def test_features_of_a_reduced_picture_are_not_shared(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 3)
    Image.new("RGB", (600, 520)).save(folder / "large.jpg")
    model = Caching()
    assert index_collection(model, folder, tmp_path / "i").added == 4
    assert len(model.stored) == 3


class Removing(ColourModel):
    """Removes a folder while it encodes."""

    def __init__(self, folder: Path, keep: bool) -> None:
        super().__init__()
        self.folder, self.keep = folder, keep

    def encode_image(self, images: Sequence[Any], *, batch_size: int = 64) -> np.ndarray:
        if self.folder.exists():
            shutil.rmtree(self.folder)
            if self.keep:  # the place of a drive that is not mounted any more
                self.folder.mkdir()
        return super().encode_image(images, batch_size=batch_size)


@pytest.mark.parametrize("keep", [False, True])
def test_a_folder_that_vanishes_loses_nothing(keep: bool, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 12)
    index_collection(ColourModel(), folder, tmp_path / "i")
    copy = shutil.copytree(folder, tmp_path / "copy")
    for n in range(12):  # every photo changes, so that every one is read
        Image.new("RGB", (64, 48), (n, n, n)).save(folder / f"{n}.jpg")
    with pytest.raises(DataError, match="photos"):
        index_collection(Removing(folder, keep), folder, tmp_path / "i", batch_size=1)
    with open_index(tmp_path / "i") as index:
        assert index.count("image") == 12
        assert index.verify() == []
    shutil.rmtree(folder, ignore_errors=True)
    copy.rename(folder)
    assert index_collection(ColourModel(), folder, tmp_path / "i").images == 12


def test_a_shard_whose_folder_vanishes_is_not_written(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 12)
    done = embed(Removing(folder, False), open_sources(folder, rows=6), tmp_path / "out", batch_size=1)
    assert not done.complete
    assert not done.receipts
    assert all("photos" in reason for _, reason in done.failed)
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_two_processes_that_index_one_folder(tmp_path: Path) -> None:
    """The second is refused in one sentence, whether the index is old or just being made; the first goes on."""
    folder = colour_photos(tmp_path / "photos", "a {} square")

    class Meanwhile(ColourModel):
        def encode_image(self, images: Sequence[Any], *, batch_size: int = 64) -> np.ndarray:
            with pytest.raises(IndexFault, match="another process"):
                index_collection(ColourModel(), folder, tmp_path / "i")
            return super().encode_image(images, batch_size=batch_size)

    for added in (4, 1):
        assert index_collection(Meanwhile(), folder, tmp_path / "i").added == added
        Image.new("RGB", (8, 8), (9, 9, 9)).save(folder / "more.png")
    with open_index(tmp_path / "i") as index:
        assert index.verify() == []


def test_an_index_that_another_process_makes_first_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ColourModel()

    def late(place: Path, dimension: int, **more: Any) -> Any:
        with empty_index(place, dimension, **more):
            pass
        return empty_index(place, dimension, **more)  # refused: it is there by now

    monkeypatch.setattr("diptych.index.ingest.target.empty_index", late)
    assert index_collection(model, colour_photos(tmp_path / "photos"), tmp_path / "i").added == 4


def test_progress_says_how_fast_and_how_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(np.arange(0, 1000, PATIENCE))
    monkeypatch.setattr("diptych.progress.time.monotonic", lambda: float(next(clock)))
    assert list(track(range(20), "index", 20, unit="picture")) == list(range(20))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "index: 2/20, 0.5 pictures/s, 36 s left"
    assert lines[-1] == "index: 20/20, 0.5 pictures/s"
