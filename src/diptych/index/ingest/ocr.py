"""What is written in pictures, as words to search: a pass over an index, after indexing, that resumes.

The text of an image gets one more line in quotation marks, and its column ``written`` the same words, so that a filter
can look for a part of them. A picture whose column is there was read, even if nothing is written in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from diptych.data.decode.opening import open_image
from diptych.errors import DataError, import_extra, reason_of
from diptych.index.base import Index
from diptych.index.engines.opening import open_index
from diptych.index.models import Say, tell
from diptych.index.protocol import Item
from diptych.index.query.frames import frame_of
from diptych.progress import track

COLUMN = "written"
CHUNK = 16  # pictures whose words are stored at once: an interruption loses no more
LONGEST = 4_000  # characters of a picture's words that are kept

Reader = Callable[[Image.Image], str]
"""Gives the words of a picture, empty where it has none."""


def picture_reader() -> Reader:
    """RapidOCR on ONNX Runtime, with the models of its wheel: Latin letters, Greek, Chinese and Japanese."""
    rapidocr = import_extra("rapidocr", "ocr", "reading what is written in pictures")
    engine = rapidocr.RapidOCR(params={"Global.log_level": "critical"})

    def read(picture: Image.Image) -> str:
        blue_first = np.ascontiguousarray(np.asarray(picture.convert("RGB"))[:, :, ::-1])
        try:
            return " ".join(engine(blue_first).txts or ())[:LONGEST]
        except Exception as error:  # RapidOCR's own: of a line of pixels, for one
            raise DataError(
                f"RapidOCR fails on it ({reason_of(error, 200)}): look at the picture."
            ) from error

    return read


def read_written(place: str | Path, reader: Reader, *, say: Say = tell, show_progress: bool = True) -> int:
    """Read the pictures of an index that were not read before, and store their words; how many were read."""
    with closing(open_index(place, writable=True)) as index:
        unread = f"{COLUMN} is null" if COLUMN in index.info.columns else None
        found = index.sample_items("image", unread, size=max(1, len(index)))
        items = [item for item in found if frame_of(item) is None and index.file(item) is not None]
        done = 0
        starts = range(0, len(items), CHUNK)
        for start in track(starts, "reading what is written", show=show_progress):
            done += _read_some(index, items[start : start + CHUNK], reader, say)
        return done


def _read_some(index: Index, items: Sequence[Item], reader: Reader, say: Say) -> int:
    """One change of the index for some pictures; a file that cannot be read is named and left for the next time."""
    changed = []
    for item in items:
        file = index.file(item)
        try:
            words = "" if file is None else reader(open_image(file))
        except (DataError, OSError) as error:
            say(f"not read: {file}: {error}" if str(file) not in str(error) else f"not read: {error}")
            continue
        lines = [item.text, f"“{words}”" if words else ""]
        metadata = {**item.metadata, COLUMN: words}
        thumbnail = index.thumbnail(item.id)
        text = "\n".join(line for line in lines if line)
        changed.append(replace(item, text=text, metadata=metadata, thumbnail=thumbnail))
    if changed:
        index.update(changed, index.vectors([item.id for item in changed]))
    return len(changed)
