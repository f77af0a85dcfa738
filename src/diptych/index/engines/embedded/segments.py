"""Vectors on disk: append-only segment files of equal rows, memory-mapped, each block with its checksum.

A segment holds the rows of one kind of item in one precision. What is committed is decided elsewhere (the
catalog); bytes beyond the committed rows are the remains of an operation that never finished, and are
overwritten.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.entries import Entries
from diptych.errors import IndexFault
from diptych.index import deadline
from diptych.index.protocol import Precision, Vectors, halves
from diptych.storage import storing, sync

ROW_BITS = 32  # a slot is segment number << ROW_BITS | row
SEGMENT_BYTES = 1 << 29  # a full segment: half a gigabyte, so that compaction rewrites little at a time
ANEW = "copy the whole index again, or index the collection again."
PIECE = 1 << 25  # bytes whose checksum is computed between two looks at the deadline
_SUFFIX = {"float32": "f32", "float16": "f16", "binary": "b1"}
FILES = Entries(  # every name that an index has ever given a file of vectors or an approximate index
    re.compile(
        r"vectors-[0-9]{6,19}-(image|text)\.(f32|f16|b1)|graph-[0-9]{6,19}-(image|text)\.(usearch|codes)"
    ),
    IndexFault,
    f"do not use this index unless you know who changed it; {ANEW}",
)
_STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "binary": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a vector becomes bytes: ``width`` numbers of the stored type a row."""

    dimension: int
    precision: Precision

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored type, little-endian."""
        return _STORED[self.precision]

    @property
    def width(self) -> int:
        """Stored numbers in a row."""
        return -(-self.dimension // 8) if self.precision == "binary" else self.dimension

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def capacity(self) -> int:
        """Rows of a full segment."""
        return max(1, SEGMENT_BYTES // self.row_bytes)

    def pack(self, vectors: Vectors) -> NDArray[Any]:
        """Stored rows of float32 vectors (n, dimension)."""
        if self.precision == "binary":
            return np.packbits(vectors >= 0, axis=1)
        return halves(vectors) if self.precision == "float16" else vectors.astype(self.dtype)

    def unpack(self, rows: NDArray[Any]) -> Vectors:
        """The float32 vectors that stored rows stand for; a binary one is ±1/√dimension throughout."""
        if self.precision == "binary":
            signs = np.unpackbits(rows, axis=1, count=self.dimension).astype(np.float32)
            return (signs * 2 - 1) / np.float32(np.sqrt(self.dimension))
        return rows.astype(np.float32)

    def file(self, number: int, kind: str) -> str:
        return f"vectors-{number:06d}-{kind}.{_SUFFIX[self.precision]}"


def append(path: Path, layout: RowLayout, committed: int, rows: NDArray[Any]) -> int:
    """Write rows after the first ``committed`` ones and sync them; the checksum of what was written.

    Whatever an unfinished operation left behind the committed rows is cut off first.
    """
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data
    with storing(path):
        handle = FILES.open(path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(handle, committed * layout.row_bytes)
            view, at = data, committed * layout.row_bytes
            while len(view):
                written = os.pwrite(handle, view, at)
                view, at = view[written:], at + written
            os.fsync(handle)
        finally:
            os.close(handle)
        if committed == 0:  # the file's name may be as new as its rows, also where a failed append left one
            sync(path.parent)
    return zlib.crc32(data)


def attach(path: Path, layout: RowLayout, rows: int, before: Rows | None = None) -> Rows:
    """The committed rows of a segment, memory-mapped: nothing is read until it is used."""
    if rows == 0:
        return Rows(path, np.zeros((0, layout.width), layout.dtype))
    try:
        # measured and mapped through one handle: compaction may unlink the name meanwhile
        handle = FILES.open(path)
    except FileNotFoundError:
        raise IndexFault(f"{path.parent} is incomplete: {path.name} is missing; {ANEW}") from None
    with os.fdopen(handle, "rb") as file:
        size = os.fstat(handle).st_size
        if size < rows * layout.row_bytes:
            raise cut_short(path, size, rows * layout.row_bytes)
        # private pages of a file opened for reading: torch wants writable memory, the file stays untouched
        mapped = mmap.mmap(file.fileno(), rows * layout.row_bytes, access=mmap.ACCESS_COPY)
    return Rows(path, np.frombuffer(mapped, layout.dtype).reshape(rows, layout.width), mapped, before)


class Rows:
    """The rows of a segment; each block of them is compared with its checksum before it is used the first time.

    Touching memory behind the end of a file that was cut short ends the process, so the size of the file is looked at
    before every use: the mapping knows it. Safe to share between threads: two may compare the same block, and find the
    same. What is known of the rows ``before`` more were added is kept.
    """

    def __init__(
        self, path: Path, stored: NDArray[Any], file: mmap.mmap | None = None, before: Rows | None = None
    ) -> None:
        self.path, self.stored, self._file = path, stored, file
        self.known: list[tuple[int, int, int]] = [] if before is None else list(before.known)
        self._sound: set[int] = set() if before is None else set(before._sound)
        self._ends = np.zeros(0, np.int64)
        self._all = False

    def __len__(self) -> int:
        return len(self.stored)

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Stored rows (stop − start, width), memory-mapped, as they were written or an error."""
        self.check(start, stop)
        return self.stored[start:stop]

    def take(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Stored rows (n, width), copied, as they were written or an error."""
        self._check_size()
        if not self._all and len(rows):
            self._compare(np.unique(np.searchsorted(self._ends, rows, side="right")).tolist())
        # to say "raise" would copy twice; rows are those of this segment
        return np.take(self.stored, rows, axis=0, out=out, mode="clip")

    def extend(self, blocks: Iterable[tuple[int, int, int]]) -> None:
        """Note (start, rows, checksum) of blocks behind those that are known."""
        for start, count, crc in blocks:
            have = self.known[-1][0] + self.known[-1][1] if self.known else 0
            if start != have or start + count > len(self):
                raise IndexFault(f"{self.path} has no checksum for some of its rows: {ANEW}")
            self.known.append((start, count, crc))
        self._ends = np.array([start + count for start, count, _ in self.known], np.int64)

    def check(self, start: int, stop: int) -> None:
        """Raise when the rows from one up to another are not what was written."""
        self._check_size()
        if not self._all and stop > start:
            first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
            self._compare(range(first, last + 1))
            self._all = len(self._sound) == len(self.known)

    def _compare(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._sound:
                continue
            if number >= len(self.known):
                raise IndexFault(f"{self.path} has no checksum for some of its rows: {ANEW}")
            start, count, expected = self.known[number]
            crc, step = 0, max(1, PIECE // self.stored[0].nbytes)
            for at in range(start, start + count, step):
                deadline.check()  # a block of a forged index may be a hole of any size
                crc = zlib.crc32(self.stored[at : min(at + step, start + count)].data, crc)
            if crc != expected:
                raise IndexFault(f"{self.path} is damaged between rows {start} and {start + count}: {ANEW}")
            self._sound.add(number)

    def _check_size(self) -> None:
        if self._file is not None and (size := self._file.size()) < self.stored.nbytes:
            raise cut_short(self.path, size, self.stored.nbytes)


def cut_short(path: Path, size: int, wanted: int) -> IndexFault:
    """The refusal of a file that lacks its end."""
    return IndexFault(f"{path.parent} is incomplete: {path.name} has {size} of {wanted} bytes; {ANEW}")


def checksum(path: Path, start: int, size: int, beside: hashlib.blake2b | None = None) -> int | None:
    """The checksum of ``size`` bytes as they are on disk now; None when the file is gone or ends before.

    ``beside`` reads the same bytes.
    """
    try:
        handle = FILES.open(path)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        file.seek(start)
        crc = 0
        while size:
            piece = file.read(min(size, 1 << 22))
            if not piece:
                return None
            crc, size = zlib.crc32(piece, crc), size - len(piece)
            if beside is not None:
                beside.update(piece)
    return crc


def slot_of(segment: int, row: int) -> int:
    """The number of a row among all segments."""
    return segment << ROW_BITS | row
