"""Rows of one shape and type that are computed once: they grow on disk, survive a kill and are checked after a change.

A log says which rows of a file count: an entry holds the checksum of some rows and is written after these have reached
the disk. What a killed writer left behind it is written over. The log also notes the size and time of the file as the
last writer left it: a file that differs (copied, damaged) is checked against the log, and rows that do not agree are
computed again. Rows are addressed by their number (``RowFile``) or by a key (``feature_pack.FeaturePack``).

The log of ``train_ims.npy`` is ``.train_ims.npy.log``, lines of JSON: the key of the content, the checksum of each
chunk, and at last the size and time of the finished file. Until then the rows are in ``.train_ims.npy.part``.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import DTypeLike, NDArray

from diptych.entries import Entries
from diptych.errors import DataError, StorageError
from diptych.locks import lock_at
from diptych.storage import parse_json, storing, write_text

FORMAT = 1
HEADER = 256  # bytes kept for the npy header, whose length must not depend on the number of rows
BLOCK = 1 << 24  # bytes read at a time when checking
HIDDEN = Entries(
    re.compile(r"\.[^/\\\x00]+\.(part|log|lock)"), DataError, "remove it, and what it held is computed again."
)


@dataclass(frozen=True)
class RowProgress:
    """How far a file has come: items consumed, rows written, notes about items that gave no row."""

    done: int
    rows: int
    row_shape: tuple[int, ...]
    notes: dict[str, str]


class RowFile:
    """The one writer of an ``.npy`` file of rows, under a lock; use it in a ``with`` block.

    ``progress`` says where to go on, ``append`` adds the rows of the next items, ``finish`` puts the file
    under its name. ``finished`` is True at once when a whole file of this ``key``, any value of JSON, is there already.
    What has another key is refused, or with ``overwrite`` replaced by ``finish``.
    """

    def __init__(self, path: Path, key: Any, *, dtype: DTypeLike = "<f2", overwrite: bool = False) -> None:
        self.path, self.key, self.dtype, self.overwrite = path, key, np.dtype(dtype), overwrite
        self.part, self.log = (path.with_name(f".{path.name}.{end}") for end in ("part", "log"))
        self.finished = False
        self._chunks: list[dict[str, Any]] = []  # their lines in the log
        self._changed = False  # in place, since the chunks were written
        self._lock: FileLock | None = None

    def __enter__(self) -> RowFile:
        if self._untouched(self._read_log()):  # works without the lock, on a read-only disk too
            return self
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_at(HIDDEN, self.path.with_name(f".{self.path.name}.lock"))
            self._lock.acquire()
            try:
                self._open()
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def progress(self) -> RowProgress:
        last: dict[str, Any] = self._chunks[-1] if self._chunks else {"done": 0, "rows": 0, "shape": ()}
        notes = {item: note for chunk in self._chunks for item, note in chunk["notes"].items()}
        return RowProgress(last["done"], last["rows"], tuple(last["shape"]), notes)

    def held_key(self) -> Any:
        """The key of what is there, None where there is no log."""
        try:
            title = parse_json(HIDDEN.read(self.log).partition(b"\n")[0])
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return title.get("key") if isinstance(title, dict) and title.get("format") == FORMAT else None

    def append(self, rows: NDArray[Any], items: int, notes: dict[str, str] | None = None) -> None:
        """Add the rows (n, ...) that the next ``items`` items gave; on disk when this returns."""
        own = to_half(rows) if self.dtype == np.float16 else np.asarray(rows, dtype=self.dtype)
        so_far = self.progress
        shape = so_far.row_shape or (own.shape[1:] if own.size else ())
        if own.size and own.shape[1:] != shape:
            raise DataError(f"rows of {own.shape[1:]} follow {shape} in {self.path}: give all one size.")
        block = own.tobytes()
        line = {
            "done": so_far.done + items,
            "rows": so_far.rows + len(own),
            "shape": shape,
            "bytes": len(block),
            "crc": zlib.crc32(block),
            "notes": notes or {},
        }
        with storing(self.path):
            put(HIDDEN, self.part, block, self._end())
            self._write_line(line)
        self._chunks.append(line)

    def reserve(self, rows: int, shape: tuple[int, ...]) -> None:
        """Take the room of all rows now: a disk that is too small is noticed before any is computed."""
        if hasattr(os, "posix_fallocate"):
            size = HEADER + rows * math.prod(shape) * self.dtype.itemsize
            try:
                with storing(self.path), os.fdopen(HIDDEN.open(self.part, os.O_RDWR), "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
            except StorageError:
                if not self._chunks:
                    self.discard()
                raise

    def change(self) -> np.memmap[Any, Any]:
        """All rows so far, mapped, to be changed in place; from now to ``finish`` they are not checked."""
        with storing(self.path):
            self._write_line({"changed": True})
        self._changed = True
        so_far = self.progress
        return np.memmap(HIDDEN.check(self.part), self.dtype, "r+", HEADER, (so_far.rows, *so_far.row_shape))

    def finish(self) -> None:
        """Put the file under its own name, whole."""
        with storing(self.path):
            put(HIDDEN, self.part, self._header(), 0)
            put(HIDDEN, self.part, b"", self._end(), last=True)
            if self._changed:
                start = HEADER
                for chunk in self._chunks:
                    chunk["crc"] = crc_at(self.part, start, chunk["bytes"])
                    start += chunk["bytes"]
                self._rewrite_log()
            os.replace(self.part, self.path)
            self._write_line({"finished": stamp_of(self.path)})
        self.finished = True

    def discard(self) -> None:
        HIDDEN.remove(self.part)
        HIDDEN.remove(self.log)

    def _open(self) -> None:
        lines = self._read_log()
        if lines is None and not self.overwrite and (self.path.exists() or self.part.exists()):
            raise DataError(f"{self.path} is of another backbone or other images: choose another folder.")
        if self._untouched(lines):  # by another process, while this one waited
            return
        chunks = [line for line in lines or [] if "crc" in line]
        self._changed = any("changed" in line for line in lines or [])
        named = bool(chunks) and self.path.exists() and not self.part.exists()
        self._chunks = self._sound(self.path if named else self.part, chunks)
        if named and lines and "finished" in lines[-1] and self._chunks == chunks and self._fits():
            self._rewrite_log({"finished": stamp_of(self.path)})  # copied or touched, but whole
            self.finished = True
            return
        if named:
            os.replace(self.path, self.part)  # killed right after the renaming, or damaged since
        self._rewrite_log(*[{"changed": True}] * self._changed)
        put(HIDDEN, self.part, b"", self._end(), last=True)

    def _untouched(self, lines: list[dict[str, Any]] | None) -> bool:
        """Take a finished file whose size and time are still those of the log."""
        if lines and self.path.exists() and lines[-1].get("finished") == stamp_of(self.path):
            self._chunks, self.finished = [line for line in lines if "crc" in line], True
        return self.finished

    def _read_log(self) -> list[dict[str, Any]] | None:
        """The whole lines of a log of this key, None without one; a line cut off by a kill ends it."""
        if self.held_key() != self.key:
            return None
        lines: list[dict[str, Any]] = []
        for text in HIDDEN.read(self.log).split(b"\n")[1:-1]:
            try:
                line = parse_json(text)
            except ValueError:
                break
            if not isinstance(line, dict) or not (_is_chunk(line) or {"finished", "changed"} & line.keys()):
                break
            lines.append(line)
        return lines

    def _sound(self, path: Path, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The chunks from the start on whose bytes are still those that were written."""
        start = HEADER
        for n, chunk in enumerate(chunks):
            found = crc_at(path, start, chunk["bytes"])
            if found < 0 or (found != chunk["crc"] and not self._changed):
                return chunks[:n]
            start += chunk["bytes"]
        return chunks

    def _fits(self) -> bool:
        """Whether the finished file has the header and the size that the chunks give it."""
        with os.fdopen(HIDDEN.open(self.path), "rb") as file:
            return file.read(HEADER) == self._header() and self.path.stat().st_size == self._end()

    def _end(self) -> int:
        return HEADER + sum(int(chunk["bytes"]) for chunk in self._chunks)

    def _header(self) -> bytes:
        """An npy header of exactly ``HEADER`` bytes."""
        shape = (self.progress.rows, *self.progress.row_shape)
        file, about = io.BytesIO(), {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, about)
        text = file.getvalue()[10:].rstrip()
        size = (HEADER - 10).to_bytes(2, "little")
        return np.lib.format.magic(1, 0) + size + text.ljust(HEADER - 11) + b"\n"

    def _rewrite_log(self, *last: dict[str, Any]) -> None:
        title = {"format": FORMAT, "key": self.key}
        write_text(self.log, "".join(json.dumps(line) + "\n" for line in (title, *self._chunks, *last)))

    def _write_line(self, line: dict[str, Any]) -> None:
        put(HIDDEN, self.log, json.dumps(line).encode() + b"\n", self.log.stat().st_size)


def kept_rows(path: Path, key: str, chunks: Callable[[int], Iterable[tuple[NDArray[Any], int]]]) -> Path:
    """A file of float16 rows in the cache; what is missing is computed.

    ``chunks(done)`` yields the rows of the items that follow the first ``done``, each time with the number of items.
    """
    with RowFile(path, key, overwrite=True) as file:
        if not file.finished:
            for rows, items in chunks(file.progress.done):
                file.append(rows, items)
            file.finish()
    return path


def _is_chunk(line: dict[str, Any]) -> bool:
    counts = [line.get(name) for name in ("done", "rows", "bytes", "crc")]
    shape, notes = line.get("shape"), line.get("notes")
    return (
        isinstance(shape, list)
        and isinstance(notes, dict)
        and all(type(count) is int and count >= 0 for count in (*counts, *shape))
    )


def to_half(rows: NDArray[Any]) -> NDArray[np.float16]:
    """float16, or an error for numbers that do not fit."""
    with np.errstate(over="ignore"):
        half = rows.astype(np.float16)
    if not np.isfinite(half).all():
        largest = float(np.nanmax(np.abs(rows)))
        raise DataError(f"features of size {largest:.3g} do not fit half precision: normalise the outputs.")
    return half


def put(names: Entries, path: Path, data: bytes, at: int, *, last: bool = False) -> None:
    """Write bytes into a plain file and sync them; with ``last``, what lies behind them is cut off."""
    with os.fdopen(names.open(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as file:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(file.fileno(), view[done:], at + done)
        if last:
            os.ftruncate(file.fileno(), at + len(data))
        os.fsync(file.fileno())


def crc_at(path: Path, start: int, size: int) -> int:
    """The checksum of ``size`` bytes of a file, -1 where it is not there or ends before."""
    total = 0
    try:
        with os.fdopen(HIDDEN.open(path), "rb", buffering=0) as file:
            file.seek(start)
            while size and (block := file.read(min(size, BLOCK))):
                total = zlib.crc32(block, total)
                size -= len(block)
    except FileNotFoundError:
        return -1
    return -1 if size else total


def stamp_of(path: Path) -> list[int]:
    """The size and time of a file, by which a change is noticed."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
