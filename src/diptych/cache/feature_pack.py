"""The features of pictures, one record per picture, in files that only grow: what one backbone has computed.

=======================  ======================================================================================
``pack.json``            shape and type of a record, and whose features they are
``rows-000003.f16``      records end to end, float16, as many as ``FILE_BYTES`` hold
``rows-000003.used``     an empty file whose time says when the records were last asked for
``index``                32 bytes per record: 16 of a hash of the picture's content key, the number of the record,
                         a checksum of the record, and a checksum of these 28 bytes. Later entries win; the number
                         −1 takes an entry back
``stamps.json``          size and time of each file of records as the last writer left it
=======================  ======================================================================================

A record is synced before its entry is written, so an entry always has its record; what a killed process wrote without
an entry is written over, and a part of an entry at the end is ignored. Writers append under a lock that they hold for
one chunk, so two processes may fill a pack at once; a picture that both computed is stored once. A file of records
whose size or time is not that of its stamp (copied, damaged, or a writer was killed) is checked record by record, and
what does not agree is taken back. Readers need no lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from diptych.cache.feature_file import to_half
from diptych.cache.pack_entries import ENTRY, MISSING, checks_of, digest, stamp_of, write_all
from diptych.errors import DataError, StorageError
from diptych.storage import parse_json, storing, write_text

FORMAT = 1
FILE_BYTES = 1 << 30  # largest file of records: files are cleared, or checked after damage, one at a time
USED_AGAIN = 3600.0  # seconds after which a use is noted again
SLOTS = 64  # locks of those who compute the same pictures


@dataclass(frozen=True)
class PackFile:
    """One file of records: its number, bytes, records that are found, and when they were last asked for."""

    number: int
    bytes: int
    pictures: int
    used: float


class FeaturePack:
    """The records of one backbone below ``folder``, each (…shape) float16, found by content key.

    ``title`` says whose they are, for people who look at the cache.
    """

    def __init__(self, folder: Path, title: str = "") -> None:
        self.folder, self.title = folder, title
        self.shape: tuple[int, ...] = ()
        self._rows: dict[bytes, int] = {}
        self._next = 0  # number of the first record that was never given
        self._read, self._inode = 0, 0  # how much of which index file
        self._files: dict[int, int] = {}
        self._reading: int | None = None
        self._checked: set[int] = set()
        self._make_locks()
        self.refresh()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def row_bytes(self) -> int:
        """Of one record."""
        return 2 * int(np.prod(self.shape, dtype=np.int64))

    @property
    def per_file(self) -> int:
        """Records in one file."""
        return max(1, FILE_BYTES // max(1, self.row_bytes))

    def find(self, keys: Iterable[str]) -> NDArray[np.int64]:
        """The record of each content key, ``MISSING`` where there is none."""
        return np.array([self._rows.get(digest(key), MISSING) for key in keys], dtype=np.int64)

    def read(self, rows: NDArray[np.int64], out: NDArray[np.float16]) -> None:
        """Copy records into ``out`` (n, …shape); ``MISSING`` gives zeros."""
        size, per_file = self.row_bytes, self.per_file
        flat = out.reshape(-1).view(np.uint8).data
        start, wanted = 0, rows.tolist()
        while start < len(wanted):
            row, end = wanted[start], start + 1
            if row == MISSING:
                out[start] = 0
            else:
                file, within = divmod(row, per_file)
                while (  # what lies side by side is read at once
                    end < len(wanted) and wanted[end] == row + end - start and within + end - start < per_file
                ):
                    end += 1
                self._fill(file, within * size, flat[start * size : end * size])
            start = end

    def hold(self) -> None:
        """Keep ``remove`` away from this pack while this object lives; then read what is in it."""
        with suppress(ImportError, OSError):  # Windows; a disk that may not be written, which nobody clears
            import fcntl

            if self._reading is None and self.folder.is_dir():
                self._reading = os.open(self.folder / "reading.lock", os.O_RDWR | os.O_CREAT, 0o666)
                fcntl.flock(self._reading, fcntl.LOCK_SH)
        self.refresh()

    def note_use(self, rows: NDArray[np.int64]) -> None:
        """Note that these records were asked for now."""
        now = time.time()
        for number in np.unique(rows[rows >= 0] // self.per_file).tolist():
            path = self.folder / f"rows-{number:06d}.used"
            with suppress(OSError):
                if not path.exists() or now - path.stat().st_mtime > USED_AGAIN:
                    path.touch()

    def work_lock(self, name: str) -> FileLock:
        """A lock for those who compute the same pictures: one computes, the others wait and find them."""
        with storing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        slot = hashlib.sha256(name.encode()).digest()[0] % SLOTS
        return FileLock(self.folder / f"work-{slot:02d}.lock")

    def append(self, keys: Sequence[str], rows: NDArray[Any]) -> None:
        """Add the records (n, …shape) of pictures; those that are there already are left as they are."""
        if not len(keys):
            return
        half = to_half(rows)
        with storing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._appending:
                self.refresh()
                self._take_shape(half.shape[1:])
                new = {digest(key): n for n, key in enumerate(keys) if digest(key) not in self._rows}
                if new:
                    self._write(list(new), np.ascontiguousarray(half[list(new.values())]))

    def refresh(self) -> None:
        """Read what other processes have added since."""
        path = self.folder / "index"
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._read:
                    self._forget()
                    self._inode = status.st_ino
                if not self.shape:
                    self.shape = self._read_shape()
                file.seek(self._read)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            self._forget()
            return
        whole = len(data) // ENTRY.itemsize
        entries = np.frombuffer(data, dtype=ENTRY, count=whole)
        self._read += whole * ENTRY.itemsize
        entries = entries[entries["check"] == checks_of(entries)]
        self._enter(entries)

    def files(self) -> list[PackFile]:
        """The files of records."""
        found = np.array(list(self._rows.values()), dtype=np.int64) // self.per_file
        counts = dict(zip(*np.unique(found, return_counts=True), strict=True))
        listed = []
        for path in sorted(self.folder.glob("rows-*.f16")):
            number, used = int(path.stem[5:]), path.with_suffix(".used")
            at = (used if used.exists() else path).stat().st_mtime
            listed.append(PackFile(number, path.stat().st_size, int(counts.get(number, 0)), at))
        return listed

    def remove(self, numbers: Iterable[int]) -> bool:
        """Take files of records away; False, and nothing is done, while another process reads this pack."""
        gone = set(numbers)
        with storing(self.folder), self._appending:
            if not self._alone():
                return False
            self.refresh()
            kept = [(key, row) for key, row in self._rows.items() if row // self.per_file not in gone]
            entries = np.zeros(len(kept), dtype=ENTRY)
            crcs = self._stored_crcs()
            for n, (key, row) in enumerate(kept):
                entries[n] = (key, row, crcs[row], 0)
            entries["check"] = checks_of(entries)
            new = self.folder / "index.new"
            new.write_bytes(entries.tobytes())
            os.replace(new, self.folder / "index")
            for number in gone:
                for suffix in (".f16", ".used"):
                    (self.folder / f"rows-{number:06d}{suffix}").unlink(missing_ok=True)
            self._close()
            self.refresh()
        return True

    def _alone(self) -> bool:
        """Whether nobody else reads."""
        try:
            import fcntl
        except ImportError:  # Windows, where an open file cannot be deleted
            return True
        with open(self.folder / "reading.lock", "a+b") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        return True

    def _write(self, keys: list[bytes], half: NDArray[np.float16]) -> None:
        """Records first, then their entries, each synced; under the lock."""
        first = self._next
        stamps = self._stamps()
        entries = np.zeros(len(keys), dtype=ENTRY)
        start = 0
        while start < len(keys):
            number, within = divmod(first + start, self.per_file)
            end = min(len(keys), start + self.per_file - within)
            path = self._rows_file(number)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                write_all(handle, half[start:end].tobytes(), within * self.row_bytes)
                os.fsync(handle)
            finally:
                os.close(handle)
            path.with_suffix(".used").touch()
            stamps[str(number)] = stamp_of(path)
            start = end
        for n, key in enumerate(keys):
            entries[n] = (key, first + n, zlib.crc32(half[n].tobytes()), 0)
        entries["check"] = checks_of(entries)
        handle = os.open(self.folder / "index", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            write_all(handle, entries.tobytes(), self._read)  # over what a killed writer left behind it
            os.ftruncate(handle, self._read + entries.nbytes)
            os.fsync(handle)
            self._inode = os.fstat(handle).st_ino
        finally:
            os.close(handle)
        write_text(self.folder / "stamps.json", json.dumps(stamps))
        self._read += entries.nbytes
        self._checked |= {(first + n) // self.per_file for n in (0, len(keys) - 1)}
        self._enter(entries)

    def _enter(self, entries: NDArray[Any]) -> None:
        """Take entries into the table; files of records that have changed are checked first."""
        if not len(entries):
            return
        rows = entries["row"]
        self._next = max(self._next, int(rows.max()) + 1)
        suspect = self._changed_files(np.unique(rows[rows >= 0] // self.per_file).tolist())
        bad: list[bytes] = []
        keys = [bytes(key) for key in entries["key"].tolist()]
        for key, row, crc in zip(keys, rows.tolist(), entries["crc"].tolist(), strict=True):
            if row < 0:
                self._rows.pop(key, None)
            elif row // self.per_file in suspect and not self._is_sound(row, crc):
                bad.append(key)
            else:
                self._rows[key] = row
        if suspect:
            with suppress(OSError, StorageError):  # a disk that may not be written is checked in every run
                self._take_back([key for key in bad if key not in self._rows])
                self._stamp_again(suspect)

    def _changed_files(self, numbers: list[int]) -> set[int]:
        """Those of some files whose size or time is not what the last writer noted."""
        stamps, changed = self._stamps(), set()
        for number in numbers:
            path = self._rows_file(number)
            if number not in self._checked and (
                not path.exists() or stamps.get(str(number)) != stamp_of(path)
            ):
                changed.add(number)
            self._checked.add(number)
        return changed

    def _is_sound(self, row: int, crc: int) -> bool:
        number, within = divmod(row, self.per_file)
        data = bytearray(self.row_bytes)
        try:
            self._fill(number, within * self.row_bytes, memoryview(data))
        except DataError:
            return False
        return zlib.crc32(data) == crc

    def _take_back(self, keys: list[bytes]) -> None:
        entries = np.zeros(len(keys), dtype=ENTRY)
        entries["row"] = MISSING
        for n, key in enumerate(keys):
            entries["key"][n] = key
        entries["check"] = checks_of(entries)
        with self._appending, (self.folder / "index").open("r+b") as file:
            whole = file.seek(0, os.SEEK_END) // ENTRY.itemsize * ENTRY.itemsize
            file.seek(whole)
            file.write(entries.tobytes())
        if self._read == whole:  # nothing of others to read before it
            self._read += entries.nbytes

    def _stamp_again(self, numbers: set[int]) -> None:
        with self._appending:
            stamps = self._stamps()
            for number in numbers:
                path = self._rows_file(number)
                stamps.pop(str(number), None)
                if path.exists():
                    stamps[str(number)] = stamp_of(path)
            write_text(self.folder / "stamps.json", json.dumps(stamps))

    def _stamps(self) -> dict[str, Any]:
        try:
            found = parse_json((self.folder / "stamps.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _stored_crcs(self) -> dict[int, int]:
        data = (self.folder / "index").read_bytes()
        entries = np.frombuffer(data, dtype=ENTRY, count=len(data) // ENTRY.itemsize)
        return dict(zip(entries["row"].tolist(), entries["crc"].tolist(), strict=True))

    def _read_shape(self) -> tuple[int, ...]:
        path = self.folder / "pack.json"
        try:
            found = parse_json(path.read_bytes())
            shape = tuple(int(side) for side in found["shape"])
            self.title = self.title or str(found.get("title", ""))
            if found["format"] != FORMAT or not shape or min(shape) < 1:
                raise ValueError("another format")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} cannot be read ({error}): remove the folder, its features are computed again."
            ) from error
        return shape

    def _take_shape(self, shape: tuple[int, ...]) -> None:
        if not self.shape:
            self.shape = shape
            about = {"format": FORMAT, "shape": shape, "type": "float16", "title": self.title}
            write_text(self.folder / "pack.json", json.dumps(about))
        if shape != self.shape:
            raise DataError(
                f"features of {shape} follow features of {self.shape} in {self.folder}: give all pictures one size."
            )

    def _fill(self, number: int, offset: int, into: memoryview) -> None:
        handle = self._files.get(number)
        if handle is None:
            handle = self._open(number)
        done = 0
        while done < len(into):
            count = os.preadv(handle, [into[done:]], offset + done)
            if count == 0:
                path = self._rows_file(number)
                raise DataError(f"{path} ends early: run again, what is missing is computed again.")
            done += count

    def _open(self, number: int) -> int:
        path = self._rows_file(number)
        with self._opening:
            if number not in self._files:
                try:
                    self._files[number] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise DataError(
                        f"{path} is gone ({error.strerror}): run again, it is computed again."
                    ) from error
            return self._files[number]

    def _rows_file(self, number: int) -> Path:
        return self.folder / f"rows-{number:06d}.f16"

    def _forget(self) -> None:
        self._close()
        self._rows, self._next, self._read, self._inode, self._checked = {}, 0, 0, 0, set()
        self.shape = ()

    def _close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files = {}

    def __del__(self) -> None:
        with suppress(Exception):
            self._close()
            if self._reading is not None:
                os.close(self._reading)

    def __getstate__(self) -> dict[str, Any]:
        own = {**self.__dict__, "_files": {}, "_reading": None}  # file numbers mean nothing elsewhere
        return {name: value for name, value in own.items() if name not in ("_appending", "_opening")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_locks()

    def _make_locks(self) -> None:
        self._appending = FileLock(self.folder / "append.lock")
        self._opening = threading.Lock()
