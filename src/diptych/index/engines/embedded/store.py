"""The folder of an embedded index: its lock, its catalog, the state readers share, and changes.

Each change is one catalog transaction: vectors first, then what names them.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from filelock import FileLock, Timeout

from diptych.errors import DiptychError, IndexFault, SettingsError, StorageError
from diptych.index.engines.embedded import catalog, checksums, connections
from diptych.index.engines.embedded.catalog import Catalog
from diptych.index.engines.embedded.connections import FILE, translating
from diptych.index.engines.embedded.segments import FILES, ROW_BITS, RowLayout, append, slot_of
from diptych.index.engines.embedded.state import RowNumbers, Segment, State, read_state
from diptych.index.protocol import KINDS, PRECISIONS, Item, Kind, Vectors
from diptych.progress import track
from diptych.storage import create_folder, storing

LOCK = "writer.lock"
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
ATTEMPTS = 5  # attempts to read while a writer compacts
T = TypeVar("T")


class Store:
    """Reading within a snapshot, writing within a transaction, one writer at a time."""

    def __init__(self, path: Path, writable: bool) -> None:
        self.path = path
        self._mutex = threading.RLock()  # one write at a time within the process
        self._state: State | None = None
        with translating(path), ExitStack() as opened:
            self._lock = _take_lock(path) if writable else None
            if self._lock is not None:
                opened.callback(self._lock.release)
            self._catalog = Catalog(path, writable)
            opened.callback(self._catalog.close)
            with self._catalog.reading() as db:
                self.meta = connections.facts(db, path)
                if self.meta["digest"] != checksums.small_digest(db):
                    raise checksums.damaged(path)
                for table in ("collections", "columns"):
                    connections.rows(db, path, table)
            self._id = self.meta["id"]
            self.layout = RowLayout(int(self.meta["dimension"]), self.meta["precision"])  # type: ignore[arg-type]
            state = self.state  # a half-copied index is refused here, not at the first query
            if writable:
                self._remove_remains(state)
            opened.pop_all()

    @staticmethod
    def create(path: Path, facts: dict[str, str]) -> None:
        """Write an empty index; one that is already there is refused."""
        dimension, precision = int(facts["dimension"]), facts["precision"]
        if dimension < 1:
            raise SettingsError(f"an index needs vectors of at least 1 dimension, not {dimension}.")
        if precision not in PRECISIONS:
            raise SettingsError(f"precision '{precision}' is unknown: choose {', '.join(PRECISIONS)}.")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "is already an index" if (path / FILE).is_file() else "exists and is not empty"
            raise IndexFault(f"{path} {what}: open it, or choose another folder.")
        try:
            with create_folder(path) as new:
                Catalog.create(new, {**facts, "id": uuid4().hex})
        except FileExistsError:
            raise IndexFault(f"{path} was made by another process just now: open it.") from None

    @property
    def state(self) -> State:
        """The last committed state."""
        return self.read(lambda state, db: state)

    def read(self, answer: Callable[[State, Any], T]) -> T:
        """Ask within one snapshot; again when compaction took a file away between snapshot and mapping."""
        for attempt in range(ATTEMPTS):
            with self._catalog.reading() as db:
                try:
                    state = read_state(db, self.path, self.layout, self._id, self._state)
                except IndexFault:
                    if attempt == ATTEMPTS - 1:
                        raise
                    continue
                self._state = state
                return answer(state, db)
        raise AssertionError("unreachable")

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """A transaction that commits at the end, or leaves no trace, not even on a full disk."""
        with self._mutex:
            try:
                with self._catalog.writing() as db:
                    yield db
            except BaseException:
                with suppress(OSError, DiptychError):  # what happened is more telling
                    self._remove_remains(self.state)
                raise

    @contextmanager
    def alone(self) -> Iterator[State]:
        """The state, which nobody else changes meanwhile."""
        with self._mutex:
            yield self.state

    def drop(self, files: list[str]) -> None:
        """Delete files that the committed state no longer refers to."""
        self._state = None
        with translating(self.path):
            for name in files:
                FILES.remove(FILES.path(self.path, name))

    def shrink(self) -> None:
        """Give the space of removed rows in the catalog back to the file system."""
        with self._mutex:
            self._catalog.shrink()

    def size(self) -> int:
        """Bytes of vectors and catalog; SQLite's log comes and goes."""
        total = 0
        with translating(self.path):
            for file in self.path.iterdir():
                with suppress(FileNotFoundError):  # compaction may take one away meanwhile
                    total += 0 if file.name.endswith(("-wal", "-shm")) else file.lstat().st_size
        return total

    def close(self) -> None:
        """Release files and locks; idempotent."""
        try:
            self._catalog.close()
        finally:
            self._state = None
            if self._lock is not None:
                with translating(self.path):
                    self._lock.release()
                self._lock = None

    def _remove_remains(self, state: State) -> None:
        """Delete files and rows that no committed state refers to: the remains of an unfinished operation."""
        kept = {s.file for s in state.segments} | {graph.file for graph in state.graphs}
        found = [*self.path.glob("vectors-*"), *self.path.glob("graph-*")]
        self.drop([file.name for file in found if FILES.names.fullmatch(file.name) and file.name not in kept])
        for segment in state.segments:
            file, size = FILES.path(self.path, segment.file), len(segment) * self.layout.row_bytes
            if file.exists() and file.stat().st_size > size:
                handle = FILES.open(file, os.O_RDWR)
                try:
                    os.ftruncate(handle, size)
                finally:
                    os.close(handle)


def _check_locks(path: Path) -> None:
    """Raise an ``OSError`` where the system has no locks: filelock would take an old file for a lock that is held."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    handle = FILES.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)  # as harmless as asking gets
    finally:
        os.close(handle)


def _take_lock(path: Path) -> FileLock:
    catalog.check_present(path)  # before a lock is left in a folder that is not an index
    FILES.check(path / LOCK)
    # an index may be closed by another thread than opened it
    lock = FileLock(path / LOCK, thread_local=False)
    with storing(path):
        try:
            _check_locks(path / LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            raise IndexFault(
                f"{path} is being written by another process: wait until it has finished, "
                "or open it for reading."
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise StorageError(
                f"{path} is on a file system without locks ({os.strerror(error.errno)}), so two writers could harm "
                "each other: choose a folder on another one."
            ) from error
    return lock


PIECE = 1 << 25  # bytes copied at once while compacting

Moves = dict[Kind, RowNumbers]
"""Kind → (n, 2) of new and old slots: where compaction put the rows of a kind, in the order of both."""


def insert(
    db: sqlite3.Connection, folder: Path, layout: RowLayout, items: Sequence[Item], rows: Vectors
) -> None:
    """Store new items: vectors are on disk when this returns, the rest when the transaction commits."""
    for kind in KINDS:
        places = [n for n, item in enumerate(items) if item.kind == kind]
        if places:
            packed = layout.pack(rows[places])
            slots = [slot for piece in _append(db, folder, layout, kind, packed) for slot in piece]
            catalog.insert_items(db, [items[n] for n in places], slots)
    catalog.record_columns(db, folder, items)


def remove(db: sqlite3.Connection, ids: Sequence[str]) -> int:
    """Remove items by id, and the texts of removed images; how many of the ids were there."""
    slots = catalog.slots_of(db, ids)
    catalog.remove_slots(db, slots.values())
    linked = db.execute(
        "SELECT slot FROM items WHERE image_id != '' AND image_id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(slots)),),
    ).fetchall()
    catalog.remove_slots(db, [slot for (slot,) in linked])
    return len(slots)


def compact(
    db: sqlite3.Connection, folder: Path, layout: RowLayout, state: State, show_progress: bool = False
) -> tuple[list[Segment], Moves]:
    """Copy the rows that are left into new segments; the old ones, which are returned, may go once committed."""
    old: list[Segment] = []
    moves: Moves = {}
    for kind in KINDS:
        # from the first that has room on, full ones too: behind the others, its rows would change their order
        whole = lambda s: not len(s.gone) and len(s) >= layout.capacity  # noqa: E731
        segments = list(dropwhile(whole, state.of_kind(kind)))
        if not segments or (len(segments) == 1 and not len(segments[0].gone)):
            continue
        _new_segment(db, layout, kind)
        pieces = track(segments, f"segments of {kind}s", None, show_progress)
        moved = [pairs for segment in pieces for pairs in _move(db, folder, layout, segment)]
        moves[kind] = np.concatenate([np.zeros((0, 2), np.int64), *moved])
        for segment in segments:
            span = (slot_of(segment.number, 0), slot_of(segment.number + 1, 0))
            db.execute("DELETE FROM segments WHERE number = ?", (segment.number,))
            db.execute("DELETE FROM blocks WHERE segment = ?", (segment.number,))
            db.execute("DELETE FROM dead WHERE slot >= ? AND slot < ?", span)
        db.execute("DELETE FROM segments WHERE rows = 0")
        db.execute(f"INSERT INTO {kind}_words({kind}_words) VALUES ('rebuild')")
        old += segments
    checksums.recount_dead(db)
    if old:
        db.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
    return old, moves


def _move(db: sqlite3.Connection, folder: Path, layout: RowLayout, segment: Segment) -> Iterator[RowNumbers]:
    """Copy what is left of a segment behind the newest one of its kind; (n, 2) of new and old slots, in pieces."""
    step = max(1, PIECE // layout.row_bytes)
    live = segment.live_rows
    for start in range(0, len(live), step):
        rows = live[start : start + step]
        slots = [
            s for piece in _append(db, folder, layout, segment.kind, segment.rows.take(rows)) for s in piece
        ]
        pairs = list(zip(slots, (rows + (segment.number << ROW_BITS)).tolist(), strict=True))
        checksums.move(db, pairs)
        yield np.array(pairs, np.int64)


def _append(
    db: sqlite3.Connection, folder: Path, layout: RowLayout, kind: Kind, packed: np.ndarray
) -> list[range]:
    """Write stored rows to the last segment of a kind and to new ones as it fills; their slots."""
    slots = []
    while len(packed):
        last = db.execute(
            "SELECT number, rows, file FROM segments WHERE kind = ? ORDER BY number DESC LIMIT 1", (kind,)
        ).fetchone()
        if last is None or last[1] >= layout.capacity:
            last = _new_segment(db, layout, kind)
        number, committed, file = last
        piece = packed[: layout.capacity - committed]
        checksum = append(FILES.path(folder, file), layout, committed, piece)
        db.execute("INSERT INTO blocks VALUES (?, ?, ?, ?)", (number, committed, len(piece), checksum))
        db.execute("UPDATE segments SET rows = rows + ? WHERE number = ?", (len(piece), number))
        slots.append(range(slot_of(number, committed), slot_of(number, committed + len(piece))))
        packed = packed[len(piece) :]
    return slots


def _new_segment(db: sqlite3.Connection, layout: RowLayout, kind: Kind) -> tuple[int, int, str]:
    """Numbers are never used twice: a reader with an old state cannot take one file for another."""
    number = int(db.execute("SELECT value FROM meta WHERE key = 'next_segment'").fetchone()[0])
    file = layout.file(number, kind)
    db.execute("UPDATE meta SET value = value + 1 WHERE key = 'next_segment'")
    db.execute("INSERT INTO segments VALUES (?, ?, 0, ?)", (number, kind, file))
    return number, 0, file
