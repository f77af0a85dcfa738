"""A photo is opened once: the hash of its content, its EXIF columns and its pixels come from the same open file."""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from PIL import ExifTags, Image

from diptych.data.decode.opening import THUMBNAIL, exif_tags, open_header, to_rgb, undecoded
from diptych.data.files import Member, content_hash
from diptych.errors import ImageError

DATE, CAMERA, LATITUDE, LONGITUDE = "date", "camera", "latitude", "longitude"
PHOTOS = frozenset(  # files that carry EXIF
    {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".avif", ".heic", ".heif", ".hif", ".dng"}
)
DATES = (ExifTags.Base.DateTimeOriginal, ExifTags.Base.DateTimeDigitized, ExifTags.Base.DateTime)
FIRST_YEAR = 1826  # year of the oldest photograph
LONGEST_NAME = 100  # characters of a camera's name
DIGITS = 6  # decimal places of a coordinate: about ten centimetres


def photo_facts(photo: Path | BinaryIO, name: str = "") -> tuple[dict[str, Any], str]:
    """The columns that a photo's EXIF fills, and its date where that is invalid; both empty without EXIF.

    Only the header of the photo is read. ``name`` is that of an open file.

    ``date`` is local time as ``2024-06-01T12:30:00``, ``camera`` its maker and model, ``latitude`` and ``longitude``
    are degrees, north and east positive.
    """
    try:
        opened = photo.open("rb") if isinstance(photo, Path) else nullcontext(photo)
        with opened as stream, open_header(stream, name or str(photo)) as image:
            tags, gps = exif_tags(image)
    except Exception:  # a damaged file can raise anything here, and says so when its picture is opened
        return {}, ""
    facts: dict[str, Any] = {}
    date, nonsense = _date(tags)
    if date:
        facts[DATE] = date
    if camera := _camera(tags):
        facts[CAMERA] = camera
    if (place := _place(gps)) is not None:
        facts[LATITUDE], facts[LONGITUDE] = place
    return facts, nonsense


def _date(tags: dict[int, Any]) -> tuple[str, str]:
    """The date as ISO writes it, or what stands there instead."""
    nonsense = ""
    for tag in DATES:
        said = _text(tags.get(tag))
        if not said:
            continue
        try:
            found = datetime.strptime(said[:19], "%Y:%m:%d %H:%M:%S")
        except ValueError:
            nonsense = nonsense or said
            continue
        if found.year >= FIRST_YEAR and found <= datetime.now() + timedelta(days=2):
            return found.isoformat(), ""
        nonsense = nonsense or said
    return "", nonsense


def _camera(tags: dict[int, Any]) -> str:
    maker, model = _text(tags.get(ExifTags.Base.Make)), _text(tags.get(ExifTags.Base.Model))
    named = model if model.lower().startswith(maker.lower()) else f"{maker} {model}"
    return named.strip()[:LONGEST_NAME]


def _place(gps: dict[int, Any]) -> tuple[float, float] | None:
    """Latitude and longitude in degrees, None where they are missing, impossible, or both zero, which means unset."""
    try:
        degrees = [
            _degrees(gps[ExifTags.GPS.GPSLatitude], gps.get(ExifTags.GPS.GPSLatitudeRef), "S"),
            _degrees(gps[ExifTags.GPS.GPSLongitude], gps.get(ExifTags.GPS.GPSLongitudeRef), "W"),
        ]
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None
    if not (abs(degrees[0]) <= 90 and abs(degrees[1]) <= 180) or degrees == [0.0, 0.0]:
        return None
    return round(degrees[0], DIGITS), round(degrees[1], DIGITS)


def _degrees(parts: Any, reference: Any, negative: str) -> float:
    whole, minutes, seconds = (float(part) for part in parts)
    found = whole + minutes / 60 + seconds / 3600
    if not math.isfinite(found):
        raise ValueError("no number")
    return -found if _text(reference).upper().startswith(negative) else found


def _text(value: Any) -> str:
    """A tag as text without what does not print; empty where it is not text."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        return ""
    return " ".join("".join(c if c.isprintable() else " " for c in value).split())


EXIF = "exif 1"  # part of an item's digest: an item indexed before its EXIF was read is written again
DECODING = 40_000_000  # pixels that all threads together decode at a time, unless one picture has more
MARGIN = 2  # a picture keeps at least this many times the side that the model resizes it to


class PhotoFile:
    """The file of a photo, or its place in a tar; opened when it is first needed."""

    def __init__(self, photo: Path | Member) -> None:
        self.photo, self.name = photo, str(photo)
        self._handle: BinaryIO | None = None
        self._bytes: BinaryIO | None = None

    def __enter__(self) -> PhotoFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.close()

    def content(self) -> str:
        handle, suffix = self._open(), os.path.splitext(self.photo.name)[1]
        if isinstance(self.photo, Member):
            return content_hash(handle, self.photo.offset, self.photo.size, suffix)
        return content_hash(handle, 0, os.fstat(handle.fileno()).st_size, suffix)

    def stream(self) -> BinaryIO:
        """Its bytes from the first one on."""
        handle = self._open()
        if isinstance(self.photo, Path):
            self._bytes = handle
        elif self._bytes is None:
            handle.seek(self.photo.offset)
            self._bytes = io.BytesIO(handle.read(self.photo.size))
        self._bytes.seek(0)
        return self._bytes

    def _open(self) -> BinaryIO:
        if self._handle is None:
            try:
                path = self.photo if isinstance(self.photo, Path) else self.photo.tar
                self._handle = open(path, "rb")  # noqa: SIM115  closed at the end of the ``with`` block
            except FileNotFoundError as error:
                raise ImageError(f"{self.name} is not on disk: check the path.") from error
            except (OSError, ValueError) as error:
                raise ImageError(f"{self.name} cannot be read ({error}): check the file.") from error
        return self._handle


@dataclass
class PhotoColumns:
    """The EXIF columns of photos; photos with an invalid date are counted."""

    nonsense: dict[str, str] = field(default_factory=dict)

    def of(self, id: str, photo: PhotoFile | None) -> dict[str, Any]:
        """The columns of one photo, none for what is not a file."""
        if photo is None or Path(photo.name).suffix.lower() not in PHOTOS:
            return {}
        facts, claimed = photo_facts(photo.stream(), photo.name)
        if claimed:
            self.nonsense[id] = claimed
        return facts

    def notes(self) -> list[str]:
        if not self.nonsense:
            return []
        count, (id, claimed) = len(self.nonsense), next(iter(self.nonsense.items()))
        photos = "1 photo has" if count == 1 else f"{count:,} photos have"
        return [f"{photos} an EXIF date that is none, which is ignored: {id} says '{claimed[:40]}'."]


class Decoder:
    """Decodes photos no larger than a model needs them.

    ``side`` is what the model resizes the short side of a picture to (None: pictures keep their size). A JPEG is
    decoded at a reduced scale; other pictures are reduced once they are decoded. Whatever the number of threads, they
    decode at most ``DECODING`` pixels at a time, or one picture.
    """

    def __init__(self, side: int | None) -> None:
        self.side = None if side is None else max(MARGIN * side, THUMBNAIL)
        self._pixels, self._change = 0, threading.Condition()

    def decode(self, photo: PhotoFile) -> tuple[Image.Image, bool]:
        """The RGB picture of a photo, and whether it has fewer pixels than the photo."""
        with undecoded(photo.stream(), name=photo.name) as (image, label):
            whole = image.width * image.height
            if self.side is not None:
                image.draft("RGB", (self.side, self.side))
            # a progressive JPEG keeps numbers for every pixel, at whatever scale it is decoded
            needed = whole if image.info.get("progressive") else image.width * image.height
            with self._room(needed):
                picture = self.reduce(to_rgb(image, label))
            return picture, picture.width * picture.height < whole

    def reduce(self, picture: Image.Image) -> Image.Image:
        """A picture divided by the largest whole number that leaves enough of it."""
        factor = 1 if self.side is None else min(picture.size) // self.side
        return picture.reduce(factor) if factor > 1 else picture

    @contextmanager
    def _room(self, pixels: int) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self._pixels or self._pixels + pixels <= DECODING)
            self._pixels += pixels
        try:
            yield
        finally:
            with self._change:
                self._pixels -= pixels
                self._change.notify_all()
