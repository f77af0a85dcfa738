"""When, with what and where a photo was taken, as its EXIF says: columns to filter by."""

from __future__ import annotations

import math
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from PIL import ExifTags

from diptych.data.decode.opening import exif_tags, open_header

DATE, CAMERA, LATITUDE, LONGITUDE = "date", "camera", "latitude", "longitude"
PHOTOS = frozenset(
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


def is_photo(name: str) -> bool:
    """Whether a file is of a kind that carries EXIF."""
    return Path(name).suffix.lower() in PHOTOS
