"""Connections to the database of an index, which may come from a stranger, and SQLite's errors as sentences."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.errors import IndexFault, StorageError
from diptych.index import deadline
from diptych.index.engines.embedded import checksums, schema

FILE = "index.db"
# steps of SQLite's machine between two looks at the clock, each of which waits for the interpreter
STEPS = 1_000_000
PATIENCE = 30  # seconds that a connection waits for a lock
STEPS_ALLOWED = (
    5_000_000_000  # of one transaction, at some 50 million a second, whatever the size of the catalog ...
)
STEPS_PER_BYTE = 1000  # ... and for each byte of it: pages that lead in circles would be read for ever


class Frozen(sqlite3.Connection):
    """A connection that takes the database for immutable, which may be true for one answer only: never kept."""


def connect(path: Path, mode: str, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    """A connection that begins no transaction by itself, to a catalog of which nothing is believed.

    Functions and tables that a schema may use are those without side effects. Where Python has ``setconfig`` (from
    3.12), no statement can change the schema behind SQLite's back either.
    """
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=PATIENCE,
        isolation_level=None,
        check_same_thread=False,
        factory=kind,
    )
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    if hasattr(db, "setconfig"):
        db.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)  # type: ignore[attr-defined,unused-ignore]
    return db


def connect_checked(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to a catalog that has the tables of this format."""
    db = connect(path, mode)
    try:
        with limited(db, path):
            schema.check(db, path.parent)
        return db
    except BaseException:
        db.close()
        raise


def connect_reader(path: Path) -> sqlite3.Connection:
    """A reading connection, also where nothing can be written and SQLite cannot index its log."""
    try:
        return connect_checked(path, "ro")
    except sqlite3.Error as error:
        if not _name(error).startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_FULL")):
            raise
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size:
        raise IndexFault(
            f"{path.parent} was not closed by its last writer and cannot be written here: "
            "open it once where it is writable, or copy it to such a folder."
        )
    db = connect(path, "ro&immutable=1", Frozen)
    try:
        schema.check(db, path.parent)
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def limited(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Give what runs inside the time of its deadline, and never more steps than a sound catalog can need."""
    limit = deadline.current()
    ended = _counter(path, limit)
    db.set_progress_handler(ended, STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if _name(error) == "SQLITE_INTERRUPT":
            if limit is not None and limit.passed:
                limit.check()
            raise checksums.damaged(
                path.parent, "reading its catalog takes longer than its size explains"
            ) from error
        raise
    finally:
        db.set_progress_handler(None, 0)


def _counter(path: Path, limit: deadline.Deadline | None) -> Callable[[], bool]:
    """Whether to interrupt, asked every ``STEPS`` steps."""
    turns = 0
    most = 0

    def ended() -> bool:
        nonlocal turns, most
        turns += 1
        if turns * STEPS > most:  # a catalog grows while it is written
            size = sum(file.stat().st_size for file in (path, log_of(path)) if file.exists())
            most = STEPS_ALLOWED + STEPS_PER_BYTE * size
        return turns * STEPS > most or (limit is not None and limit.passed)

    return ended


def log_of(path: Path) -> Path:
    """The file of SQLite's log."""
    return path.with_name(path.name + "-wal")


@contextmanager
def translating(folder: Path) -> Iterator[None]:
    """Turn SQLite's errors into one sentence each."""
    try:
        yield
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise checksums.damaged(folder, str(error)) from error
    except (
        sqlite3.IntegrityError
    ) as error:  # ids are compared before they are written: two rows claim one place
        raise checksums.damaged(folder, str(error)) from error
    except sqlite3.Error as error:
        name = _name(error)
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            raise StorageError(
                f"the disk is full or failing while using {folder} ({error}): free some space and run again; "
                "what was saved is intact."
            ) from error
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            raise StorageError(
                f"{folder} cannot be written ({error}): choose a folder you may write."
            ) from error
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise IndexFault(
                f"{folder} is being written by another process: try again when it has finished."
            ) from error
        if isinstance(error, sqlite3.ProgrammingError):
            raise
        raise IndexFault(
            f"{folder / FILE} is damaged or half copied ({error}): copy the whole index again, "
            "or index the collection again."
        ) from error


def _name(error: sqlite3.Error) -> str:
    """SQLite's name of an error, empty where it has none."""
    return getattr(error, "sqlite_errorname", "") or ""
