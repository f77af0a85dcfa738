"""Local features of indexed images, in a file beside the index: what re-ranking reads instead of encoding again."""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych.databases import STEPS, check_files, most_steps
from diptych.entries import CACHE
from diptych.errors import IndexFault, SettingsError, StorageError
from diptych.storage import expanded, storing

SUFFIX = ".features"  # behind the name of the index
_LAYOUT = """CREATE TABLE features (
  model text not null, id text not null, content text not null, elements integer not null, data blob not null,
  primary key (model, id)
) without rowid"""
DISK = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_BUSY", "SQLITE_LOCKED")
_SCHEMA = [("table", "features", _LAYOUT)]


def features_place(index: str | Path) -> Path:
    """The file of an index on disk; an index in a database has none."""
    if "://" in str(index):
        raise SettingsError(
            "local features lie in a file beside an index folder, and this index is in a database: leave out "
            "--local_features, and re-ranking computes them again for every query."
        )
    place = expanded(index)
    return place.with_name(place.name + SUFFIX)


class LocalFeatures:
    """Float16 features by model and image id, each valid for the content it was computed from.

    A file of SQLite: what was written is there after a crash, and readers go on while a writer writes.
    """

    def __init__(self, path: Path, model: str, *, create: bool = False) -> None:
        self.path, self.model = path, model
        self._lock = threading.Lock()  # one connection, any thread
        check_files(CACHE, path, changed=True)
        # where nothing can be written, SQLite cannot index its log, of which a writer that was closed leaves none
        logged = path.with_name(f"{path.name}-wal").exists()
        fixed = not (create or logged or os.access(path.parent, os.W_OK))
        address = path.absolute().as_uri() + "?mode=ro&immutable=1" * fixed
        with storing(path):
            try:
                self._database = sqlite3.connect(address, uri=True, check_same_thread=False)
            except sqlite3.DatabaseError as error:
                raise self._strange(error) from error
        try:
            self._check_tables(create)
        except BaseException:
            self.close()
            raise

    def _check_tables(self, create: bool) -> None:
        with self._asking() as db:
            found = db.execute("select type, name, sql from sqlite_schema limit 9").fetchall()
            found = [(kind, name, str(sql).rstrip()) for kind, name, sql in found]
            if create and not found:
                db.execute("pragma journal_mode = wal")
                db.execute(_LAYOUT)
            elif found != _SCHEMA:  # a stranger's views and triggers would run
                raise self._strange("other tables")

    def _strange(self, reason: object) -> IndexFault:
        return IndexFault(
            f"{self.path} holds no local features ({reason}): remove it, and index with --local_features."
        )

    @contextmanager
    def _asking(self) -> Iterator[sqlite3.Connection]:
        """The database, for one transaction; whatever is wrong with it is one sentence."""
        turns, most = itertools.count(1), most_steps(self.path)
        with self._lock, storing(self.path):
            self._database.set_progress_handler(lambda: next(turns) * STEPS > most, STEPS)
            try:
                with self._database:
                    yield self._database
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                name = getattr(error, "sqlite_errorname", "")
                if name == "SQLITE_INTERRUPT":
                    raise self._strange("reading it takes longer than its size explains") from error
                if name.startswith(DISK):
                    raise StorageError(
                        f"{self.path} cannot be used ({error}): check the disk and run again; what was saved is intact."
                    ) from error
                raise self._strange(error) from error

    def contents(self) -> dict[str, str]:
        """The content that each image's features were computed from, by id."""
        with self._asking() as db:
            return dict(db.execute("select id, content from features where model = ?", (self.model,)))

    def put(self, found: Iterable[tuple[str, str, NDArray[np.float16]]]) -> None:
        """Write features of images, (id, content, elements (L, D)) each, in one transaction."""
        rows = [(self.model, id, content, len(local), local.tobytes()) for id, content, local in found]
        with self._asking() as db:
            db.executemany("insert or replace into features values (?, ?, ?, ?, ?)", rows)

    def remove(self, ids: Sequence[str]) -> None:
        with self._asking() as db:
            db.executemany(
                "delete from features where model = ? and id = ?", [(self.model, id) for id in ids]
            )

    def get(self, contents: Iterable[tuple[str, str]]) -> dict[str, NDArray[np.float16]]:
        """The features, by id, of those images that have any for their present content; (id, content) each."""
        found: dict[str, NDArray[np.float16]] = {}
        query = "select elements, data from features where model = ? and id = ? and content = ?"
        with self._asking() as db:
            for id, content in contents:
                for elements, data in db.execute(query, (self.model, id, content)):
                    sound = type(elements) is int and elements > 0 and type(data) is bytes
                    if not sound or len(data) % (2 * elements) or not data:
                        raise self._strange(f"other values for {id!r:.80}")
                    found[id] = np.frombuffer(data, np.float16).reshape(elements, -1)
        return found

    def close(self) -> None:
        self._database.close()
