"""The database of an index, which may come from a stranger: connections, its tables, SQLite's errors as sentences.

SQLite keeps each ``CREATE`` statement as it was written, so two catalogs of one format have the same statements: a
view in the place of a table, a trigger, a column that computes something or another collation is another statement.
Rows are read with ``rows`` only, which checks the type and range of every value, and items with ``catalog``.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from diptych import databases
from diptych.databases import STEPS
from diptych.errors import IndexFault, StorageError
from diptych.index import deadline
from diptych.index.base import Index
from diptych.index.engines.embedded import checksums
from diptych.index.engines.embedded.checksums import damaged
from diptych.index.engines.embedded.segments import ANEW, FILES
from diptych.index.protocol import KINDS, METADATA_KINDS, PRECISIONS, other_format
from diptych.storage import parse_json

FORMAT = 2  # version of the index folder; raised when an old folder can no longer be read
_TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE segments(
  number INTEGER PRIMARY KEY, kind TEXT NOT NULL, rows INTEGER NOT NULL, file TEXT NOT NULL);
CREATE TABLE blocks(
  segment INTEGER, start INTEGER, rows INTEGER NOT NULL, checksum INTEGER NOT NULL,
  PRIMARY KEY(segment, start)) WITHOUT ROWID;
CREATE TABLE items(
  slot INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, path TEXT NOT NULL,
  text TEXT NOT NULL, image_id TEXT NOT NULL, metadata TEXT NOT NULL, content TEXT NOT NULL,
  collection INTEGER NOT NULL, checksum INTEGER NOT NULL, metadata_checksum INTEGER NOT NULL);
CREATE INDEX texts_of_image ON items(image_id) WHERE image_id != '';
CREATE TABLE thumbnails(slot INTEGER PRIMARY KEY, jpeg BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE dead(serial INTEGER PRIMARY KEY, slot INTEGER NOT NULL UNIQUE);
CREATE TABLE columns(name TEXT PRIMARY KEY, kinds TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE collections(number INTEGER PRIMARY KEY, name TEXT NOT NULL, root TEXT NOT NULL);
CREATE TABLE graphs(
  kind TEXT PRIMARY KEY, file TEXT NOT NULL, rows INTEGER NOT NULL, size INTEGER NOT NULL,
  checksum INTEGER NOT NULL, covers TEXT NOT NULL) WITHOUT ROWID;
"""
# one full-text table a kind: document frequencies of images do not mix with those of their single texts
_WORDS = """
CREATE VIEW {kind}_texts AS SELECT slot, text FROM items WHERE kind = '{kind}';
CREATE VIRTUAL TABLE {kind}_words USING fts5(text, content='{kind}_texts', content_rowid='slot',
  tokenize='porter unicode61 remove_diacritics 2');
"""
SCRIPT = _TABLES + "".join(_WORDS.format(kind=kind) for kind in KINDS)
_FACTS = ("created", "dead_sum", "digest", "fingerprint", "id", "model", "version")  # any text
_NUMBER = re.compile(r"[0-9]{1,18}")
MAX_ROWS = (1 << 32) - 1  # of a segment: ``ROW_BITS`` of a slot
MAX_SEGMENT = (1 << 31) - 1  # its number, the other bits of a slot
Test = Callable[[Any], bool]


def check(db: sqlite3.Connection, folder: Path) -> None:
    """Raise unless a catalog has exactly the tables, indexes and views of this format; nothing else is read of it."""
    found = _objects(db)
    if found == _expected():
        return
    meta = ("table", "meta", "meta")
    if found.get(meta) == _expected()[meta] and not any(kind == "trigger" for kind, _, _ in found):
        query = "SELECT value FROM meta WHERE key = 'format'"
        check_format(folder, db.execute(query).fetchone())
    odd = {key for key, _ in set(found.items()) ^ set(_expected().items())}
    kind, name, _ = min(odd, key=lambda key: (key in _expected(), key[0] == "index", key))
    what = f"the {kind} {name[:60]!a} is not one that diptych makes, or it is missing"
    raise damaged(folder / "index.db", what)


def check_format(folder: Path, found: tuple[Any, ...] | None) -> None:
    """Raise for an index of another version's format."""
    if found is None or found[0] != str(FORMAT):
        raise other_format(folder, f"{str(found and found[0])[:20]!a}", FORMAT)


@cache
def _expected() -> dict[tuple[str, str, str], str]:
    db = sqlite3.connect(":memory:")
    try:
        db.executescript(SCRIPT)
        return _objects(db)
    finally:
        db.close()


def _objects(db: sqlite3.Connection) -> dict[tuple[str, str, str], str]:
    """(type, name, table) → statement of all that a catalog defines, blanks and quotes apart."""
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100"
    found: dict[tuple[str, str, str], str] = {}
    for kind, name, table, sql in db.execute(query):
        key = str(kind), str(name), str(table)
        # SQLite lets an index stand there any number of times: what comes behind the limit would not be seen
        found[key] = "twice" if key in found else " ".join(str(sql or "").replace("'", '"').split())
    return found


def whole(low: int, high: int) -> Test:
    """A test for an integer from one number to another."""
    return lambda value: type(value) is int and low <= value <= high


def text(value: Any) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def kind(value: Any) -> bool:
    """Whether a value names a kind of item."""
    return value in KINDS


def kinds_of_value(value: Any) -> bool:
    """Whether a value is a list of kinds of metadata as JSON."""
    try:
        found = parse_json(value) if isinstance(value, str) else None
    except ValueError:
        return False
    return isinstance(found, list) and all(one in METADATA_KINDS for one in found)


_SIZE, _SUM, _COUNT = whole(0, (1 << 63) - 1), whole(0, (1 << 32) - 1), whole(0, MAX_ROWS)
_ITEM = [int, *[str] * 7, *[int] * 3]
_ROWS: dict[str, tuple[str, tuple[Test, ...]]] = {
    "meta": ("SELECT key, value FROM meta", (text, text)),
    "segments": (
        "SELECT number, kind, rows, file FROM segments ORDER BY number",
        # the name is checked with its own sentence
        (whole(0, MAX_SEGMENT), kind, _COUNT, lambda value: True),
    ),
    "blocks": (
        "SELECT start, rows, checksum FROM blocks WHERE segment = ? AND start >= ? ORDER BY start",
        (_COUNT, whole(1, MAX_ROWS), _SUM),
    ),
    "graphs": (
        "SELECT kind, file, rows, size, covers, checksum FROM graphs",
        (kind, lambda value: True, _SIZE, _SIZE, text, _SUM),
    ),
    "collections": ("SELECT number, name, root FROM collections ORDER BY number", (_COUNT, text, text)),
    "columns": ("SELECT name, kinds FROM columns ORDER BY name", (text, kinds_of_value)),
    "dead": ("SELECT slot FROM dead WHERE serial > ?", (_SIZE,)),
    "items": (
        "SELECT id, content FROM items WHERE collection = ?1 AND (?2 IS NULL OR kind = ?2)",
        (text, text),
    ),
}


def rows(db: sqlite3.Connection, folder: Path, table: str, values: tuple[Any, ...] = ()) -> list[Any]:
    """All rows of a table, or those that ``values`` choose, each value of its type and in its range."""
    query, tests = _ROWS[table]
    most = databases.size_on_disk(folder / FILE) // databases.ROW
    found = db.execute(query, values).fetchmany(most + 1)
    if len(found) > most:  # pages that several others lead to
        raise damaged(folder, f"more {table} in its catalog than it has room for")
    for row in found:
        if not all(test(value) for test, value in zip(tests, row, strict=True)):
            raise damaged(folder, f"a row of {table} in its catalog, {ascii(row)[:80]}")
    return found


def check_pages(db: sqlite3.Connection, folder: Path) -> None:
    """Raise unless each page of a catalog belongs to one table: a copy of all its rows might never end."""
    found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    if found != "ok" and "FTS5" not in found:  # from SQLite 3.44; the full text is written anew
        raise damaged(folder, " ".join(found.split())[:100])


def is_item(row: tuple[Any, ...]) -> bool:
    """Whether an item's values are of their types and in their ranges, its checksums apart: each search asks this."""
    return [*map(type, row)] == _ITEM and row[0] >= 0 and row[2] in KINDS and 0 <= row[8] <= MAX_ROWS


def facts(db: sqlite3.Connection, folder: Path) -> dict[str, str]:
    """All that the index says of itself; what it must say is there, and numbers are numbers."""
    found: dict[str, str] = dict(rows(db, folder, "meta"))
    check_format(folder, (found.get("format"),))
    for name in ("dimension", "generation", "epoch", "next_segment"):
        number(folder, found, name)
    wrong = next((name for name in _FACTS if name not in found), None)
    if found.get("precision") not in PRECISIONS:
        wrong = "precision"
    elif not 1 <= int(found["dimension"]) <= Index.most_dimensions:
        wrong = "dimension"
    elif int(found["next_segment"]) > MAX_SEGMENT // 2:  # half of the numbers are left to be used
        wrong = "next_segment"
    if wrong is not None:
        raise damaged(folder, f"the fact '{wrong}' of its catalog, {ascii(found.get(wrong))[:40]}")
    return found


def number(folder: Path, found: dict[str, str], name: str) -> int:
    """A fact that is a number."""
    value = found.get(name, "")
    if not _NUMBER.fullmatch(value):
        raise damaged(folder, f"the fact '{name}' of its catalog, {ascii(value)[:40]}")
    return int(value)


FILE = "index.db"
PATIENCE = 30  # seconds that a connection waits for a lock


class Frozen(sqlite3.Connection):
    """A connection that takes the database for immutable, which may be true for one answer only: never kept."""


def connect(path: Path, mode: str, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    """A connection that begins no transaction by itself, to a catalog of which nothing is believed, not even its files.

    Functions and tables that a schema may use are those without side effects. Where Python has ``setconfig`` (from
    3.12), no statement can change the schema behind SQLite's back either.
    """
    databases.check_files(FILES, path, changed=mode.startswith("rw"))
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


def connect_checked(
    path: Path, mode: str, kind: type[sqlite3.Connection] = sqlite3.Connection
) -> sqlite3.Connection:
    """A connection to a catalog that has the tables of this format."""
    db = connect(path, mode, kind)
    try:
        with limited(db, path):
            check(db, path.parent)
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
    if checksums.has_log(path):
        raise IndexFault(
            f"{path.parent} was not closed by its last writer and cannot be written here: "
            "open it once where it is writable, or copy it to such a folder."
        )
    return connect_checked(path, "ro&immutable=1", Frozen)


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
            raise damaged(path.parent, "reading its catalog takes longer than its size explains") from error
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
            most = databases.most_steps(path)
        return turns * STEPS > most or (limit is not None and limit.passed)

    return ended


@contextmanager
def translating(folder: Path) -> Iterator[None]:
    """Turn the errors of SQLite and of the system into one sentence each."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be used ({error.strerror or error}): check the disk and who may read it, and try again; "
            "what was saved is intact."
        ) from error
    except MemoryError as error:  # also SQLite's, where the full text names a length that it has not
        raise StorageError(
            f"{folder} needs more memory than there is: end other programs, or index the collection again."
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise damaged(folder, str(error)) from error
    except sqlite3.IntegrityError as error:
        # ids are compared before they are written: two rows claim one place
        raise damaged(folder, str(error)) from error
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
        raise IndexFault(f"{folder / FILE} is damaged or half copied ({error}): {ANEW}") from error


def _name(error: sqlite3.Error) -> str:
    """SQLite's name of an error, empty where it has none."""
    return getattr(error, "sqlite_errorname", "") or ""
