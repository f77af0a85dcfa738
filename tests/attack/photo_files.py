"""Attacks on photos of phones and cameras, drawings, EXIF, and the feature cache."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pillow_heif
from dng import dng
from hostile import mutated
from PIL import ExifTags, Image
from register import Attack, target, void

DRAWING = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 100"><defs><filter id="f"><feGaussianBlur '
    b'stdDeviation="3"/></filter></defs><rect width="150" height="100" fill="red" filter="url(#f)"/>'
    b'<text x="9" y="50">words</text><use href="#f"/></svg>'
)


@target
def photos(folder: Path) -> Attack:
    """HEIC, RAW and SVG."""
    from diptych.data.decode.opening import open_image

    out = io.BytesIO()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))
    pillow_heif.from_pillow(noise).save(out, format="HEIF")
    sound = [("a.heic", out.getvalue()), ("a.dng", dng()), ("a.svg", DRAWING)]

    def once(draw: Random) -> None:
        name, whole = draw.choice(sound)
        void(open_image(mutated(whole, draw), name=name, max_pixels=2_000_000))

    return once


@target
def exif(folder: Path) -> Attack:
    """Dates, cameras and places: whatever a file claims, the columns can be stored."""
    from diptych.index.ingest.photos import photo_facts
    from diptych.index.protocol import Item, record

    tags = Image.Exif()
    tags[ExifTags.Base.Make], tags[ExifTags.Base.Model] = "Maker", "Model"
    tags.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = "2024:06:01 12:30:05"
    gps = tags.get_ifd(ExifTags.IFD.GPSInfo)
    gps[ExifTags.GPS.GPSLatitudeRef], gps[ExifTags.GPS.GPSLongitudeRef] = "N", "W"
    gps[ExifTags.GPS.GPSLatitude], gps[ExifTags.GPS.GPSLongitude] = (51.0, 29.0, 15.0), (0.0, 7.0, 39.0)
    sound = []
    for kind in ("JPEG", "PNG", "WEBP"):
        out = io.BytesIO()
        Image.new("RGB", (8, 8)).save(out, kind, exif=tags)
        sound.append(out.getvalue())

    def once(draw: Random) -> None:
        path = folder / "a.jpg"
        path.write_bytes(mutated(draw.choice(sound), draw))
        facts, _ = photo_facts(path)
        record(Item("a", metadata=facts))
        assert abs(facts.get("latitude", 0.0)) <= 90
        assert abs(facts.get("longitude", 0.0)) <= 180

    return once


@target
def feature_cache(folder: Path) -> Attack:
    """A pack with a damaged file: what it still gives is what was stored."""
    from diptych.cache.feature_pack import MISSING, FeaturePack

    rows = np.arange(20 * 6, dtype=np.float16).reshape(20, 2, 3)
    keys = [str(n) for n in range(20)]
    FeaturePack(folder / "sound").append(keys, rows)
    names = ["index", "pack.json", "stamps.json", "rows-000000.f16"]

    def once(draw: Random) -> None:
        copied = folder / "copy"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(folder / "sound", copied)
        file = copied / draw.choice(names)
        file.write_bytes(mutated(file.read_bytes(), draw))
        pack = FeaturePack(copied)
        found = pack.find(keys)
        there = np.flatnonzero(found != MISSING)
        if pack.shape == (2, 3) and len(there):
            out = np.empty((len(there), 2, 3), np.float16)
            pack.read(found[there], out)
            assert np.array_equal(out, rows[there])

    return once
