"""The folder of an embedded index: its lock, the connections to its catalog, the state readers share, and changes."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from filelock import FileLock, Timeout

from diptych.databases import check_files
from diptych.errors import DiptychError, IndexFault
from diptych.index.engines.embedded import catalog, checksums, connections
from diptych.index.engines.embedded.connections import (
    FILE,
    PATIENCE,
    Frozen,
    connect,
    connect_checked,
    connect_reader,
    limited,
    translating,
)
from diptych.index.engines.embedded.segments import FILES, ROW_BITS, RowLayout, append, slot_of
from diptych.index.engines.embedded.state import RowNumbers, Segment, State, read_state
from diptych.index.protocol import KINDS, Item, Kind, Vectors, is_closed, read_only
from diptych.locks import lock_at
from diptych.progress import track
from diptych.storage import create_folder, storing

LOCK = "writer.lock"
ATTEMPTS = 5  # attempts to read while a writer compacts
T = TypeVar("T")


class Store:
    """Reading within a snapshot, writing within a transaction: a pool of readers, one writer at a time.

    A change is committed when its SQLite transaction is: vectors are written and synced before the rows that refer to
    them. Write-ahead logging gives each reader a snapshot that no writer disturbs.
    """

    def __init__(self, path: Path, writable: bool) -> None:
        self.path, self._file = path, path / FILE
        self._mutex = threading.RLock()  # one write at a time within the process
        self._pool = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._lock: FileLock | None = None
        self._writer: sqlite3.Connection | None = None
        self._state: State | None = None
        try:
            with translating(path):
                self._lock = _take_lock(path) if writable else None
                catalog.check_present(path)
                checksums.check_length(self._file)
                self._identity = catalog.identity(self._file)
                if writable:
                    self._writer = connect_checked(self._file, "rw")
                    self._writer.execute("PRAGMA synchronous = FULL")
            with self.reading() as db:
                self.meta = connections.facts(db, path)
                for table in ("collections", "columns", "graphs", "segments"):
                    connections.rows(db, path, table)
                if self.meta["digest"] != checksums.small_digest(db):
                    raise checksums.damaged(path)
            self._id = self.meta["id"]
            self.layout = RowLayout(int(self.meta["dimension"]), self.meta["precision"])  # type: ignore[arg-type]
            state = self.state  # a half-copied index is refused here, not at the first query
            if writable:
                with translating(path):
                    self._remove_remains(state)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def create(path: Path, facts: dict[str, str]) -> None:
        """Write an empty index; one that is already there is refused."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "is already an index" if (path / FILE).is_file() else "exists and is not empty"
            raise IndexFault(f"{path} {what}: open it, or choose another folder.")
        base = {"format": str(connections.FORMAT), "next_segment": "1", "id": uuid4().hex}
        base |= dict.fromkeys(("generation", "epoch", "dead_sum"), "0")
        try:
            with create_folder(path) as new, translating(new), closing(connect(new / FILE, "rwc")) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.executescript(f"BEGIN IMMEDIATE; {connections.SCRIPT}")
                db.executemany("INSERT INTO meta VALUES (?, ?)", ({**base, **facts}).items())
                checksums.seal(db)
                db.execute("COMMIT")
        except FileExistsError:
            raise IndexFault(f"{path} was made by another process just now: open it.") from None

    @property
    def state(self) -> State:
        """The last committed state."""
        return self.read(lambda state, db: state)

    def read(self, answer: Callable[[State, Any], T]) -> T:
        """Ask within one snapshot; again when compaction took a file away between snapshot and mapping."""
        for attempt in range(ATTEMPTS):
            with self.reading() as db:
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
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection inside a read transaction: everything it answers is of one moment."""
        with translating(self.path):
            db = self._borrow()
            try:
                with limited(db, self._file):
                    try:
                        db.execute("BEGIN")
                        yield db
                    finally:
                        if db.in_transaction:  # SQLite ends it by itself on some failures
                            db.execute("ROLLBACK")
            finally:
                self._give_back(db)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that commits at the end, or leaves no trace, not even on a full disk."""
        with self._mutex, translating(self.path):
            db = self._writer
            if db is None:
                raise read_only(self.path)
            if catalog.identity(self._file) != self._identity:  # it writes what no longer lies there
                raise catalog.replaced(self.path)
            try:
                with limited(db, self._file):
                    db.execute("BEGIN IMMEDIATE")
                    yield db
                    db.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
                    checksums.seal(db)
                    db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                with suppress(OSError, DiptychError):  # what happened is more telling
                    self._remove_remains(self.state)
                raise

    @contextmanager
    def alone(self) -> Iterator[State]:
        """The state, which nobody else changes meanwhile."""
        with self._mutex, translating(self.path):
            yield self.state

    def drop(self, files: list[str]) -> None:
        """Delete files that the committed state no longer refers to."""
        self._state = None
        with translating(self.path):
            for name in files:
                FILES.remove(FILES.path(self.path, name))

    def shrink(self) -> None:
        """Give pages that hold nothing any more back to the file system, and empty the log if nobody reads it."""
        with self._mutex, translating(self.path):
            if self._writer is not None:
                with limited(self._writer, self._file):
                    self._writer.execute("VACUUM")
                _fold_log(self._writer)

    def size(self) -> int:
        """Bytes of vectors and catalog; SQLite's log comes and goes."""
        total = 0
        with translating(self.path):
            for file in self.path.iterdir():
                with suppress(FileNotFoundError):  # compaction may take one away meanwhile
                    total += 0 if file.name.endswith(("-wal", "-shm")) else file.lstat().st_size
        return total

    def close(self) -> None:
        """Release files and locks; idempotent. A writer folds the log into the database as far as its readers allow."""
        with self._pool:
            self._closed, self._state = True, None
            idle, self._idle = self._idle, []
            writer, self._writer = self._writer, None
            lock, self._lock = self._lock, None
        try:
            for db in idle:
                db.close()
            if writer is not None:
                # on a full disk, the log has what was acknowledged
                with closing(writer), suppress(sqlite3.Error):
                    _fold_log(writer)
        finally:
            if lock is not None:
                with translating(self.path):
                    lock.release()

    def _borrow(self) -> sqlite3.Connection:
        with self._pool:
            if self._closed:
                raise is_closed(self.path)
            old: list[sqlite3.Connection] = []
            if catalog.identity(self._file) not in (self._identity, None):  # they read what is there no more
                old, self._idle = self._idle, []
            if self._idle:
                return self._idle.pop()
        for db in old:
            db.close()
        return connect_reader(self._file)

    def _give_back(self, db: sqlite3.Connection) -> None:
        with self._pool:
            if not self._closed and not isinstance(db, Frozen):
                self._idle.append(db)
                return
        db.close()

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


def _take_lock(path: Path) -> FileLock:
    catalog.check_present(path)  # before a lock is left in a folder that is not an index
    check_files(FILES, path / FILE, changed=True)
    with storing(path):
        # another thread may close the index than opened it
        lock = lock_at(FILES, path / LOCK, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise IndexFault(
                f"{path} is being written by another process: wait until it has finished, "
                "or open it for reading."
            ) from None
    return lock


def _fold_log(writer: sqlite3.Connection) -> None:
    """Move the log into the database as far as its readers allow; whoever reads is not waited for."""
    writer.execute("PRAGMA busy_timeout = 0")
    try:
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        writer.execute(f"PRAGMA busy_timeout = {PATIENCE * 1000}")


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
    connections.check_pages(db, folder)
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
