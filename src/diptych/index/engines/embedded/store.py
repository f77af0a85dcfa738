"""The folder of an embedded index: its lock, its catalog, and the state readers share."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from filelock import FileLock, Timeout

from diptych.errors import DiptychError, IndexFault, SettingsError, StorageError
from diptych.index.base import new_facts
from diptych.index.engines.embedded import catalog, checksums, schema
from diptych.index.engines.embedded.catalog import Catalog
from diptych.index.engines.embedded.connections import FILE
from diptych.index.engines.embedded.segments import FILES, RowLayout
from diptych.index.engines.embedded.state import State, read_state
from diptych.index.protocol import PRECISIONS, Precision
from diptych.storage import create_folder, storing

LOCK = "writer.lock"
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
ATTEMPTS = 5  # attempts to read while a writer compacts
T = TypeVar("T")


class Store:
    """Reading within a snapshot, writing within a transaction, one writer at a time."""

    def __init__(self, path: Path, writable: bool) -> None:
        self.path = path
        self._lock = _take_lock(path) if writable else None
        self._mutex = threading.RLock()  # one write at a time within the process
        self._state: State | None = None
        try:
            self._catalog = Catalog(path, writable)
            try:
                with self._catalog.reading() as db:
                    self.meta = schema.facts(db, path)
                    if self.meta["digest"] != checksums.small_digest(db):
                        raise checksums.damaged(path)
                    for table in ("collections", "columns"):
                        schema.rows(db, path, table)
                self._id = self.meta["id"]
                self.layout = RowLayout(int(self.meta["dimension"]), self.meta["precision"])  # type: ignore[arg-type]
                state = self.state  # a half-copied index is refused here, not at the first query
                if writable:
                    self._remove_remains(state)
            except BaseException:
                self._catalog.close()
                raise
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    @staticmethod
    def create(path: Path, dimension: int, precision: Precision, model: str, fingerprint: str) -> None:
        """Write an empty index; one that is already there is refused."""
        if dimension < 1:
            raise SettingsError(f"an index needs vectors of at least 1 dimension, not {dimension}.")
        if precision not in PRECISIONS:
            raise SettingsError(f"precision '{precision}' is unknown: choose {', '.join(PRECISIONS)}.")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "is already an index" if (path / FILE).is_file() else "exists and is not empty"
            raise IndexFault(f"{path} {what}: open it, or choose another folder.")
        try:
            with create_folder(path) as new:
                facts = new_facts(dimension, precision, model, fingerprint)
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
        for name in files:
            FILES.path(self.path, name).unlink(missing_ok=True)

    def shrink(self) -> None:
        """Give the space of removed rows in the catalog back to the file system."""
        with self._mutex:
            self._catalog.shrink()

    def size(self) -> int:
        """Bytes of vectors and catalog; SQLite's log comes and goes."""
        total = 0
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
