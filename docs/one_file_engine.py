"""An index in one SQLite file, onefile:///path/to/photos.db: an engine for Diptych in a package of its own.

The vectors lie in the file as float32 and are held in memory once they were read; every search scores all of them.
What is not written here (samples, near-duplicates, common values, BM25) is what ``Index`` makes of these operations.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from diptych.errors import DiptychError, IndexFault
from diptych.index.base import Index
from diptych.index.capabilities import View, spread
from diptych.index.protocol import (
    Collection,
    Hits,
    Item,
    Kind,
    Vectors,
    grown_columns,
    held_kinds,
    is_closed,
    kind_of,
    next_collection,
    record,
)
from diptych.index.query.filters import ITEM_COLUMNS, Filter, matches, parse_filter
from diptych.index.scoring import Candidates, best_hits

SCHEME = "onefile://"
TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE collections(number INTEGER PRIMARY KEY, name TEXT NOT NULL, root TEXT NOT NULL);
CREATE TABLE items(
  serial INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, image_id TEXT NOT NULL,
  collection INTEGER NOT NULL, content TEXT NOT NULL, item TEXT NOT NULL, thumbnail BLOB, vector BLOB NOT NULL);
CREATE INDEX texts_of_image ON items(image_id) WHERE image_id != '';
"""
T = TypeVar("T")


class Held:
    """All items of one generation in memory, by position, in the order in which they were added."""

    is_mapped = True

    def __init__(self, db: sqlite3.Connection, generation: int, dimension: int) -> None:
        self.generation = generation
        rows = db.execute("SELECT serial, item, vector FROM items ORDER BY serial").fetchall()
        self.serials = np.array([row[0] for row in rows], np.int64)
        self.all_items = [Item(*json.loads(row[1])) for row in rows]
        self.all_rows: Vectors = np.frombuffer(b"".join(row[2] for row in rows), "<f4").reshape(-1, dimension)
        self.positions = {item.id: n for n, item in enumerate(self.all_items)}
        self.columns = held_kinds(
            (name, kind_of(value)) for item in self.all_items for name, value in item.metadata.items()
        )

    def keys(self, kind: Kind | None, filter: str | Filter | None, size: int | None = None) -> Any:
        """The positions of the items that pass."""
        found = [n for n, item in enumerate(self.all_items) if kind in (None, item.kind)]
        if filter is not None:
            known = {name: sorted(kinds) for name, kinds in self.columns.items()}
            tree = parse_filter(filter, known)
            found = [n for n in found if matches(tree, self.row(n))]
        return np.array(found, np.int64)[spread(len(found), size)]

    def row(self, position: int) -> dict[str, Any]:
        """What a filter reads of an item: its metadata, which hides its own columns of the same name."""
        item = self.all_items[position]
        own = {name: getattr(item, name) or None for name in ITEM_COLUMNS if name not in self.columns}
        return {**own, **item.metadata}

    def items(self, keys: Any) -> list[Item]:
        """The items at some positions."""
        return [self.all_items[n] for n in keys]

    def rows(self, keys: Any) -> Vectors:
        """The vectors at some positions."""
        return self.all_rows[np.asarray(keys, np.int64)]


class OneFileIndex(Index):
    """An index in one SQLite file: writers take turns, readers see the last committed change."""

    engine = "onefile"
    precisions = ("float32",)

    def __init__(self, place: str, *, writable: bool = False) -> None:
        self.path, self._writable = place, writable
        if not self.exists(place):
            raise IndexFault(f"there is no index at {place}: index a collection there first.")
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = _connect(place)
        self._held: Held | None = None
        with self._reading() as db:
            self._facts = dict(db.execute("SELECT key, value FROM meta").fetchall())

    @staticmethod
    def exists(place: str) -> bool:
        return _file(place).is_file()

    @classmethod
    def _make(cls, place: str, facts: dict[str, str]) -> None:
        if cls.exists(place):
            raise IndexFault(f"{place} is already an index: open it, or choose another file.")
        with closing(_connect(place)) as db:
            db.executescript(f"BEGIN; {TABLES}")
            db.executemany("INSERT INTO meta VALUES (?, ?)", {**facts, "generation": "0"}.items())
            db.execute("COMMIT")

    def close(self) -> None:
        with self._lock:
            db, self._db, self._held = self._db, None, None
        if db is not None:
            db.close()

    # ------------------------------------------------------------------ transactions

    def _reading(self) -> Transaction:
        return Transaction(self, "BEGIN")

    def _writing(self) -> Transaction:
        self._check_writable()
        return Transaction(self, "BEGIN IMMEDIATE")

    def _moment(self) -> Held:
        """All items as they are now; read again when somebody changed them."""
        with self._reading() as db:
            generation = _generation(db)
            if self._held is None or self._held.generation != generation:
                self._held = Held(db, generation, self.dimension)
            return self._held

    def _view(self, read: Callable[[View], T]) -> T:
        return read(self._moment())

    @property
    def generation(self) -> int:
        with self._reading() as db:
            return _generation(db)

    # ------------------------------------------------------------------ changing

    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        new = []
        for item, row in zip(items, rows, strict=True):
            fields = list(record(item))
            fields[5] = json.loads(fields[5])
            written = json.dumps(fields, ensure_ascii=False)
            vector = row.astype("<f4").tobytes()
            new.append(
                (
                    item.id,
                    item.kind,
                    item.image_id,
                    item.collection,
                    item.content,
                    written,
                    item.thumbnail,
                    vector,
                )
            )
        held: dict[str, set[str]] = {name: set() for item in items for name in item.metadata}
        with self._writing() as db:
            grown_columns(self._moment().columns, held)
            for item in items:
                (there,) = db.execute("SELECT count(*) FROM items WHERE id = ?", (item.id,)).fetchone()
                if there and not replace:
                    raise self._already(item.id)
                if there:
                    db.execute("DELETE FROM items WHERE id = ?", (item.id,))
            names = "id, kind, image_id, collection, content, item, thumbnail, vector"
            db.executemany(f"INSERT INTO items({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", new)

    def delete(self, ids: Sequence[str]) -> int:
        with self._writing() as db:
            found = [id for id in ids if id in self._moment().positions]
            for id in found:
                db.execute("DELETE FROM items WHERE id = ? OR (image_id = ? AND image_id != '')", (id, id))
            return len(found)

    def collections(self) -> tuple[Collection, ...]:
        with self._reading() as db:
            rows = db.execute("SELECT number, name, root FROM collections ORDER BY number").fetchall()
        return tuple(Collection(*row) for row in rows)

    def _add_collection(self, name: str, root: str) -> Collection:
        with self._writing() as db:
            found = next_collection(self.collections(), name, root)
            db.execute("INSERT OR IGNORE INTO collections VALUES (?, ?, ?)", (found.number, name, root))
        return found

    def move_collection(self, number: int, name: str, root: str) -> None:
        with self._writing() as db:
            db.execute("UPDATE collections SET name = ?, root = ? WHERE number = ?", (name, root, number))

    def forget_collection(self, number: int) -> None:
        query = "DELETE FROM collections WHERE number = ?1 AND NOT EXISTS (SELECT 1 FROM items WHERE collection = ?1)"
        with self._writing() as db:
            db.execute(query, (number,))

    # ------------------------------------------------------------------ reading

    def _about(self) -> dict[str, Any]:
        held = self._moment()
        columns = {name: tuple(sorted(kinds)) for name, kinds in sorted(held.columns.items())}
        return {
            "size": _file(str(self.path)).stat().st_size,
            "columns": columns,
        }

    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        return len(self._moment().keys(kind, filter))

    def get(self, ids: Sequence[str]) -> list[Item | None]:
        held = self._moment()
        return [held.all_items[held.positions[id]] if id in held.positions else None for id in ids]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        held = self._moment()
        self._check_present(ids, held.positions)
        return held.rows([held.positions[id] for id in ids])

    def thumbnail(self, id: str) -> bytes | None:
        with self._reading() as db:
            row = db.execute("SELECT thumbnail FROM items WHERE id = ?", (id,)).fetchone()
        return None if row is None else row[0]

    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        for item in self._moment().all_items:
            if item.collection == collection and kind in (None, item.kind):
                yield item.id, item.content

    def _nearest(
        self, queries: Vectors, k: int, kind: Kind | None, filter: str | Filter | None, exact: bool | None
    ) -> list[Hits]:
        if exact is False and filter is None:
            raise self._no_graph(kind)
        held = self._moment()
        keys = held.keys(kind, filter)
        rows = held.rows(keys)

        def find(some: Vectors, count: int) -> list[Candidates]:
            found = []
            for query in some:
                best = keys[np.argsort(-(rows @ query), kind="stable")[:count]]
                found.append(
                    Candidates(held.items(best), held.serials[best].tolist(), held.rows(best), query)
                )
            return found

        return best_hits(queries, k, find, exact=True)

    def verify(self, *, show_progress: bool = False) -> list[str]:
        with self._reading() as db:
            faults = [row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        return [f"{self.path} is damaged: {fault}." for fault in faults]


class Transaction:
    """A transaction of an index: committed at the end of a ``with`` block, or without trace after an error."""

    def __init__(self, index: OneFileIndex, begin: str) -> None:
        self.index, self.begin = index, begin

    def __enter__(self) -> sqlite3.Connection:
        self.index._lock.acquire()
        db = self.index._db
        try:
            if db is None:
                raise is_closed(self.index.path)
            self.nested = db.in_transaction
            if not self.nested:
                db.execute(self.begin)
        except BaseException as error:
            self.index._lock.release()
            raise self._told(error) from error
        return db

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        db = self.index._db
        try:
            if db is None or self.nested:
                return
            if error is None and self.begin != "BEGIN":
                db.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
            db.execute("COMMIT" if error is None else "ROLLBACK")
        finally:
            self.index._lock.release()
        if isinstance(error, sqlite3.Error):
            raise self._told(error) from error

    def _told(self, error: BaseException) -> BaseException:
        """SQLite's error as one sentence."""
        if isinstance(error, DiptychError) or not isinstance(error, sqlite3.Error):
            return error
        return IndexFault(f"{self.index.path} cannot be used ({error}): check the file, and try again.")


def _connect(place: str) -> sqlite3.Connection:
    return sqlite3.connect(_file(place), timeout=30, isolation_level=None, check_same_thread=False)


def _file(place: str) -> Path:
    return Path(place.removeprefix(SCHEME)).expanduser()


def _generation(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()[0])
