"""Files that are far more work than they are large."""

from __future__ import annotations

import io
import struct
import zlib
from functools import lru_cache

from PIL import Image


def npy(head: str) -> bytes:
    """A ``.npy`` file with any header: numpy evaluates it, and Python's tokenizer has an error of its own."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode()


UNCLOSED = npy("{'descr': (")


def many_scans(scans: int, side: int = 2048) -> bytes:
    """A progressive JPEG with many more scans, each of twelve bytes: a refinement of one bit, the bits left out."""
    out = io.BytesIO()
    Image.new("L", (side, side), 90).save(out, "JPEG", progressive=True, quality=30)
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x10" + b"\x00\x00"
    return out.getvalue()[:-2] + scan * scans + b"\xff\xd9"


def tile_bomb(side: int = 25_000) -> bytes:
    """A TIFF of 32 × 32 pixels in one tile of side × side."""
    raw = zlib.compress(
        bytes(side * side // 64), 1
    )  # what is in it does not matter: the tile is allocated first
    tags = [
        (256, 3, 1, 32), (257, 3, 1, 32), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1),
        (322, 4, 1, side), (323, 4, 1, side), (324, 4, 1, 8), (325, 4, 1, len(raw)),
    ]  # fmt: skip
    directory = struct.pack("<H", len(tags))
    for tag, kind, count, value in tags:
        directory += struct.pack("<HHII", tag, kind, count, value)
    return b"II*\x00" + struct.pack("<I", 8 + len(raw)) + raw + directory + struct.pack("<I", 0)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def profiles(count: int, kind: bytes = b"iCCP", size: int = 1_000_000) -> bytes:
    """A small PNG with many compressed colour profiles, or texts, of a megabyte each."""
    out = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(out, "PNG")
    more = chunk(kind, b"x\0\0" + zlib.compress(bytes(size), 9)) * count
    return out.getvalue()[:33] + more + out.getvalue()[33:]


def masks(depth: int) -> str:
    """Masks of an SVG, each of which is drawn through the one before it twice."""
    rect = '<rect width="300" height="100" fill="white"'
    inner = "".join(
        f'<mask id="m{n}" mask="url(#m{n - 1})">{rect} mask="url(#m{n - 1})"/></mask>'
        for n in range(1, depth)
    )
    return f'<mask id="m0">{rect}/></mask>{inner}{rect} mask="url(#m{depth - 1})"/>'


@lru_cache(maxsize=2)
def transparent_png(side: int) -> bytes:
    """An RGBA PNG of one colour: small as a file, four bytes a pixel once it is decoded."""

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0))
    packer = zlib.compressobj(9)
    row = b"\x00" + b"\xff\x00\x00\x80" * side
    body = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", body) + chunk(b"IEND", b"")
