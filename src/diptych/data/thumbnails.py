"""Small pictures: those that an index keeps of images without a file, and those that notebooks show."""

from __future__ import annotations

import io

from PIL import Image

THUMBNAIL = 256  # longest side of a stored thumbnail, in pixels


def make_thumbnail(picture: Image.Image, side: int = THUMBNAIL) -> bytes:
    """A JPEG of a picture, at most ``side`` pixels long."""
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()
