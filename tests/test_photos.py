"""Photos in an index: their EXIF as columns, and features that commands share."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from bombs import transparent_png
from commands import diptych, refused
from dng import dng
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import IFDRational
from test_extra_formats import DRAWING, heic

from diptych.cache.feature_pack import FeaturePack
from diptych.data.decode import extra_formats
from diptych.data.formats import open_captions
from diptych.errors import QueryError
from diptych.index.engines.opening import open_index
from diptych.index.ingest.build import index_collection
from diptych.index.ingest.photos import photo_facts
from diptych.index.models import open_model
from diptych.index.query.filters import Condition, matches, parse_filter
from diptych.model.adapter import TorchModel
from diptych.model.retriever import Retriever

FLAGS = (
    "--dim=8", "--word_dim=8", "--min_count=1", "--image_size=32", "--batch_size=4", "--epochs=1", "--log_steps=1",
)  # fmt: skip
NORTH = ("N", (51.0, 29.0, 15.0)), ("W", (0.0, 7.0, 39.0))
SOUTH = ("S", (33.0, 51.0, 0.0)), ("E", (151.0, 12.0, 30.0))


def photo(
    path: Path,
    seed: int = 0,
    date: str | None = None,
    make: str = "",
    model: str = "",
    place: Any = None,
    **more: Any,
) -> Path:
    """A picture with EXIF."""
    exif = Image.Exif()
    if make:
        exif[ExifTags.Base.Make] = make
    if model:
        exif[ExifTags.Base.Model] = model
    if date is not None:
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = date
    if place is not None:
        (north, latitude), (east, longitude) = place
        gps = exif.get_ifd(ExifTags.IFD.GPSInfo)
        gps[ExifTags.GPS.GPSLatitudeRef], gps[ExifTags.GPS.GPSLongitudeRef] = north, east
        gps[ExifTags.GPS.GPSLatitude] = tuple(IFDRational(x) for x in latitude)
        gps[ExifTags.GPS.GPSLongitude] = tuple(IFDRational(x) for x in longitude)
    pixels = np.random.default_rng(seed).integers(0, 255, (24, 24, 3)).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, exif=exif, **more)
    return path


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "heic"])
def test_date_camera_and_place_are_read(suffix: str, tmp_path: Path) -> None:
    extra_formats.register_heif()
    path = photo(tmp_path / f"a.{suffix}", 0, "2024:06:01 12:30:05", "Apple", "iPhone 12", NORTH)
    assert photo_facts(path) == (
        {
            "date": "2024-06-01T12:30:05",
            "camera": "Apple iPhone 12",
            "latitude": pytest.approx(51.4875),
            "longitude": pytest.approx(-0.1275),
        },
        "",
    )


def test_a_png_is_not_decoded_for_its_exif(tmp_path: Path) -> None:
    """Not even to find what stands behind its pixels; a picture that is too large is refused by its header."""
    path = photo(tmp_path / "a.png", 0, "2024:06:01 12:30:05", model="X")
    data = path.read_bytes()
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4])
    (tmp_path / "late.png").write_bytes(data[:start] + data[end:-12] + data[start:end] + data[-12:])
    (tmp_path / "none.png").write_bytes(data[:start] + data[end:])
    (tmp_path / "huge.png").write_bytes(transparent_png(11_000))
    with mock.patch.object(PngImageFile, "load_prepare", autospec=True, side_effect=AssertionError) as load:
        facts = [photo_facts(tmp_path / name)[0] for name in ("a.png", "late.png", "none.png", "huge.png")]
        decoded = load.call_count
    assert facts == [{"date": "2024-06-01T12:30:05", "camera": "X"}] * 2 + [{}] * 2
    assert decoded == 0


def test_what_is_missing_or_impossible_is_left_out(tmp_path: Path) -> None:
    assert photo_facts(photo(tmp_path / "a.jpg", 0, make="NIKON", model="NIKON D90\0")) == (
        {"camera": "NIKON D90"},
        "",
    )
    assert photo_facts(photo(tmp_path / "b.jpg", place=SOUTH))[0]["latitude"] == pytest.approx(-33.85)
    for place in (
        (("N", (91.0, 0.0, 0.0)), ("E", (0.0, 0.0, 0.0))),
        (("N", (0.0, 0.0, 0.0)), ("E", (0.0, 0.0, 0.0))),
    ):
        assert photo_facts(photo(tmp_path / "c.jpg", place=place)) == ({}, "")
    (tmp_path / "d.jpg").write_bytes(b"no picture")
    assert photo_facts(tmp_path / "d.jpg") == photo_facts(tmp_path / "gone.jpg") == ({}, "")


@pytest.mark.parametrize(
    "date",
    ["0000:00:00 00:00:00", "2024:13:45 99:99:99", "yesterday", "1700:01:01 00:00:00", "2924:01:01 00:00:00"],
)
def test_dates_that_are_none(date: str, tmp_path: Path) -> None:
    assert photo_facts(photo(tmp_path / "a.jpg", 0, date, model="X")) == ({"camera": "X"}, date)


def test_filters_know_dates() -> None:
    row = {"date": "2024-06-01T12:30:00"}
    for text, passes in (
        ("date > 2024-06-01", True),
        ("date >= 2024-06-01T12:30", True),
        ("date < 2024-06-01T12:30:00", False),
        ("date > 2024-06 and date < 2024-07", True),
        ('date > "2024-06-02"', False),
        ("date < 2024-06-02 and not date is null", True),
    ):
        assert matches(parse_filter(text), row) is passes, text
    assert parse_filter("date > 2024-06-01") == Condition("date", ">", ("2024-06-01",))
    assert not matches(parse_filter("date > 2024-06-01"), {"date": None})
    with pytest.raises(QueryError, match="2024-06-01"):
        parse_filter("date > 2024-13-45")
    assert parse_filter("price > 2024") == Condition("price", ">", (2024,))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A run with a frozen backbone on a folder of photos, and its cache."""
    base = tmp_path_factory.mktemp("photos")
    folder, cache = base / "photos", base / "cache"
    for n in range(12):
        path = photo(folder / f"{n}.jpg", n, f"2024:{n + 1:02d}:15 10:00:00", "Maker", "One", NORTH)
        path.with_suffix(".txt").write_text(f"a photo of number {n}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_CACHE", str(cache))
        diptych("train", "vse-plus-plus", "--data", folder, "--output_dir", base / "run", *FLAGS)
    return base / "run", folder, cache


def test_exif_columns_filter_an_index(
    trained: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, cache = trained
    monkeypatch.setenv("DIPTYCH_CACHE", str(cache))
    place = tmp_path / "i.index"
    diptych("index", run, folder, "--index", place)
    filter = "date > 2024-06-01 and date < 2024-09-01 and camera = 'Maker One' and latitude > 50"
    found = json.loads(diptych("search", place, "photo", "--filter", filter, "-k", 20, "--json").stdout)
    assert {hit["id"] for hit in found["hits"] if hit["kind"] == "image"} == {"5.jpg", "6.jpg", "7.jpg"}
    again = diptych("index", run, folder, "--index", place).stdout
    assert "12 unchanged" in again
    without = diptych("index", run, folder, "--index", tmp_path / "j.index", "--no_exif")
    assert without.exit_code == 0
    assert "date" in refused("search", tmp_path / "j.index", "photo", "--filter", filter)


def test_photos_inside_tars_have_the_same_columns(
    trained: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, cache = trained
    monkeypatch.setenv("DIPTYCH_CACHE", str(cache))
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "train-0.tar", "w") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, file.name)
    place = tmp_path / "tars.index"
    assert "12 images" in diptych("index", run, tmp_path / "tars").stdout
    with open_index(place) as index:
        (item,) = index.get(["5"])
        assert item is not None
        assert item.metadata["date"] == "2024-06-15T10:00:00"
        assert item.metadata["camera"] == "Maker One"
        assert index.count("image", "date > 2024-06-01 and date < 2024-09-01 and latitude > 50") == 3
    assert "12 unchanged" in diptych("index", run, tmp_path / "tars").stdout
    diptych("index", run, tmp_path / "tars", "--index", tmp_path / "j.index", "--no_exif")
    assert "date" in refused("search", tmp_path / "j.index", "x", "--filter", "date > 2024-01")


def test_dates_that_are_none_are_counted(
    trained: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, cache = trained
    monkeypatch.setenv("DIPTYCH_CACHE", str(cache))
    photo(tmp_path / "photos" / "a.jpg", 1, "0000:00:00 00:00:00", model="X")
    photo(tmp_path / "photos" / "b.jpg", 2, "2024:01:01 00:00:00", model="X")
    built = index_collection(open_model(run), tmp_path / "photos", tmp_path / "i.index")
    assert built.notes == [
        "1 photo has an EXIF date that is none, which is ignored: a.jpg says '0000:00:00 00:00:00'."
    ]
    with open_index(tmp_path / "i.index") as index:
        items = index.get(["a.jpg", "b.jpg"])
    assert [item is not None and item.metadata.get("date") for item in items] == [None, "2024-01-01T00:00:00"]


def test_an_index_and_training_share_features(
    trained: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, cache = trained
    monkeypatch.setenv("DIPTYCH_CACHE", str(cache))
    model = Retriever.from_pretrained(run)
    backbone = model.image.encoder.frozen_part()
    seen: list[int] = []
    backbone.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))  # type: ignore[union-attr]
    served = TorchModel(model)
    index_collection(served, folder, tmp_path / "a.index")
    assert seen == []  # training has computed them
    (pack,) = (cache / "images").iterdir()
    before = len(FeaturePack(pack))
    other = tmp_path / "other"
    photo(other / "new.jpg", 99)
    (other / "old.jpg").write_bytes((folder / "3.jpg").read_bytes())
    index_collection(served, other, tmp_path / "b.index")
    assert sum(seen) == 1
    assert len(FeaturePack(pack)) == before + 1
    index_collection(served, other, tmp_path / "c.index", cache=False)
    assert sum(seen) == 3
    with open_index(tmp_path / "b.index") as b, open_index(tmp_path / "c.index") as c:
        shared, apart = b.vectors(["new.jpg", "old.jpg"]), c.vectors(["new.jpg", "old.jpg"])
    assert np.abs(shared - apart).max() < 2e-3  # cells in float16
    model.precision = "bf16"
    index_collection(served, other, tmp_path / "d.index")
    assert sum(seen) == 5  # features of another precision are others
    assert len(list((cache / "images").iterdir())) == 2


def test_an_index_is_made_where_the_cache_cannot_be_written(
    trained: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, _ = trained
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "file"))
    built = index_collection(open_model(run), folder, tmp_path / "i.index")
    assert built.images == 12
    assert built.notes[0].startswith("features are not cached: ")


def warts(folder: Path) -> Path:
    """Good photos with texts, and a broken, an empty, a huge, a HEIC, a RAW, an SVG and a Photoshop file among them."""
    for n in range(12):
        photo(folder / f"{n}.jpg", n)
    (folder / "broken.jpg").write_bytes((folder / "0.jpg").read_bytes()[:300])
    (folder / "empty.png").touch()
    (folder / "huge.png").write_bytes(transparent_png(11_000))
    (folder / "phone.heic").write_bytes(heic())
    (folder / "camera.dng").write_bytes(dng())
    (folder / "drawing.svg").write_text(DRAWING)
    (folder / "layers.psd").write_bytes(b"8BPS")
    for path in [*folder.iterdir()]:
        path.with_suffix(".txt").write_text(f"a picture called {path.stem}\n")
    return folder


@pytest.mark.parametrize("extras", [True, False])
def test_one_run_over_a_folder_with_warts(
    extras: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training and indexing go on, and say what they left out; with the extras fewer files are."""
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    if not extras:
        monkeypatch.setattr(extra_formats, "_is_installed", lambda module: False)
    folder, run = warts(tmp_path / "photos"), tmp_path / "run"
    said = diptych("train", "vse-plus-plus", "--data", folder, "--output_dir", run, *FLAGS).stderr
    assert f"left out 3 of {18 if extras else 15} pictures, which cannot be read, with 3 texts:" in said
    assert "broken.jpg is damaged and cannot be decoded" in said
    assert "empty.png is empty (0 bytes): copy it again, or remove it." in said
    assert "huge.png claims 11000×11000 = 121,000,000 pixels, more than the limit" in said
    done = diptych("index", run, folder)
    assert f"{15 if extras else 12} images" in done.stdout
    for name in ("broken.jpg", "empty.png", "huge.png"):
        assert f"skipped {name}: " in done.stderr
    notes = ["left out 1 Photoshop file: convert such files to JPEG or PNG."]
    if not extras:
        notes += [
            "left out 1 HEIC file: pip install pillow-heif reads such files (extra 'heic').",
            "left out 1 SVG file: pip install resvg-py reads such files (extra 'svg').",
            "left out 1 RAW file: pip install rawpy reads such files (extra 'raw').",
        ]
    for note in notes:
        assert note in said
        assert note in done.stderr
    checked = diptych("data", "check", folder, status=1).stdout
    assert all(note.rstrip(".") in checked for note in notes)
    extracted = diptych("extract", folder, "--output_dir", tmp_path / "features", "--image_size", 32)
    assert "skipped 3 images that could not be read" in extracted.stdout
    assert notes[0] in extracted.stderr
    assert len(open_captions(tmp_path / "features").images) == (15 if extras else 12)
