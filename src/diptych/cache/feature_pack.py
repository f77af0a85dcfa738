"""Rows that are found by a key: the features of pictures, one row per picture, that one backbone has computed.

=======================  ======================================================================================
``pack.json``            shape and type of a row, and whose features they are
``rows-000003.f16``      rows end to end, float16, as many as ``FILE_BYTES`` hold
``rows-000003.used``     an empty file whose time says when the rows were last asked for
``index``                the log: ``ENTRY`` per row. Later entries win; the number −1 takes an entry back
``stamps.json``          size and time of each file of rows as the last writer left it
=======================  ======================================================================================

Writers append under a lock that they hold for one chunk, so several processes may fill a pack at once. Readers need
no lock.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from diptych.cache.rows import crc_at, put, stamp_of, to_half
from diptych.data.arrays import MOST_SIDES, ArrayStore
from diptych.entries import WHOLE, Entries
from diptych.errors import DataError, StorageError
from diptych.locks import lock_at
from diptych.storage import MISREAD, parse_json, storing, write_bytes, write_text

FORMAT = 1
FILE_BYTES = 1 << 30  # largest file of rows: files are cleared, or checked after damage, one at a time
USED_AGAIN = 3600.0  # seconds after which a use is noted again
SLOTS = 64  # locks of those who compute the same pictures
ENTRY = np.dtype([("key", "V16"), ("row", "<i8"), ("crc", "<u4"), ("check", "<u4")])
CHECK = np.uint32(0x44495054)  # an entry of zeros is not valid
MISSING = -1
MOST_ROWS = 1 << 48  # of a pack
FILES = Entries(
    re.compile(
        r"pack\.json|stamps\.json|index|rows-[0-9]{6,19}\.(f16|used)|(append|reading|work-[0-9]{2})\.lock"
    ),
    DataError,
    "remove the folder, its features are computed again.",
)


class PackFile(NamedTuple):
    """One file of rows: its number, bytes, rows that are found, and when they were last asked for."""

    number: int
    bytes: int
    pictures: int
    used: float


class FeaturePack:
    """The rows of one backbone below ``folder``, each (…shape) float16, found by content key.

    ``title`` says whose they are, for people who look at the cache.
    """

    def __init__(self, folder: Path, title: str = "") -> None:
        self.folder, self.title = folder, title
        self._reading: int | None = None
        self._forget()
        self.refresh()

    def _forget(self) -> None:
        self.shape: tuple[int, ...] = ()
        self._files: dict[int, ArrayStore] = {}
        self._rows: dict[bytes, int] = {}
        self._next = 0  # number of the first row that was never given
        self._read, self._inode = 0, 0  # how much of which index file
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def row_bytes(self) -> int:
        return 2 * math.prod(self.shape)

    @property
    def per_file(self) -> int:
        return max(1, FILE_BYTES // max(1, self.row_bytes))

    def find(self, keys: Iterable[str]) -> NDArray[np.int64]:
        """The row of each content key, ``MISSING`` where there is none."""
        return np.array([self._rows.get(_digest(key), MISSING) for key in keys], dtype=np.int64)

    def read(self, rows: NDArray[np.int64], out: NDArray[np.float16]) -> None:
        """Copy rows into ``out`` (n, …shape); ``MISSING`` gives zeros."""
        if not len(rows):
            return
        size, files, within = self.row_bytes, rows // self.per_file, rows % self.per_file
        flat = out.reshape(-1).view(np.uint8).data
        apart = np.flatnonzero((rows[1:] != rows[:-1] + 1) | (files[1:] != files[:-1])) + 1
        starts = [0, *apart.tolist()]  # of rows that lie side by side, which are read at once
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            if files[start] < 0:
                out[start] = 0
            else:
                into = flat[start * size : end * size]
                self._open(int(files[start])).read_at(int(within[start]) * size, into)

    def hold(self) -> None:
        """Keep ``remove`` away from this pack while this object lives; then read what is in it."""
        with suppress(ImportError, OSError):  # Windows; a disk that may not be written, which nobody clears
            import fcntl

            if self._reading is None and self.folder.is_dir():
                self._reading = FILES.open(self._path("reading.lock"), os.O_RDWR | os.O_CREAT)
                weakref.finalize(self, os.close, self._reading)
                fcntl.flock(self._reading, fcntl.LOCK_SH)
        self.refresh()

    def note_use(self, rows: NDArray[np.int64]) -> None:
        now = time.time()
        for number in np.unique(rows[rows >= 0] // self.per_file).tolist():
            path = FILES.check_alone(self._path(f"rows-{number:06d}.used"))
            with suppress(OSError):
                if not path.exists() or now - path.stat().st_mtime > USED_AGAIN:
                    path.touch()

    def work_lock(self, name: str) -> FileLock:
        """A lock for those who compute the same pictures: one computes, the others wait and find them."""
        with storing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            slot = hashlib.sha256(name.encode()).digest()[0] % SLOTS
            return lock_at(FILES, self._path(f"work-{slot:02d}.lock"))

    def append(self, keys: Sequence[str], rows: NDArray[Any]) -> None:
        """Add the rows (n, …shape) of pictures; those that are there already are left as they are."""
        if not len(keys):
            return
        half = to_half(rows)
        with storing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._appending:
                self.refresh()
                self._take_shape(half.shape[1:])
                new = {_digest(key): n for n, key in enumerate(keys) if _digest(key) not in self._rows}
                if new:
                    self._write(list(new), half[list(new.values())])

    def refresh(self) -> None:
        """Read what other processes have added since."""
        try:
            with os.fdopen(FILES.open(self._path("index")), "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._read:
                    self._forget()
                    self._inode = status.st_ino
                if not self.shape:
                    self.shape = self._read_shape()
                file.seek(self._read)
                while data := file.read(WHOLE // ENTRY.itemsize * ENTRY.itemsize):
                    entries = _sound_entries(data)
                    self._read += len(data) // ENTRY.itemsize * ENTRY.itemsize
                    self._enter(entries)
                    if not len(entries):  # holes, which may go on for a terabyte
                        break
        except (FileNotFoundError, NotADirectoryError):
            self._forget()

    def files(self) -> list[PackFile]:
        counts = Counter(row // self.per_file for row in self._rows.values())
        listed = []
        for path in filter(lambda path: FILES.names.fullmatch(path.name), sorted(self.folder.glob("*.f16"))):
            number, used = int(path.stem[5:]), path.with_suffix(".used")
            at = (used if used.exists() else path).stat().st_mtime
            listed.append(PackFile(number, path.stat().st_size, counts[number], at))
        return listed

    def remove(self, numbers: Iterable[int]) -> bool:
        """Take files of rows away; False, and nothing is done, while another process reads this pack."""
        gone = set(numbers)
        with storing(self.folder), self._appending:
            if not self._alone():
                return False
            self.refresh()
            entries = _sound_entries(FILES.read(self._path("index")))
            kept = entries[~np.isin(entries["row"] // self.per_file, list(gone))]
            write_bytes(self._path("index"), kept.tobytes())
            for number in gone:
                for suffix in ("f16", "used"):
                    FILES.remove(self._path(f"rows-{number:06d}.{suffix}"))
            self.refresh()
        return True

    def _alone(self) -> bool:
        """Whether nobody else reads."""
        try:
            import fcntl
        except ImportError:  # Windows, where an open file cannot be deleted
            return True
        handle = FILES.open(self._path("reading.lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True

    def _write(self, keys: list[bytes], half: NDArray[np.float16]) -> None:
        """Rows first, then their entries, each synced; under the lock."""
        rows, start, per_file = range(self._next, self._next + len(keys)), 0, self.per_file
        numbers = range(rows[0] // per_file, rows[-1] // per_file + 1)
        for number in numbers:
            end = min(len(keys), (number + 1) * per_file - rows[0])
            at = rows[start] % per_file * self.row_bytes
            put(FILES, self._rows_file(number), half[start:end].tobytes(), at)
            FILES.check_alone(self._path(f"rows-{number:06d}.used")).touch()
            start = end
        entries = _entries(keys, rows, [zlib.crc32(row.tobytes()) for row in half])
        self._log(entries, self._read)  # over what a killed writer left behind it
        self._inode = self._path("index").stat().st_ino
        self._stamp(numbers)
        self._checked.update(numbers)
        self._enter(entries)

    def _log(self, entries: NDArray[Any], at: int) -> None:
        put(FILES, self._path("index"), entries.tobytes(), at, last=True)
        if self._read == at:  # nothing of others to read before it
            self._read += entries.nbytes

    def _enter(self, entries: NDArray[Any]) -> None:
        """Take entries into the table; files of rows that have changed are checked first."""
        if not len(entries):
            return
        self._next = max(self._next, int(entries["row"].max()) + 1)
        files = entries["row"] // self.per_file
        suspect = self._changed_files(np.unique(files[files >= 0]).tolist())
        checked = np.isin(files, list(suspect)).tolist()
        bad: list[bytes] = []
        for (key, row, crc, _), check in zip(entries.tolist(), checked, strict=True):
            if row < 0:
                self._rows.pop(key, None)
            elif check and crc != crc_at(
                self._rows_file(row // self.per_file), row % self.per_file * self.row_bytes, self.row_bytes
            ):
                bad.append(key)
            else:
                self._rows[key] = row
        if suspect:
            with suppress(OSError, StorageError):  # a disk that may not be written is checked in every run
                self._take_back([key for key in bad if key not in self._rows], suspect)

    def _changed_files(self, numbers: list[int]) -> set[int]:
        """Those of some files whose size or time is not what the last writer noted."""
        stamps, paths = self._stamps(), {n: self._rows_file(n) for n in numbers if n not in self._checked}
        self._checked.update(paths)
        return {n for n, path in paths.items() if not path.exists() or stamps.get(str(n)) != stamp_of(path)}

    def _take_back(self, keys: list[bytes], numbers: set[int]) -> None:
        """Note for other processes what was found bad in files of rows, and that these were checked."""
        entries = _entries(keys, [MISSING] * len(keys), [0] * len(keys))
        with self._appending:
            whole = self._path("index").stat().st_size // ENTRY.itemsize * ENTRY.itemsize
            self._log(entries, whole)
            self._stamp(numbers)

    def _stamp(self, numbers: Iterable[int]) -> None:
        """Note the size and time of files of rows as they are now."""
        paths = {str(number): self._rows_file(number) for number in numbers}
        now = {number: stamp_of(path) for number, path in paths.items() if path.exists()}
        write_text(self._path("stamps.json"), json.dumps({**self._stamps(), **now}))

    def _stamps(self) -> dict[str, Any]:
        try:
            found = parse_json(FILES.read(self._path("stamps.json")))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _read_shape(self) -> tuple[int, ...]:
        path = self._path("pack.json")
        try:
            found = parse_json(FILES.read(path))
            shape = tuple(int(side) for side in found["shape"])
            self.title = self.title or str(found.get("title", ""))
            if found["format"] != FORMAT or not 1 <= len(shape) <= MOST_SIDES or min(shape) < 1:
                raise ValueError("another format")
        except (OSError, *MISREAD) as error:
            raise DataError(f"{path} is damaged ({error}): remove the folder.") from error
        return shape

    def _take_shape(self, shape: tuple[int, ...]) -> None:
        if not self.shape:
            self.shape = shape
            about = {"format": FORMAT, "shape": shape, "type": "float16", "title": self.title}
            write_text(self._path("pack.json"), json.dumps(about))
        if shape != self.shape:
            raise DataError(f"{shape} follows {self.shape} in {self.folder}: give all pictures one size.")

    def _path(self, name: str) -> Path:
        return FILES.path(self.folder, name)

    def _rows_file(self, number: int) -> Path:
        return self._path(f"rows-{number:06d}.f16")

    @cached_property
    def _appending(self) -> FileLock:
        return lock_at(FILES, self._path("append.lock"))

    def _open(self, number: int) -> ArrayStore:
        if number not in self._files:
            path = self._rows_file(number)
            if not path.exists():
                raise DataError(f"{path} is gone: run again, it is computed again.")
            self._files[number] = ArrayStore(path, raw=((0, *self.shape), "<f2"))
        return self._files[number]

    def __getstate__(self) -> dict[str, Any]:
        own = {**self.__dict__, "_reading": None}  # a lock means nothing elsewhere
        return {name: value for name, value in own.items() if name != "_appending"}


def _digest(key: str) -> bytes:
    """The 16 bytes that stand for a content key."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def _entries(keys: list[bytes], rows: Iterable[int], crcs: list[int]) -> NDArray[Any]:
    """Entries of the index, with their checksums."""
    entries = np.zeros(len(keys), dtype=ENTRY)
    entries["key"] = np.frombuffer(b"".join(keys), dtype="V16")
    entries["row"], entries["crc"] = list(rows), crcs
    entries["check"] = _checks_of(entries)
    return entries


def _sound_entries(data: bytes) -> NDArray[Any]:
    """The whole entries of some bytes whose checksum is right."""
    entries = np.frombuffer(data, dtype=ENTRY, count=len(data) // ENTRY.itemsize)
    return np.asarray(entries[(entries["check"] == _checks_of(entries)) & (entries["row"] < MOST_ROWS)])


def _checks_of(entries: NDArray[Any]) -> NDArray[np.uint32]:
    """The checksum of each entry, over all of its bytes but those of the checksum."""
    words = np.ascontiguousarray(entries).view(np.uint32).reshape(-1, ENTRY.itemsize // 4)
    return np.asarray(np.bitwise_xor.reduce(words[:, :-1], axis=1) ^ CHECK)
