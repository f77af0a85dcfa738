"""Opening images safely, and the inputs made of them."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from written import icon, one_bit_png

from diptych.data.arrays import Sets
from diptych.data.decode.extra_formats import IMAGE_SUFFIXES
from diptych.data.decode.opening import FORMATS, open_image
from diptych.data.images import DETECTOR_MEAN, IMAGENET_MEAN, IMAGENET_STD, PixelInput, RegionInput, as_item
from diptych.data.processors import ProcessedPixels
from diptych.errors import DataError, ImageError, SettingsError
from diptych.parts import describe, rebuild
from diptych.types import as_inputs


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(width: int = 40, height: int = 30) -> Image.Image:
    x = np.linspace(0, 255, width)[None, :] * np.ones((height, 1))
    y = np.linspace(0, 255, height)[:, None] * np.ones((1, width))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size, with next to no data behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )


# ---- opening


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr", "I;16", "I", "F"])
def test_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    grey = Image.new("L", (8, 6), 200)
    if mode == "I;16":
        image = Image.fromarray(np.full((6, 8), 200 * 257, dtype=np.uint16))
    elif mode == "I":
        image = Image.fromarray(np.full((6, 8), 200 * 257, dtype=np.int32))
    elif mode == "F":
        image = Image.fromarray(np.full((6, 8), 200 / 255, dtype=np.float32))
    elif mode == "P":
        image = grey.convert("RGB").quantize(4)
    else:
        image = grey.convert("RGB").convert(mode)
    path = tmp_path / "a.tiff"
    image.save(path)
    opened = open_image(path)
    assert opened.mode == "RGB"
    assert opened.size == (8, 6)
    if mode != "1":  # which has only black and white
        assert np.abs(np.asarray(opened).astype(int) - 200).max() <= (3 if mode == "YCbCr" else 0)


def test_transparency_is_composited_on_white() -> None:
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0, 255))
    image.putpixel((1, 0), (255, 0, 0, 127))
    opened = np.asarray(open_image(encoded(image)))
    assert opened[0, 0].tolist() == [255, 0, 0]
    assert opened[0, 1].tolist() == pytest.approx([255, 128, 128], abs=1)
    assert opened[3, 3].tolist() == [255, 255, 255]


def test_transparent_palette_is_composited_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    opened = np.asarray(open_image(encoded(image, transparency=b"\x00\xff")))
    assert opened.tolist() == [[[255, 255, 255], [0, 255, 0]]]


def test_16_bit_png_keeps_its_levels() -> None:
    levels = np.array([[0, 257, 25700, 65535]], dtype=np.uint16)
    opened = np.asarray(open_image(encoded(Image.fromarray(levels))))
    assert opened[0, :, 0].tolist() == [0, 1, 100, 255]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    upright = np.asarray(gradient())
    turns = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    stored = Image.fromarray(np.ascontiguousarray(turns[orientation](upright)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    opened = np.asarray(open_image(encoded(stored, kind, exif=exif.tobytes())))
    assert opened.shape == upright.shape
    assert np.abs(opened.astype(int) - upright).mean() < 6  # JPEG and WebP lose a little


def test_damaged_exif_does_not_matter() -> None:
    opened = open_image(encoded(gradient(), "JPEG", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12"))
    assert opened.size == (40, 30)


def test_same_picture_from_path_bytes_file_and_pil(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(gradient(), "JPEG", exif=exif.tobytes())
    path = tmp_path / "a.jpg"
    path.write_bytes(data)
    expected = np.asarray(open_image(data))
    for opened in (open_image(path), open_image(str(path)), open_image(io.BytesIO(data))):
        assert np.array_equal(np.asarray(opened), expected)
    with Image.open(path) as lazy:
        assert np.array_equal(np.asarray(as_item(lazy)), expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_files_name_themselves(kind: str, tmp_path: Path) -> None:
    data = encoded(
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)), kind
    )
    path = tmp_path / "half.img"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ImageError, match=r"half\.img"):
        open_image(path)


@pytest.mark.parametrize(
    "content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a"]
)
def test_junk_is_an_image_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "junk.jpg"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=r"junk\.jpg"):
        open_image(path)


def test_random_damage_never_raises_anything_else() -> None:
    rng = np.random.default_rng(3)
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "GIF"):
        data = np.frombuffer(encoded(gradient(), kind), dtype=np.uint8)
        for _ in range(40):
            damaged = data.copy()
            damaged[rng.integers(0, len(data), 12)] = rng.integers(0, 256, 12)
            with contextlib.suppress(ImageError):
                assert open_image(damaged.tobytes()).mode == "RGB"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"none\.jpg"):
        open_image(tmp_path / "none.jpg")
    with pytest.raises(ImageError, match="is a folder"):
        open_image(tmp_path)


def test_a_member_is_called_by_its_name() -> None:
    with pytest.raises(ImageError, match=r"train\.tar.*7\.jpg"):
        open_image(b"junk", name="train.tar/7.jpg")


@pytest.mark.parametrize("size", [(10_001, 10_000), (12_000, 9_000), (60_000, 60_000)])
def test_bombs_are_refused_from_the_header(size: tuple[int, int]) -> None:
    # the file holds no pixels at all, so a decode would fail with another message
    with pytest.raises(ImageError, match="100,000,000"):
        open_image(png_header(*size), name="bomb.png")
    assert Image.MAX_IMAGE_PIXELS is not None  # the process's own limit is back


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind: str) -> None:
    opened = open_image(encoded(gradient(), kind))
    assert np.abs(np.asarray(opened).astype(int) - np.asarray(gradient())).mean() < 6


def test_the_suffixes_of_images_are_those_of_the_formats() -> None:
    known = Image.registered_extensions()
    assert {known[suffix] for suffix in IMAGE_SUFFIXES} == set(FORMATS)


def test_a_file_of_several_jpegs_is_read() -> None:
    data = encoded(gradient(), "MPO", save_all=True, append_images=[gradient(20, 20)])
    assert open_image(data).size == (40, 30)


@pytest.mark.parametrize("side", [256, 12_000])
def test_an_icon_is_refused_whatever_it_holds(side: int) -> None:
    """Pillow decodes the picture in it, 144 MB of pixels here, while it reads the header, which says 256×256."""
    inside = one_bit_png(side)
    assert len(inside) < 30_000
    with pytest.raises(ImageError, match=r"bomb\.ico"):
        open_image(icon(inside), name="bomb.ico")


def test_an_eps_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "started"
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # what Pillow remembers of an earlier look
    data = encoded(gradient(), "EPS")
    with Image.open(io.BytesIO(data)) as pillows, contextlib.suppress(OSError):
        pillows.load()
    assert mark.exists()  # the trap works
    mark.unlink()
    with pytest.raises(ImageError):
        open_image(data)
    assert not mark.exists()


def test_pixel_limit_is_an_argument() -> None:
    data = encoded(gradient(40, 30))
    assert open_image(data, max_pixels=1200).size == (40, 30)
    with pytest.raises(ImageError, match=r"40×30.*1,200"):
        open_image(data, max_pixels=1199)


def test_above_pillows_own_limit_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow would refuse more than 200
    assert open_image(encoded(gradient())).size == (40, 30)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_size_hint_decodes_jpegs_smaller() -> None:
    big = gradient(1600, 1200)
    opened = open_image(encoded(big, "JPEG"), size_hint=224)
    assert opened.size == (400, 300)  # the smallest built-in scale with both sides ≥ 224
    full = open_image(encoded(big, "JPEG"))
    a = np.asarray(opened.resize((32, 32))).astype(int)
    assert np.abs(a - np.asarray(full.resize((32, 32))).astype(int)).mean() < 2
    assert open_image(encoded(big), size_hint=224).size == (1600, 1200)  # other formats are read whole


def test_opening_from_threads() -> None:
    data = [encoded(gradient(20 + i, 30), kind) for i, kind in enumerate(["JPEG", "PNG", "WEBP", "TIFF"] * 8)]
    with ThreadPoolExecutor(8) as pool:
        sizes = [image.size for image in pool.map(open_image, data)]
    assert sizes == [(20 + i, 30) for i in range(len(data))]


# ---- as_item


def test_as_item_of_arrays() -> None:
    picture = as_item(np.zeros((5, 7, 3), dtype=np.uint8))
    assert isinstance(picture, Image.Image)
    assert picture.size == (7, 5)
    assert isinstance(as_item(np.zeros((5, 7), dtype=np.uint8)), Image.Image)
    features = np.zeros((36, 2048), dtype=np.float16)
    assert as_item(features) is features
    for bad in (
        np.zeros((5, 7, 3), dtype=np.float32),
        np.zeros((5, 7), dtype=np.int64),
        np.zeros(3, dtype=np.uint8),
    ):
        with pytest.raises(DataError, match=r"\b3\b"):
            as_item(bad)


def test_as_item_of_a_lazy_damaged_file() -> None:
    data = encoded(gradient(), "JPEG")
    with Image.open(io.BytesIO(data[: len(data) // 2])) as lazy, pytest.raises(ImageError):
        as_item(lazy)


# ---- pixels


def test_pixels_of_one_colour_are_normalised() -> None:
    colour = (10, 100, 250)
    pixels = PixelInput(size=8)([Image.new("RGB", (30, 20), colour)])
    assert isinstance(pixels, np.ndarray)
    assert pixels.shape == (1, 3, 8, 8)
    assert pixels.dtype == np.float32
    for channel in range(3):
        expected = (colour[channel] / 255 - IMAGENET_MEAN[channel]) / IMAGENET_STD[channel]
        assert np.allclose(pixels[0, channel], expected, atol=1e-5)


def test_detector_pixels_are_bgr_without_scaling() -> None:
    pixels = PixelInput(size=4, bgr=True)([Image.new("RGB", (9, 9), (10, 100, 250))])
    for channel, value in enumerate((250, 100, 10)):
        assert np.allclose(pixels[0, channel], value - DETECTOR_MEAN[channel], atol=1e-4)


def plain(size: int, **options: object) -> PixelInput:
    return PixelInput(size, mean=(0, 0, 0), std=(1, 1, 1), **options)  # type: ignore[arg-type]


def test_evaluation_stretches_the_whole_picture() -> None:
    image = gradient(90, 30)
    pixels = plain(16)([image])
    expected = np.asarray(image.resize((16, 16), Image.Resampling.BILINEAR)) / 255
    assert np.allclose(pixels[0].transpose(1, 2, 0), expected, atol=1e-6)


def test_centre_crop_keeps_the_aspect_ratio() -> None:
    image = Image.new("RGB", (90, 30), (255, 0, 0))
    image.paste((0, 255, 0), (30, 0, 60, 30))
    pixels = plain(16, resize="crop")([image])
    # only the green middle is left; its outermost columns mix with their neighbours
    assert np.array_equal(pixels[0, 1, :, 1:-1], np.ones((16, 14)))
    assert np.array_equal(pixels[0, 0, :, 1:-1], np.zeros((16, 14)))


def test_training_windows_follow_the_published_rule() -> None:
    """The window's corners are read back from the gradient: one ratio for both sides, anywhere."""
    width, height = 400, 300
    image = gradient(width, height)
    rng = np.random.default_rng(0)
    reader = plain(64, flip=0.0)
    pixels = reader([image] * 200, rng)
    left, right = pixels[:, 0, 0, 0] * width, pixels[:, 0, 0, -1] * width
    top, bottom = pixels[:, 1, 0, 0] * height, pixels[:, 1, -1, 0] * height
    wide, high = (right - left) / width, (bottom - top) / height
    assert np.abs(wide - high).max() < 0.02  # one ratio (a bilinear pixel lies half a cell inside)
    assert 0.55 < wide.min() < 0.63
    assert 0.95 < wide.max() <= 1.0
    assert 0.77 < wide.mean() < 0.82
    free = (1 - wide) > 0.2
    place = (left / width / (1 - wide))[free]
    assert place.min() < 0.15
    assert place.max() > 0.85


def test_flips_happen_with_their_probability() -> None:
    image = gradient(32, 32)
    pixels = plain(8, crop_ratio=(1.0, 1.0))([image] * 400, np.random.default_rng(1))
    flipped = (pixels[:, 0, 0, 0] > pixels[:, 0, 0, -1]).mean()
    assert 0.42 < flipped < 0.58
    whole = plain(8)([image])
    once = int(np.flatnonzero(pixels[:, 0, 0, 0] > pixels[:, 0, 0, -1])[0])
    assert np.array_equal(pixels[once], whole[0][..., ::-1])


def test_augmentation_depends_on_the_generator_alone() -> None:
    image = gradient()
    a, b, c = (PixelInput(16)([image] * 4, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
    assert not np.array_equal(a[0], a[1])  # two texts of one image see two windows


def test_tiny_pictures_survive_training() -> None:
    pixels = PixelInput(8)([Image.new("RGB", (1, 1)), Image.new("RGB", (1, 50))], np.random.default_rng(0))
    assert isinstance(pixels, np.ndarray)
    black = -np.array(IMAGENET_MEAN) / IMAGENET_STD
    np.testing.assert_allclose(pixels, np.broadcast_to(black[:, None, None], (2, 3, 8, 8)), rtol=1e-6)


def test_cached_outputs_pass_through_pixel_input() -> None:
    features = PixelInput()([np.ones((49, 8), dtype=np.float16), np.ones((25, 8), dtype=np.float16)])
    assert isinstance(features, Sets)
    assert features.values.shape == (2, 49, 8)
    assert features.sizes.tolist() == [49, 25]
    with pytest.raises(DataError):
        PixelInput()([np.ones((49, 8), dtype=np.float32), gradient()])


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"crop_ratio": (0.0, 1.0)},
        {"crop_ratio": (0.9, 0.8)},
        {"flip": 1.5},
        {"resize": "pad"},
        {"interpolation": "nearest"},
        {"mean": (0.0,)},
        {"std": (1.0, 0.0, 1.0)},
    ],
)
def test_wrong_settings_of_pixels(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        PixelInput(**wrong)  # type: ignore[arg-type]


# ---- regions


def test_regions_are_padded_and_masked() -> None:
    features = RegionInput(4)([np.ones((3, 4)), np.full((2, 4), 2.0), np.full(4, 3.0)])
    assert features.values.shape == (3, 3, 4)
    assert features.values.dtype == np.float32
    assert features.mask.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert features.values[1, 2].tolist() == [0.0] * 4


def test_a_block_of_regions_is_not_copied() -> None:
    block = np.random.default_rng(0).random((5, 36, 8)).astype(np.float16)
    features = RegionInput(8)(block)
    assert features.values.dtype == np.float16  # half the bytes to the GPU; encoders cast
    assert features.values.ctypes.data == block.ctypes.data == as_inputs(features).values.data_ptr()
    assert bool(features.mask.all())
    assert RegionInput(8)(block[:, 0]).values.shape == (5, 1, 8)


def test_region_errors() -> None:
    with pytest.raises(DataError, match=r"\b8\b"):
        RegionInput(8)([gradient()])
    with pytest.raises(DataError, match=r"\b4\b.*\b8\b"):
        RegionInput(8)([np.ones((3, 4))])
    with pytest.raises(DataError, match=r"\b4\b"):
        RegionInput(8)([np.ones((3, 8)), np.ones((3, 4))])
    with pytest.raises(DataError, match=r"\b1\b"):
        RegionInput(8)([np.ones((0, 8))])
    with pytest.raises(SettingsError, match=r"\b0\b"):
        RegionInput(0)


def test_inputs_rebuild_themselves() -> None:
    for made in (PixelInput(32, bgr=True, resize="crop", interpolation="bicubic"), RegionInput(16)):
        again = rebuild(describe(made))
        assert type(again) is type(made)
        assert describe(again) == describe(made)
    image = gradient()
    assert np.array_equal(
        PixelInput(32, bgr=True)([image]), rebuild(describe(PixelInput(32, bgr=True)))([image])
    )


def test_a_line_of_pixels_is_resized_in_its_middle() -> None:
    """The short side of one pixel made a picture of 9 GB of it."""
    line = Image.new("RGB", (1, 60_000), "red")
    line.putpixel((0, 30_000), (0, 0, 255))
    pixels = np.asarray(ProcessedPixels(8, (8, 8))([line]))
    assert pixels.shape == (1, 3, 8, 8)
    assert len(np.unique(pixels[0, 2])) > 1
