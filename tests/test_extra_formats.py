"""HEIC, camera RAW and SVG: read where their package is installed, counted by kind where it is not."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from bombs import masks, profiles
from commands import diptych
from dng import dng
from PIL import Image

from diptych.data.check import check
from diptych.data.decode import extra_formats
from diptych.data.decode.extra_formats import is_image, left_out_by_kind
from diptych.data.decode.opening import open_image
from diptych.data.decode.processes import Decoders
from diptych.data.files import find_images
from diptych.data.formats import open_captions
from diptych.errors import DataError, ImageError

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 100">'
DRAWING = f'{SVG}<rect width="150" height="100" fill="red"/></svg>'


def heic(size: tuple[int, int] = (64, 48), colour: str = "red") -> bytes:
    out = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", size, colour)).save(out, format="HEIF")
    return out.getvalue()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if none of the packages were installed."""
    monkeypatch.setattr(extra_formats, "_is_installed", lambda module: False)


def colour_at(picture: Image.Image, x: float, y: float) -> tuple[int, ...]:
    found = picture.getpixel((int(x * picture.width), int(y * picture.height)))
    assert isinstance(found, tuple)
    return found


def is_red(colour: tuple[int, ...]) -> bool:
    return colour[0] > 150 and max(colour[1:]) < 100


def test_heic_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    for name in ("a.heic", "b.jpg"):
        (tmp_path / name).write_bytes(heic())
        picture = open_image(tmp_path / name)
        assert (picture.mode, picture.size) == ("RGB", (64, 48))
        assert is_red(colour_at(picture, 0.5, 0.5))
    assert is_red(colour_at(open_image(heic()), 0.5, 0.5))


def test_svg_is_drawn_on_white_in_its_proportions(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text(DRAWING)
    picture = open_image(tmp_path / "a.svg")
    assert picture.size == (1024, 342)
    assert is_red(colour_at(picture, 0.2, 0.5))
    assert colour_at(picture, 0.8, 0.5) == (255, 255, 255)
    (tmp_path / "b.svg").write_text(DRAWING.replace("0 0 300 100", "0 0 1 1000000"))
    assert max(open_image(tmp_path / "b.svg").size) <= 1024
    (tmp_path / "c.svg").write_text(DRAWING.replace("<rect", '<text y="50">word</text><rect'))
    assert open_image(tmp_path / "c.svg").size == (1024, 342)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ('<image href="/etc/secret.png" width="9" height="9"/>', r"a\.svg"),
        ("<image xlink:href='photo.png' width='9' height='9'/>", r"a\.svg"),
        ("<image href = secret.png />", r"a\.svg"),
        ("<rect", r"a\.svg"),
    ],
)
def test_svg_that_opens_other_files_or_is_damaged(inside: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text(DRAWING.replace("<rect", inside + "<rect"))
    with pytest.raises(ImageError, match=message):
        open_image(tmp_path / "a.svg")


def test_svg_with_entities_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.svg").write_text('<!DOCTYPE svg [<!ENTITY a "b">]>' + DRAWING)
    with pytest.raises(ImageError, match=r"a\.svg"):
        open_image(tmp_path / "a.svg")
    monkeypatch.setattr(extra_formats, "SVG_BYTES", 50)
    with pytest.raises(ImageError, match=r"a\.svg"):
        open_image(tmp_path / "a.svg")
    (tmp_path / "b.svg").write_text(DRAWING.replace("<rect", '<a href="https://example.com"/><rect'))
    monkeypatch.undo()
    assert open_image(tmp_path / "b.svg").size == (1024, 342)  # a link opens nothing


@pytest.mark.parametrize(
    "drawing",
    [
        SVG + "<g>" * 10_000 + "</g>" * 10_000 + "</svg>",  # crashes the renderer
        f"{SVG}{masks(20)}</svg>",  # two million masks
    ],
)
def test_an_svg_that_is_far_more_work_than_text(drawing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_formats, "SVG_SECONDS", 1)
    with pytest.raises(ImageError, match=r"a\.svg"):
        open_image(drawing.encode(), name="a.svg")


def test_a_png_of_many_profiles() -> None:
    """Each of them is decompressed: a megabyte of them takes seconds."""
    with pytest.raises(ImageError, match=r"1,?000"):
        open_image(profiles(1000))
    assert open_image(profiles(1)).size == (16, 16)


def test_a_png_of_many_empty_chunks(tmp_path: Path) -> None:
    """Three gigabytes of zeros, a few kilobytes on the disk, kept a core busy for more than ten minutes."""
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(3_000_000_000)
    start = time.process_time()
    with pytest.raises(ImageError, match="10,000 chunks"):
        open_image(large)
    assert time.process_time() - start < 1
    assert open_image(profiles(9_000, b"tEXt", 1)).size == (16, 16)


def test_raw_is_developed(tmp_path: Path) -> None:
    (tmp_path / "a.dng").write_bytes(dng())
    picture = open_image(tmp_path / "a.dng")
    assert picture.mode == "RGB"
    assert picture.size == (32, 24)
    red, green, blue = np.asarray(picture).reshape(-1, 3).mean(axis=0)
    assert red > 2 * max(green, blue)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.heic", heic((300, 200))), ("a.dng", dng(300, 200)), ("a.svg", DRAWING.encode())],
)
def test_limits_are_those_of_any_picture(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageError, match="10,000"):
        open_image(tmp_path / name, max_pixels=10_000)
    decoders = Decoders(1)
    try:
        picture = decoders.open(tmp_path / name, name=name, longest=100)
        assert max(picture.size) == 100
        with pytest.raises(ImageError, match="10,000"):
            decoders.open(tmp_path / name, name=name, longest=100, max_pixels=10_000)
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ImageError):
            decoders.open(tmp_path / name, name=name, longest=100)
    finally:
        decoders.close()


@pytest.mark.parametrize("name", ["a.heic", "a.jpg", "a.dng", "a.svg"])
def test_without_the_package_a_picture_says_what_reads_it(name: str, tmp_path: Path, bare: None) -> None:
    content = {"a.dng": dng(), "a.svg": DRAWING.encode()}.get(name, heic())
    package = {"a.dng": "rawpy", "a.svg": "resvg-py"}.get(name, "pillow-heif")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageError, match=package):
        open_image(tmp_path / name)


def collection(folder: Path) -> Path:
    """Pictures of every kind."""
    (folder / "inner").mkdir(parents=True)
    Image.new("RGB", (20, 20), "blue").save(folder / "a.jpg")
    (folder / "b.heic").write_bytes(heic())
    (folder / "inner" / "c.HEIC").write_bytes(heic(colour="blue"))
    (folder / "d.svg").write_text(DRAWING)
    (folder / "e.dng").write_bytes(dng())
    (folder / "f.psd").write_bytes(b"8BPS")
    (folder / ".hidden.heic").write_bytes(b"")
    return folder


def test_a_folder_holds_what_can_be_read_and_counts_the_rest(tmp_path: Path) -> None:
    captions = open_captions(collection(tmp_path / "photos"))
    assert captions.image_ids == ["a.jpg", "b.heic", "d.svg", "e.dng", "inner/c.HEIC"]
    assert captions.notes == ["left out 1 Photoshop file: convert such files to JPEG or PNG."]
    assert [captions.images[row].mode for row in range(5)] == ["RGB"] * 5  # type: ignore[union-attr]


def test_without_packages_files_are_counted_by_kind(tmp_path: Path, bare: None) -> None:
    folder = collection(tmp_path / "photos")
    captions = open_captions(folder)
    assert captions.image_ids == ["a.jpg"]
    assert "left out 2 HEIC files: pip install pillow-heif reads such files (extra 'heic')." in captions.notes
    assert "left out 1 SVG file: pip install resvg-py reads such files (extra 'svg')." in captions.notes
    assert "left out 1 RAW file: pip install rawpy reads such files (extra 'raw')." in captions.notes
    report = check(folder, show_progress=False)
    assert report.ok
    assert "left out 2 HEIC files" in report.render()
    (folder / "a.jpg").unlink()
    with pytest.raises(DataError, match="pillow"):
        open_captions(folder)
    assert not is_image("x.heic")


def test_names_alone_decide_what_is_looked_at(tmp_path: Path) -> None:
    assert find_images(collection(tmp_path / "p")) == ["a.jpg", "b.heic", "d.svg", "e.dng", "inner/c.HEIC"]
    assert left_out_by_kind(["a.jxl", "b.jxl", "c.txt", "d.png"]) == [
        "left out 2 JPEG XL files: convert such files to JPEG or PNG."
    ]


def test_an_empty_file_and_an_empty_folder_are_called_so(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match="photos"):
        open_captions(tmp_path / "photos")
    (tmp_path / "photos" / "a.png").touch()
    with pytest.raises(ImageError, match=r"a\.png.*\b0\b"):
        open_image(tmp_path / "photos" / "a.png")
    done = diptych("data", "check", tmp_path / "photos", status=1)
    assert "is empty (0 bytes)" in done.stdout
