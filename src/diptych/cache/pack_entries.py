"""The entries of a feature pack's index: the key, place and checksums of a record, 32 bytes each."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ENTRY = np.dtype([("key", "V16"), ("row", "<i8"), ("crc", "<u4"), ("check", "<u4")])
CHECK = np.uint32(0x44495054)  # an entry of zeros is not valid
MISSING = -1


def digest(key: str) -> bytes:
    """The 16 bytes that stand for a content key."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def checks_of(entries: NDArray[Any]) -> NDArray[np.uint32]:
    """The checksum of each entry, over all of its bytes but those of the checksum."""
    words = np.ascontiguousarray(entries).view(np.uint32).reshape(-1, ENTRY.itemsize // 4)
    return np.asarray(np.bitwise_xor.reduce(words[:, :-1], axis=1) ^ CHECK)


def write_all(handle: int, data: bytes, offset: int) -> None:
    """Write all bytes at an offset, however many a single call takes."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


def stamp_of(path: Path) -> list[int]:
    """The size and time of a file, by which a change is noticed."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
