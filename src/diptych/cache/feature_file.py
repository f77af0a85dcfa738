"""An ``.npy`` file of features that grows chunk by chunk and goes on after a kill at any moment.

Beside ``train_ims.npy`` lies ``.train_ims.npy.log``: a first line with the key of the content, then one line
per chunk with its checksum, written after the chunk has reached the disk, and a last line with the size and
time of the finished file. Until then the rows are in ``.train_ims.npy.part``, so a file under its own name is
whole. A finished file whose size and time are still those of the log is taken as it is; any other is checked
chunk by chunk, and what does not agree is computed again.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from diptych.errors import DataError
from diptych.storage import parse_json, storing

FORMAT = 1
HEADER = 256  # bytes kept for the npy header, whose length must not depend on the number of rows
FIELDS = {"done", "rows", "shape", "bytes", "crc", "notes"}  # fields of a chunk's line
BLOCK = 1 << 24  # bytes read at a time when checking


@dataclass
class Written:
    """How far a file has come: items consumed, rows written, notes about items that gave no row."""

    done: int = 0
    rows: int = 0
    row_shape: tuple[int, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)


class FeatureFile:
    """The one writer of a feature file, under a lock; use it in a ``with`` block.

    ``progress`` says where to go on, ``append`` adds the rows of the next items, ``finish`` puts the file
    under its name. ``finished`` is True at once when a whole file of this ``key`` is there already.
    What has another key is refused, or with ``overwrite`` replaced.
    """

    def __init__(self, path: Path, key: str, *, overwrite: bool = False) -> None:
        self.path, self.key, self.overwrite = path, key, overwrite
        self.part = path.with_name(f".{path.name}.part")
        self.log = path.with_name(f".{path.name}.log")
        self.progress, self.finished = Written(), False
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        self._data: BinaryIO | None = None

    def __enter__(self) -> FeatureFile:
        if self._whole(self._read_log()):  # nothing to write: works without the lock, on a read-only disk too
            return self
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            try:
                self._open()
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._data is not None:
            self._data.close()
        self._lock.release()

    def append(self, rows: NDArray[Any], items: int, notes: dict[str, str] | None = None) -> None:
        """Add the rows (n, ...) that the next ``items`` items gave, as float16; on disk when this returns."""
        assert self._data is not None
        half = to_half(rows)
        if half.size and not self.progress.row_shape:
            self.progress.row_shape = half.shape[1:]
        if half.size and half.shape[1:] != self.progress.row_shape:
            raise DataError(
                f"rows of {half.shape[1:]} follow rows of {self.progress.row_shape} in {self.path}: "
                "give all pictures one size."
            )
        block = np.ascontiguousarray(half).tobytes()
        with storing(self.path):
            self._data.write(block)
            self._data.flush()
            os.fsync(self._data.fileno())
            self.progress.done += items
            self.progress.rows += len(half)
            self.progress.notes.update(notes or {})
            self._write_line(
                {
                    "done": self.progress.done,
                    "rows": self.progress.rows,
                    "shape": self.progress.row_shape,
                    "bytes": len(block),
                    "crc": zlib.crc32(block),
                    "notes": notes or {},
                }
            )

    def finish(self) -> None:
        """Put the file under its own name, whole."""
        assert self._data is not None
        with storing(self.path):
            self._data.seek(0)
            self._data.write(self._header())
            self._data.flush()
            os.fsync(self._data.fileno())
            self._data.close()
            self._data = None
            os.replace(self.part, self.path)
            self._write_line({"finished": _stamp(self.path)})
        self.finished = True

    def discard(self) -> None:
        """Forget what was written so far."""
        if self._data is not None:
            self._data.close()
            self._data = None
        self.part.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)

    def _open(self) -> None:
        lines = self._read_log()
        if lines is None and not self.overwrite and (self.path.exists() or self.part.exists()):
            raise DataError(
                f"{self.path} holds or is getting the features of another backbone or other images: choose "
                "another folder, or delete its files."
            )
        lines = lines or []
        if self._whole(lines):  # by another process, while this one waited
            return
        if lines and "finished" in lines[-1] and self.path.exists():
            sound = self._sound_lines(self.path, lines[:-1])
            self._take(sound)
            if len(sound) == len(lines) - 1 and self._fits(sound):
                self._rewrite_log(sound, finished=True)  # copied or touched, but whole
                self.finished = True
                return
        if self.path.exists() and not self.part.exists():
            os.replace(self.path, self.part)  # killed right after the renaming, or damaged since
        sound = self._sound_lines(self.part, [line for line in lines if "finished" not in line])
        self._take(sound)
        self._rewrite_log(sound, finished=False)
        self._data = open(self.part, "r+b" if self.part.exists() else "w+b")  # noqa: SIM115  closed on exit
        if self._data.seek(0, os.SEEK_END) < HEADER:
            self._data.seek(0)
            self._data.write(bytes(HEADER))
        self._data.truncate(HEADER + _size(sound))
        self._data.seek(0, os.SEEK_END)

    def _whole(self, lines: list[dict[str, Any]] | None) -> bool:
        """Take a finished file that has not been touched since."""
        if lines and self.path.exists() and lines[-1].get("finished") == _stamp(self.path):
            self._take(lines[:-1])
            self.finished = True
        return self.finished

    def _read_log(self) -> list[dict[str, Any]] | None:
        """The whole lines of a log of this key, None without one; a line cut off by a kill ends it."""
        if not self.log.exists():
            return None
        title, *rest = self.log.read_bytes().split(b"\n")
        if title != json.dumps(self._title()).encode():
            return None
        lines: list[dict[str, Any]] = []
        for text in rest[:-1]:
            try:
                line = parse_json(text)
            except ValueError:
                break
            if not isinstance(line, dict) or not (line.keys() >= FIELDS or "finished" in line):
                break
            lines.append(line)
        return lines

    def _sound_lines(self, path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The chunks from the start on whose bytes are still those that were written."""
        sound: list[dict[str, Any]] = []
        if not path.exists():
            return sound
        with path.open("rb") as file:
            file.seek(HEADER)
            for line in lines:
                if _crc(file, line["bytes"]) != line["crc"]:
                    break
                sound.append(line)
        return sound

    def _fits(self, lines: list[dict[str, Any]]) -> bool:
        """Whether the finished file has the header and the size that these chunks give it."""
        with self.path.open("rb") as file:
            header = file.read(HEADER)
        return header == self._header() and self.path.stat().st_size == HEADER + _size(lines)

    def _header(self) -> bytes:
        return _header((self.progress.rows, *self.progress.row_shape))

    def _take(self, lines: list[dict[str, Any]]) -> None:
        self.progress = Written()
        for line in lines:
            self.progress.done, self.progress.rows = line["done"], line["rows"]
            self.progress.row_shape = tuple(line["shape"])
            self.progress.notes.update(line["notes"])

    def _title(self) -> dict[str, Any]:
        return {"format": FORMAT, "key": self.key}

    def _rewrite_log(self, lines: list[dict[str, Any]], *, finished: bool) -> None:
        kept = [self._title(), *lines, *([{"finished": _stamp(self.path)}] if finished else [])]
        new = self.log.with_name(f"{self.log.name}.new")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
        os.replace(new, self.log)

    def _write_line(self, line: dict[str, Any]) -> None:
        with self.log.open("ab") as log:
            log.write(json.dumps(line).encode() + b"\n")
            log.flush()
            os.fsync(log.fileno())


def to_half(rows: NDArray[Any]) -> NDArray[np.float16]:
    """float16, or an error for numbers that do not fit."""
    with np.errstate(over="ignore"):
        half = rows.astype(np.float16)
    if not np.isfinite(half).all():
        largest = float(np.nanmax(np.abs(rows)))
        raise DataError(
            f"features of size {largest:.3g} do not fit half precision (65504), or are not numbers: use a "
            "backbone with normalised outputs."
        )
    return half


def _header(shape: tuple[int, ...]) -> bytes:
    """An npy header of exactly ``HEADER`` bytes."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": shape})
    text = file.getvalue()[10:].rstrip()
    return np.lib.format.magic(1, 0) + (HEADER - 10).to_bytes(2, "little") + text.ljust(HEADER - 11) + b"\n"


def _crc(file: BinaryIO, size: int) -> int:
    total = 0
    while size > 0 and (block := file.read(min(size, BLOCK))):
        total = zlib.crc32(block, total)
        size -= len(block)
    return total if size == 0 else -1


def _size(lines: list[dict[str, Any]]) -> int:
    return sum(line["bytes"] for line in lines)


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
