"""The remote engine: an index in PostgreSQL with pgvector, behind the same protocol as the embedded one.

Exact search scans the vectors on the server and scores the best again in float64 here, so it returns what the
embedded engine returns on the same items. Full text is BM25 as FTS5 computes it (see ``bm25``). Every change
is one transaction that first locks the index's generation: writers take turns, and readers wait for none of
them, only for a compaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from diptych.errors import IndexFault
from diptych.index.base import MAX_TIES, Engine, Samples, check_k, check_limit, new_facts
from diptych.index.engines.pairs import best_pairs
from diptych.index.engines.postgres import ranking, tables
from diptych.index.engines.postgres.candidates import MARGIN, Candidates, hits_of, is_crowded, scored
from diptych.index.engines.postgres.database import Connection, Database, HalfVector, Vector
from diptych.index.engines.postgres.ranking import Chosen, CodeTables
from diptych.index.engines.postgres.records import condition, records, rows_of, storable, storable_ids
from diptych.index.engines.postgres.tables import Tables
from diptych.index.protocol import (
    KINDS,
    Collection,
    Hit,
    Hits,
    IndexInfo,
    Item,
    Kind,
    Pair,
    Precision,
    Vectors,
)
from diptych.index.query.filters import Filter, parse_filter
from diptych.index.query.words import Tokenizer
from diptych.progress import track

LEAST_EF, MAX_EF = 250, 1000  # candidates an HNSW search keeps; the second is pgvector's limit


class PostgresIndex(Engine):
    """An index in a schema of a PostgreSQL database: many writers, many readers.

    Safe to share between threads. A database that goes away makes requests fail with ``Unavailable``; the
    first one after it is back works again.
    """

    path: str

    def __init__(self, url: str, *, writable: bool = False) -> None:
        self._database, self._writable = Database(url), writable
        self._tokenizer = Tokenizer()
        self._samples = Samples()
        self.path = self._database.label
        try:
            found = Tables(self._database.index)
            self._facts = self._database.ask(found.meta)
            self._database.ask(lambda db: found.check_whole(db, self.path))
        except BaseException:
            self.close()
            raise
        self._dimension = int(self._facts["dimension"])
        self._precision: Precision = self._facts["precision"]  # type: ignore[assignment]
        self._tables = Tables(self._database.index, self._precision)
        self._codes = CodeTables(self._tables, self._dimension)

    @classmethod
    def create(
        cls,
        url: str,
        dimension: int,
        *,
        model: str = "",
        fingerprint: str = "",
        precision: Precision = "float32",
    ) -> PostgresIndex:
        """A new, empty index, open for writing; an index that is already there is refused."""
        tables.check_storable(dimension, precision)
        facts = new_facts(dimension, precision, model, fingerprint)
        database = Database(url)
        try:
            new = Tables(database.index, precision)
            database.change(lambda db: new.create(db, database.label, facts), "SELECT 1")
        finally:
            database.close()
        return cls(url, writable=True)

    @staticmethod
    def exists(url: str) -> bool:
        """Whether there is an index to open."""
        database = Database(url)
        try:
            return database.ask(Tables(database.index).exists)
        finally:
            database.close()

    @property
    def info(self) -> IndexInfo:
        """What the index says of itself."""
        t = self._tables
        return self._database.ask(
            lambda db: self._info(
                "postgresql",
                counts=t.counts(db),
                deleted=0,
                size=t.size(db),
                columns=t.columns(db),
                collections=t.collections(db),
                approximate=self._approximate(db),
                coded=tuple(self._codes.kinds(db)),
            )
        )

    @property
    def generation(self) -> int:
        """A number that grows with every change."""
        return self._database.ask(self._tables.generation)

    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        """Items present, of one kind or of all; with a filter, those that pass."""
        if filter is not None:
            return self._database.ask(
                lambda db: ranking.passing(db, self._tables, self._selection(db, kind, filter))
            )
        counts = self._database.ask(self._tables.counts)
        return sum(counts.values()) if kind is None else counts[kind]

    # ------------------------------------------------------------------ changing

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items by id and say how many were there; texts of a removed image go with it."""
        known = storable_ids(ids)
        removed: int = self._change(lambda db: self._tables.remove(db, known, with_texts=True))
        return removed

    def collection(self, name: str, root: str = "") -> Collection:
        """The collection of this name and root, recorded if it is new."""
        found = self._database.ask(lambda db: self._tables.find_collection(db, name, root))
        if found is None:
            found = self._change(lambda db: self._tables.add_collection(db, name, root))
        return found

    def move_collection(self, number: int, name: str, root: str) -> None:
        """Give a collection another name and root; its items stay as they are."""
        self._change(lambda db: self._tables.move_collection(db, number, name, root))

    def forget_collection(self, number: int) -> None:
        """Remove the record of a collection that has no items any more; one that has is left alone."""
        self._change(lambda db: self._tables.forget_collection(db, number))

    def build_graph(
        self, kind: Kind = "image", *, codes: bool | None = None, show_progress: bool = False
    ) -> None:
        """Make the approximate index of a kind, HNSW or a table of codes; from then on it follows every change."""
        if codes is None:
            codes = kind in self._database.ask(self._codes.kinds)
        if not codes:
            tables.check_indexable(self._dimension, self._precision)

        def write(db: Connection) -> None:
            if codes:
                self._codes.build(db, kind)
                self._tables.drop_graph(db, kind)
            else:
                self._tables.build_graph(db, kind)
                self._codes.drop(db, kind)

        for _ in track([kind], "approximate index", 1, show_progress):
            self._change(write)

    def compact(self, *, show_progress: bool = False) -> int:
        """Give back the space of removed rows and forget their columns; the number of bytes freed.

        A table being rewritten can be neither read nor changed: requests wait a moment, then give up.
        """
        self._check_writable()
        before = self._database.ask(self._tables.size)
        self._change(self._tables.recount_columns)
        statements = self._tables.vacuum(self._database.ask(self._codes.names))
        self._database.compact(track(statements, "tables", None, show_progress))
        return max(0, before - self._database.ask(self._tables.size))

    # ------------------------------------------------------------------ reading

    def get(self, ids: Sequence[str]) -> list[Item | None]:
        """The items of these ids, None where absent."""
        found = {
            one.id: one for one in self._database.ask(lambda db: self._tables.items(db, storable_ids(ids)))
        }
        return [found.get(id) for id in ids]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        """The stored vectors (len(ids), dimension) of items that must be present."""
        found = self._database.ask(lambda db: self._tables.vectors_of(db, storable_ids(ids)))
        self._check_present(ids, found)
        return self._rows([found[id] for id in ids])

    def thumbnail(self, id: str) -> bytes | None:
        """The stored JPEG of an item, if it has one."""
        return self._database.ask(lambda db: self._tables.thumbnail(db, id)) if storable(id) else None

    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        """(id, content) of every item of a collection, for a re-index to compare."""
        yield from self._database.ask(lambda db: self._tables.contents(db, collection, kind))

    def search_many(
        self,
        vectors: Any,
        k: int = 10,
        *,
        kind: Kind | None = None,
        filter: str | Filter | None = None,
        exact: bool | None = None,
    ) -> list[Hits]:
        """``search`` for each row of (queries, dimension), in one conversation with the server.

        The approximate index answers where there is one for the kind, unless ``exact`` is True; a filtered
        search is always exact, and so is one for which the approximate index has too few answers.
        """
        queries = self._checked(vectors, "the query")
        check_k(k)

        def read(db: Connection) -> list[Hits]:
            wanted = exact is not True and filter is None
            graphs = self._approximate(db, k) if wanted else {}
            approximate = kind in graphs
            if exact is False and filter is None and not approximate:
                raise self._no_graph(kind)
            chosen = self._selection(db, kind, filter)
            if not approximate:
                return self._nearest(db, queries, k, chosen, False)
            if kind in self._codes.kinds(db):
                cursors = self._codes.nearest(db, kind, queries, k + MARGIN)
                found = [hits_of(one, k, False) for one in scored(queries, cursors, self._dimension)]
            else:
                effort = min(MAX_EF, max(LEAST_EF, 2 * (k + MARGIN)))
                db.execute("SELECT set_config('hnsw.ef_search', %s, true)", (str(effort),))
                found = self._nearest(db, queries, k, chosen, True)
            # removed rows stay in the graph until a vacuum and may take every place it keeps
            short = [n for n, hits in enumerate(found) if len(hits) < min(k, graphs[str(kind)])]
            if short:
                again = self._nearest(db, queries[short], k, chosen, False)
                for n, hits in zip(short, again, strict=True):
                    found[n] = hits
            return found

        return self._database.ask(read)

    def search_words(
        self, text: str, k: int = 10, *, kind: Kind | None = None, filter: str | Filter | None = None
    ) -> Hits:
        """The k best items by BM25 over their texts; items without any of the words are absent."""
        check_k(k)
        words = self._tokenizer.query(text)
        kinds = KINDS if kind is None else (kind,)

        def read(db: Connection) -> list[tuple[float, int, Item]]:
            selections = [self._selection(db, one, filter) for one in kinds]
            return [row for one in selections for row in ranking.best_words(db, self._tables, words, k, one)]

        found = sorted(self._database.ask(read), key=lambda row: (-row[0], row[2].kind, row[1]))[:k]
        return Hits(tuple(Hit(one, score) for score, _, one in found))

    def values(self, column: str, limit: int = 50) -> list[tuple[str | bool, int]]:
        """The most frequent texts and booleans of a metadata column, and how many items have each."""
        if not storable(column):
            return []
        return self._database.ask(lambda db: self._tables.common_values(db, column, limit))

    def sample(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 4096
    ) -> Vectors:
        """Vectors of up to ``size`` items spread evenly over the index, the same for the same state."""

        def read(db: Connection) -> Vectors:
            return self._samples.get(
                (self._tables.generation(db), kind, repr(filter), size),
                lambda: self._rows(ranking.sample(db, self._tables, self._selection(db, kind, filter), size)),
            )

        return self._database.ask(read)

    def sample_items(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 24
    ) -> list[Item]:
        """The items whose vectors ``sample`` gives, in the same order."""

        def read(db: Connection) -> list[Item]:
            serials = ranking.spread(db, self._tables, self._selection(db, kind, filter), size)
            found = self._tables.items_at(db, serials)
            return [found[serial] for serial in serials]

        return self._database.ask(read)

    def near_duplicates(
        self,
        *,
        kind: Kind = "image",
        threshold: float | None = None,
        limit: int = 100,
        show_progress: bool = False,
    ) -> list[Pair]:
        """The ``limit`` best pairs, best first; with ``threshold``, only those that reach it.

        The vectors of the kind are brought here for it: a database has no quick way to compare all with all.
        """
        check_limit(limit)

        def read(db: Connection) -> list[Pair]:
            rows = self._tables.vectors_of_kind(db, kind)
            serials = [serial for serial, _ in rows]
            stored = self._rows([vector for _, vector in rows])
            scores, first, second = best_pairs(
                np.arange(len(stored)), lambda some: stored[some], threshold, limit, show_progress
            )
            pairs = [(serials[a], serials[b]) for a, b in zip(first, second, strict=True)]
            found = self._tables.items_at(db, [serial for pair in pairs for serial in pair])
            return [Pair(found[a], found[b], float(s)) for (a, b), s in zip(pairs, scores, strict=True)]

        return self._database.ask(read)

    def verify(self, *, show_progress: bool = False) -> list[str]:
        """Read everything and compare it with its checksums: one sentence per fault."""

        def read(db: Connection) -> list[str]:
            faults = self._tables.verify(db, show_progress)
            return faults + self._codes.verify(db, self._tables.counts(db))

        return self._database.ask(read)

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._database.close()

    # ------------------------------------------------------------------ inside

    def _change(self, write: Callable[[Connection], Any]) -> Any:
        self._check_writable()

        def counted(db: Connection) -> Any:
            result = write(db)
            self._tables.count_change(db)
            return result

        return self._database.change(counted, self._tables.take_turn)

    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        new = records(items, rows, self._precision, self._tokenizer)
        ids = [one.id for one in items]

        def write(db: Connection) -> None:
            if replace:
                self._tables.remove(db, ids, with_texts=False)
            elif present := self._tables.items(db, ids):
                raise self._already(present[0].id)
            self._codes.follow(db, self._tables.insert(db, new))

        self._change(write)

    def _approximate(self, db: Connection, k: int = 1) -> dict[str, int]:
        """Kinds with an approximate index that can propose for k answers, and the items it covers."""
        graphs = self._tables.graphs(db) if k + MARGIN <= MAX_EF else {}
        counts = self._tables.counts(db)
        return {**graphs, **{kind: counts[kind] for kind in self._codes.kinds(db)}}

    def _root(self, collection: int) -> str:
        roots = {c.number: c.root for c in self._database.ask(self._tables.collections)}
        return roots.get(collection, "")

    def _selection(self, db: Connection, kind: Kind | None, filter: str | Filter | None) -> Chosen:
        if filter is None:
            return Chosen(kind)
        columns = self._tables.columns(db)
        tree = parse_filter(filter, columns) if isinstance(filter, str) else filter
        return Chosen(kind, *condition(tree, columns))

    def _nearest(
        self, db: Connection, queries: Vectors, k: int, chosen: Chosen, approximate: bool
    ) -> list[Hits]:
        found = self._candidates(db, queries, k + MARGIN, chosen, approximate)
        if not approximate:
            crowded = [n for n, one in enumerate(found) if is_crowded(queries[n], one, k)]
            again = self._candidates(db, queries[crowded], k + MAX_TIES, chosen, False) if crowded else []
            for n, one in zip(crowded, again, strict=True):
                found[n] = one
        return [hits_of(one, k, not approximate) for one in found]

    def _candidates(
        self, db: Connection, queries: Vectors, count: int, chosen: Chosen, approximate: bool
    ) -> list[Candidates]:
        cast = HalfVector if approximate and self._precision == "float16" else Vector
        with db.pipeline():
            cursors = [
                ranking.nearest(db, self._tables, cast(query), count, chosen, approximate)
                for query in queries
            ]
        return scored(queries, cursors, self._dimension)

    def _rows(self, vectors: Sequence[Any]) -> Vectors:
        return rows_of(vectors, self._dimension)

    def _check_writable(self) -> None:
        if not self._writable:
            raise IndexFault(
                f"{self.path} is open for reading only: open it with writable=True to change it."
            )
