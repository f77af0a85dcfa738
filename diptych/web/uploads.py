"""Pictures in and out: uploads decoded within limits, files served only from below the indexed roots."""

from __future__ import annotations

import io
import ipaddress
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from PIL import Image

from diptych.data.images import MAX_PIXELS, open_image
from diptych.data.video_files import is_video
from diptych.errors import ImageError, QueryError
from diptych.index.build import THUMBNAIL, make_thumbnail
from diptych.index.frames import frame_of
from diptych.index.protocol import Index, Item
from diptych.web.limits import Limits

DECODERS = 2  # pictures decoded at once: a decoded one may take 150 MB
LONGEST = 2048  # side of a picture handed to the model: models read a few hundred pixels
CACHE_BYTES = 64_000_000  # of thumbnails made from files
PATIENCE = 10  # seconds to fetch the images that a query names by address, all together
SHOWN = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif"}
PLAYED = {
    ".mp4": "video/mp4", ".m4v": "video/mp4", ".mov": "video/quicktime", ".webm": "video/webm",
    ".mkv": "video/x-matroska", ".ogv": "video/ogg", ".avi": "video/x-msvideo",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """Bytes for an answer and what they are."""

    data: bytes
    media_type: str = "image/jpeg"


class Pictures:
    """Opens what clients send and what the index names; safe to share between threads."""

    def __init__(self, index: Index, limits: Limits, roots: Sequence[Path] | None) -> None:
        self.index, self.limits = index, limits
        self.roots = None if roots is None else tuple(Path(root).resolve() for root in roots)
        self._decoding = threading.BoundedSemaphore(DECODERS)
        self._lock = threading.Lock()
        self._thumbnails: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def uploaded(self, data: bytes, name: str | None) -> Image.Image:
        """The picture a client sent."""
        label = f"the uploaded image '{(name or 'without a name')[:100]}'"
        if not data:
            raise ImageError(f"{label} is empty: send an image file.")
        return self._open(data, label, LONGEST)

    def fetched(self, address: str, until: float) -> Image.Image:
        """The picture at a public web address, there before the monotonic clock says ``until``."""
        data = _download(address, self.limits.body, until)
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
        try:
            with Image.open(path, formats=list(SHOWN)) as header:
                media_type = SHOWN[header.format or ""]
            return Served(path.read_bytes(), media_type)
        except (OSError, KeyError, ValueError, SyntaxError, Image.DecompressionBombError):
            # not what browsers show: turned into what they do
            out = io.BytesIO()
            self._open(path, f"the file of '{id}'", LONGEST).save(out, "JPEG", quality=90)
            return Served(out.getvalue())

    def video(self, id: str) -> tuple[Path, str] | None:
        """The file of the video that an item is a frame of, and what it is."""
        (item,) = self.index.get([id])
        path = None if item is None or frame_of(item) is None else self.file(item)
        return None if path is None else (path, PLAYED.get(path.suffix.lower(), "application/octet-stream"))

    def file(self, item: Item) -> Path | None:
        """The file of an item, None without one below the roots; links are followed before the check."""
        path = self.index.file(item)
        if path is None or self.roots is None:
            return path
        resolved = path.resolve()
        return resolved if any(resolved.is_relative_to(root) for root in self.roots) else None

    def _open(self, source: bytes | Path, label: str, longest: int) -> Image.Image:
        # the limit is one of uploads: a file was indexed, and what could be is shown
        most = self.limits.pixels if isinstance(source, bytes) else MAX_PIXELS
        with self._decoding:
            picture = open_image(source, name=label, max_pixels=most, size_hint=longest)
            if max(picture.size) > longest:
                picture.thumbnail((longest, longest))
            return picture


def _public(host: str, port: int) -> str:
    """The number of a host, which must be on the public internet."""
    found = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if not ipaddress.ip_address(found).is_global:
        raise QueryError(f"{host} is not on the public internet: upload the image instead.")
    return found


def _download(address: str, limit: int, until: float) -> bytes:
    """The bytes at an address of the public internet; no redirect is followed, no private network reached."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    late = QueryError(f"{address[:200]} took more than {PATIENCE} seconds: upload the image instead.")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = _public(host, port)
        left = until - time.monotonic()
        if left <= 0:
            raise late
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(host, port, timeout=left)
        with _Deadline(left) as deadline:
            # the address that was checked is the one that is connected to, whatever the name means by then
            connect = lambda _, *rest: deadline.watch(socket.create_connection((found, port), *rest))  # noqa: E731
            connection._create_connection = connect  # type: ignore[attr-defined]
            try:
                target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
                connection.request("GET", target, headers={"User-Agent": "diptych", "Accept": "image/*"})
                with connection.getresponse() as answer:
                    if answer.status != 200:
                        raise QueryError(
                            f"{address[:200]} answered with status {answer.status}: give a direct address."
                        )
                    data = answer.read(limit + 1)
            finally:
                connection.close()
    except (OSError, ValueError, HTTPException) as error:
        if time.monotonic() >= until:
            raise late from error
        raise QueryError(f"{address[:200]} cannot be fetched ({error}): check the address.") from error
    if deadline.passed:  # an answer of unknown length just ends
        raise late
    if len(data) > limit:
        raise QueryError(f"{address[:200]} is larger than {limit} bytes: give a smaller image.")
    return data


class _Deadline:
    """Cuts a connection off after some seconds, however slowly it goes on: a timeout begins anew with each byte."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._lock = threading.Lock()
        self._handle: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def watch(self, connection: socket.socket) -> socket.socket:
        """The same connection; a second handle of it is kept, which outlives the one that TLS takes over."""
        with self._lock:
            if self.passed:
                connection.close()
                raise TimeoutError("too late")
            self._handle = connection.dup()
        return connection

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._handle is not None:
                self._handle.close()
                self._handle = None

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            if self._handle is not None:
                with suppress(OSError):
                    self._handle.shutdown(socket.SHUT_RDWR)
