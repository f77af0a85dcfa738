"""A camera RAW file made on the spot: an uncompressed Bayer DNG."""

from __future__ import annotations

import struct

import numpy as np

BYTE, ASCII, SHORT, LONG, RATIONAL, SRATIONAL = 1, 2, 3, 4, 5, 10
SIZES = {BYTE: 1, ASCII: 1, SHORT: 2, LONG: 4, RATIONAL: 8, SRATIONAL: 8}


def dng(width: int = 64, height: int = 48, red: int = 60_000, claimed: int | None = None) -> bytes:
    """A DNG whose red pixels have the value ``red`` and all others are dark; ``claimed`` is the width it claims."""
    mosaic = np.full((height, width), 2_000, dtype="<u2")
    mosaic[::2, ::2] = red
    data = mosaic.tobytes()
    identity = [1, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 1]
    entries = [
        (254, LONG, [0]), (256, LONG, [claimed or width]), (257, LONG, [height]), (258, SHORT, [16]),
        (259, SHORT, [1]), (262, SHORT, [32803]), (271, ASCII, b"Diptych\0"), (272, ASCII, b"Test\0"),
        (273, LONG, [8]), (277, SHORT, [1]), (278, LONG, [height]), (279, LONG, [len(data)]), (284, SHORT, [1]),
        (33421, SHORT, [2, 2]), (33422, BYTE, bytes([0, 1, 1, 2])), (50706, BYTE, bytes([1, 4, 0, 0])),
        (50708, ASCII, b"Diptych Test\0"), (50721, SRATIONAL, identity), (50728, RATIONAL, [1, 1, 1, 1, 1, 1]),
    ]  # fmt: skip
    start = 8 + len(data)
    behind = start + 2 + 12 * len(entries) + 4
    directory, values = struct.pack("<H", len(entries)), b""
    for tag, kind, content in entries:
        if isinstance(content, bytes):
            raw, count = content, len(content)
        else:
            code = {SHORT: "H", LONG: "I", RATIONAL: "I", SRATIONAL: "i"}[kind]
            raw = struct.pack(f"<{len(content)}{code}", *content)
            count = len(raw) // SIZES[kind]
        if len(raw) > 4:
            place = struct.pack("<I", behind + len(values))
            values += raw + b"\0" * (len(raw) % 2)
        else:
            place = raw.ljust(4, b"\0")
        directory += struct.pack("<HHI", tag, kind, count) + place
    return b"II*\0" + struct.pack("<I", start) + data + directory + struct.pack("<I", 0) + values
