"""Image files opened safely, turned to RGB, made small; light enough for a process that does nothing else."""

from __future__ import annotations

import io
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from diptych.data.decode.extra_formats import HEIC, is_heif, open_extra, register_heif
from diptych.errors import ImageError

MAX_PIXELS = 100_000_000  # a picture that claims more is refused before it is decoded
MAX_CHUNKS = 10_000  # of a PNG before its pixels: each costs the same, however small; photos have a dozen
LATE_CHUNKS = 100_000  # of a PNG that are passed to find EXIF behind the pixels: those of 800 megabytes
MAX_EXIF = 1 << 20  # bytes of it: the pieces of JPEG hold 64 kB
MAX_SCANS = 100  # of a progressive JPEG, each a pass over the whole picture: cameras write about ten
# Pillow has more: some of them decode before they tell the size (ICO, ICNS), one starts a program (EPS). Pillow opens
# MPO as JPEG. The suffixes of files in these formats are IMAGE_SUFFIXES in extra_formats.py.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
STRIP = 4_000_000  # pixels converted at once: a whole copy of a large picture takes hundreds of megabytes
TILE_TAGS = (322, 323)  # of TIFF: sides of a tile, which is decoded whole however small the picture is
_header_lock = threading.Lock()


def is_special(path: Path) -> bool:
    """Whether whoever opens a file may wait for ever: a pipe, a device, a socket."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # of a file that is not there, or of none: whoever opens it says so
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def open_image(
    source: str | Path | bytes | BinaryIO,
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    size_hint: int | None = None,
) -> Image.Image:
    """An RGB picture from a path, encoded bytes, or a file object; anything unreadable is an ``ImageError``.

    ``name`` is what the error calls bytes and file objects. ``size_hint`` is the side the picture will be resized to: a
    JPEG is then decoded at the smallest of its built-in scales that is not below it. The first frame of an animation is
    taken; colour profiles are ignored.
    """
    with undecoded(source, name=name, max_pixels=max_pixels) as (image, label):
        if size_hint is not None:
            image.draft("RGB", (size_hint, size_hint))
        return to_rgb(image, label)


@contextmanager
def undecoded(
    source: str | Path | bytes | BinaryIO, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> Iterator[tuple[Image.Image, str]]:
    """A picture of which only the header is read and checked, and what errors call it.

    Whatever goes wrong, while it is decoded inside the ``with`` block too, is an ``ImageError``.
    """
    label = name or (str(source) if isinstance(source, str | Path) else "an image given as bytes")
    handle: BinaryIO | None = None
    stream: BinaryIO
    try:
        if isinstance(source, str | Path):
            if is_special(Path(source)):
                raise ImageError(
                    f"{label} is a pipe or a device, which may have no end: give the path of an image."
                )
            stream = handle = open(source, "rb")  # noqa: SIM115  closed below, after decoding
        else:
            stream = io.BytesIO(source) if isinstance(source, bytes) else source
        image = open_extra(stream, label, max_pixels) or open_header(stream, label)
        _check_cost(image, stream, label, max_pixels)
        yield image, label
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{label} does not exist: check the path.") from error
    except IsADirectoryError as error:
        raise ImageError(f"{label} is a folder: give the path of one image.") from error
    except UnidentifiedImageError as error:
        stream.seek(0)
        if not stream.read(1):
            raise ImageError(f"{label} is empty (0 bytes): copy it again, or remove it.") from error
        raise ImageError(
            f"{label} is not an image that can be read: convert it to one of {', '.join(FORMATS)}, or remove it."
        ) from error
    except Exception as error:  # a damaged file can make its decoder raise anything at all
        raise _damage(label, error) from error
    finally:
        if handle is not None:
            handle.close()


def to_rgb(image: Image.Image, label: str = "an image") -> Image.Image:
    """RGB and upright: EXIF orientation applied, transparency composited on white, 16 bits scaled to 8."""
    try:
        image.load()
        if _orientation(image) != 1:
            image = ImageOps.exif_transpose(image)
        if image.mode == "RGB" and "transparency" not in image.info:
            return image
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            return _in_8_bits(image)
        if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
            return _on_white(image)
        return image.convert("RGB")
    except Exception as error:  # see open_image
        raise _damage(label, error) from error


def open_header(stream: BinaryIO, label: str) -> Image.Image:
    """Read the header only, silently.

    Pillow warns or raises at its own pixel limit while opening; ours is checked right after, so its is lifted
    for these microseconds. That limit and the warning filters belong to the whole process, hence the lock.
    """
    with _header_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.init()  # no work but the first time; a decoder that this Pillow lacks must not be asked for
        formats = [name for name in FORMATS if name in Image.OPEN]
        head = stream.read(12)
        stream.seek(0)
        if is_heif(head):
            if not register_heif():
                raise ImageError(f"{label} is a HEIC picture: {HEIC.advice}, or convert it to JPEG.")
            formats = ["HEIF"]
        _check_profiles(stream, head, label)
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(stream, formats=formats)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _check_profiles(stream: BinaryIO, head: bytes, label: str) -> None:
    """Raise for a PNG with many chunks, or more than one colour profile: Pillow reads, and decompresses, every one."""
    if not head.startswith(b"\x89PNG"):
        return
    count = 0
    for chunks, (kind, _) in enumerate(_png_chunks(stream)):
        count += kind == b"iCCP"
        if kind == b"IDAT":
            break
        if chunks == MAX_CHUNKS:
            raise ImageError(f"{label} is a PNG of more than {MAX_CHUNKS:,} chunks: save it again.")
    stream.seek(0)
    if count > 1:
        raise ImageError(f"{label} is a PNG of {count:,} colour profiles, and may have one: save it again.")


def _png_chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """The kind and the size of each chunk of a PNG; the stream stands at its bytes."""
    at = 8
    while len(start := stream.read(8) if stream.seek(at) == at else b"") == 8:
        size = int.from_bytes(start[:4])
        yield start[4:], size
        at += 12 + size


def _check_cost(image: Image.Image, stream: BinaryIO, label: str, max_pixels: int) -> None:
    """Raise for a picture that is far more work to decode than its file is large."""
    width, height = image.size
    sides: list[Any] = [getattr(image, "tag_v2", {}).get(tag) for tag in TILE_TAGS]
    if all(isinstance(side, int) for side in sides) and sides[0] * sides[1] > width * height:
        width, height = sides
    if width * height > max_pixels:
        raise ImageError(
            f"{label} claims {width}×{height} = {width * height:,} pixels, more than the limit of "
            f"{max_pixels:,}: shrink it."
        )
    if image.format in ("JPEG", "MPO") and image.info.get("progressive"):
        scans = _scans(stream)
        if scans > MAX_SCANS:
            raise ImageError(
                f"{label} is a JPEG of {scans} scans, more than the limit of {MAX_SCANS}: save it again as an "
                "ordinary JPEG."
            )


def _scans(stream: BinaryIO) -> int:
    """How often a JPEG begins a scan; within one, the same byte is always followed by a zero."""
    at, found, last = stream.tell(), 0, b""
    stream.seek(0)
    while piece := stream.read(1 << 20):
        found += (last + piece).count(b"\xff\xda")
        last = piece[-1:]
    stream.seek(at)
    return found


def _late_exif(image: Any) -> bytes:
    """The EXIF of a PNG that stands behind its pixels, empty without; the pixels are not read."""
    for kind, size in islice(_png_chunks(image.fp), LATE_CHUNKS):
        if kind == b"eXIf":
            return b"".join([b"Exif\0\0", image.fp.read(min(size, MAX_EXIF))])
    return b""


def exif_tags(image: Image.Image) -> tuple[dict[int, Any], dict[int, Any]]:
    """The EXIF tags of a picture whose header was read, and those of its place; both empty without EXIF."""
    with _header_lock, warnings.catch_warnings():  # damaged EXIF only warns
        warnings.simplefilter("ignore")
        if image.format == "PNG" and "exif" not in image.info and (late := _late_exif(image)):
            image.info["exif"] = late
        exif = Image.Image.getexif(image)  # that of a PNG decodes the picture to look behind its pixels
        if not exif:
            return {}, {}
        inner, gps = exif.get_ifd(ExifTags.IFD.Exif), exif.get_ifd(ExifTags.IFD.GPSInfo)
        return {**dict(exif), **dict(inner)}, dict(gps)


def _orientation(image: Image.Image) -> int:
    if not any(key in image.info for key in ("exif", "Raw profile type exif")) and image.format != "TIFF":
        return 1  # asking costs more than many a decode
    with _header_lock, warnings.catch_warnings():  # damaged EXIF only warns: the picture itself is fine
        warnings.simplefilter("ignore")
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    return value if value in range(1, 9) else 1


def _strips(image: Image.Image) -> Iterator[tuple[tuple[int, int], Image.Image]]:
    """A picture cut into horizontal strips of a bounded size, each with the place of its corner."""
    rows = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        yield (0, top), image.crop((0, top, image.width, min(image.height, top + rows)))


def _on_white(image: Image.Image) -> Image.Image:
    out = Image.new("RGB", image.size)
    for corner, strip in _strips(image):
        strip = strip.convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        out.paste(Image.alpha_composite(white, strip).convert("RGB"), corner)
    return out


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Deep grey to 0…255: 16-bit integers by their full range, floats in 0…1 by 255, others clipped."""
    import numpy as np

    top = max((float(np.asarray(strip).max(initial=0)) for _, strip in _strips(image)), default=0.0)
    out = Image.new("RGB", image.size)
    for corner, strip in _strips(image):
        values = np.asarray(strip)
        if np.issubdtype(values.dtype, np.floating):
            values = values * 255.0 if top <= 1.0 else values
        elif top > 255:
            values = values / 257.0
        grey = np.clip(np.rint(values), 0, 255).astype(np.uint8)
        out.paste(Image.fromarray(grey).convert("RGB"), corner)
    return out


def _damage(label: str, error: Exception) -> ImageError:
    if isinstance(error, MemoryError):
        return ImageError(f"{label} needs more memory to decode than there is for one picture: shrink it.")
    return ImageError(f"{label} is damaged and cannot be decoded ({error}): replace or remove it.")


THUMBNAIL = 256  # longest side of a stored thumbnail, in pixels


def make_thumbnail(picture: Image.Image, side: int = THUMBNAIL) -> bytes:
    """A JPEG of a picture, at most ``side`` pixels long."""
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()
