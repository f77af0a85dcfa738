"""Pictures in and out: uploads decoded within limits, files served only from below the indexed roots."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from diptych.addresses import download
from diptych.data.decode.extra_formats import is_video
from diptych.data.decode.opening import MAX_PIXELS, THUMBNAIL, make_thumbnail
from diptych.data.decode.processes import WALL_SECONDS, Decoders
from diptych.errors import ImageError
from diptych.index import deadline
from diptych.index.base import Index
from diptych.index.protocol import Item
from diptych.index.query.frames import frame_of
from diptych.machine import is_allowed, withheld
from diptych.web.limits import Limits

LONGEST = 2048  # side of a picture handed to the model: models read a few hundred pixels
CACHE_BYTES = 64_000_000  # memory for thumbnails made from files
IN_BROWSERS = (  # formats that browsers show, by the first bytes of a file: their offset and value
    (0, b"\xff\xd8\xff", "image/jpeg"), (0, b"\x89PNG\r\n\x1a\n", "image/png"), (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"), (8, b"WEBPVP8", "image/webp"),
)  # fmt: skip
PLAYED = {
    ".mp4": "video/mp4", ".m4v": "video/mp4", ".mov": "video/quicktime", ".webm": "video/webm",
    ".mkv": "video/x-matroska", ".ogv": "video/ogg", ".avi": "video/x-msvideo",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """Bytes for an answer, or the file that has them, and what they are."""

    data: bytes | Path
    media_type: str = "image/jpeg"


class Pictures:
    """Opens what clients send and what the index names; safe to share between threads."""

    def __init__(self, index: Index, limits: Limits, roots: Sequence[str | Path] | None) -> None:
        self.index, self.limits = index, limits
        self.roots = roots
        self._decoders = Decoders()
        self._lock = threading.Lock()
        self._thumbnails: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def open_upload(self, data: bytes, name: str | None) -> Image.Image:
        label = f"the uploaded image '{(name or 'without a name')[:100]}'"
        if not data:
            raise ImageError(f"{label} is empty: send an image file.")
        return self._open(data, label, LONGEST)

    def open_address(self, address: str, until: float) -> Image.Image:
        """The picture at a public web address, there before the monotonic clock says ``until``."""
        data = download(address, self.limits.body, until)
        return self._open(data, f"the image at {address[:200]}", LONGEST)

    def thumbnail(self, id: str) -> Served | None:
        """A small JPEG of an item: the stored one, or one made from its file."""
        stored = self.index.thumbnail(id)
        if stored is not None:
            return Served(stored)
        (item,) = self.index.get([id])
        path = None if item is None else self.file(item)
        if item is None or path is None or is_video(item.path):  # a frame's thumbnail is stored or lost
            return None
        key = (id, item.content)
        with self._lock:
            if key in self._thumbnails:
                self._thumbnails.move_to_end(key)
                return Served(self._thumbnails[key])
        data = make_thumbnail(self._open(path, f"the file of '{id}'", THUMBNAIL))
        with self._lock:
            self._thumbnails[key] = data
            while sum(map(len, self._thumbnails.values())) > CACHE_BYTES:
                self._thumbnails.popitem(last=False)
        return Served(data)

    def image(self, id: str) -> Served | None:
        """The picture of an item as its file has it, or its thumbnail when there is no file or it is a frame's."""
        (item,) = self.index.get([id])
        path = None if item is None else self.file(item)
        if item is None or path is None or is_video(item.path):
            stored = self.index.thumbnail(id)
            return None if stored is None else Served(stored)
        media_type = _media_type(path)
        if media_type is not None:
            return Served(path, media_type)
        out = io.BytesIO()  # not what browsers show: turned into what they do
        self._open(path, f"the file of '{id}'", LONGEST).save(out, "JPEG", quality=90)
        return Served(out.getvalue())

    def video(self, id: str) -> tuple[Path, str] | None:
        """The file of the video that an item is a frame of, and what it is."""
        (item,) = self.index.get([id])
        path = None if item is None or frame_of(item) is None else self.file(item)
        return None if path is None else (path, PLAYED.get(path.suffix.lower(), "application/octet-stream"))

    def file(self, item: Item) -> Path | None:
        """The file of an item, None without one that may be shown; links are followed before the check."""
        path = self.index.file(item)
        return path.resolve() if path is not None and is_allowed(path, self.roots) else None

    def withheld(self) -> list[str]:
        """What to say of the folders of the index that are here and not served."""
        return withheld([one.root for one in self.index.info.collections], self.roots)

    def close(self) -> None:
        """End the processes that decode; idempotent."""
        self._decoders.close()

    def _open(self, source: bytes | Path, label: str, longest: int) -> Image.Image:
        # the limit is one of uploads: a file was indexed, and what could be is shown
        most = self.limits.pixels if isinstance(source, bytes) else MAX_PIXELS
        limit = deadline.current()
        patience = WALL_SECONDS if limit is None else limit.left
        return self._decoders.open(source, name=label, longest=longest, max_pixels=most, patience=patience)


def _media_type(path: Path) -> str | None:
    """What a file is, if browsers show it."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise ImageError(f"{path.name} cannot be read ({error.strerror}): check the file.") from error
    return next((kind for at, start, kind in IN_BROWSERS if head[at:].startswith(start)), None)
