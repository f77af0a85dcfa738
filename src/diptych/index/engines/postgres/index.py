"""The remote engine: an index in PostgreSQL with pgvector, behind the same protocol as the embedded one.

Exact search scans the vectors on the server and scores the best again in float64 here, so it returns what the
embedded engine returns on the same items. Full text is BM25 as FTS5 computes it (see ``words``). Every change
is one transaction that first locks the index's generation: writers take turns, and readers wait for none of
them, only for a compaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from diptych.index.base import Index
from diptych.index.capabilities import View
from diptych.index.engines.coding import FACTOR, PROPOSALS
from diptych.index.engines.postgres import ranking, tables
from diptych.index.engines.postgres.database import Connection, Database, HalfVector, Vector
from diptych.index.engines.postgres.ranking import CodeTables, SqlSelection
from diptych.index.engines.postgres.records import condition, records, rows_of, storable, storable_ids
from diptych.index.engines.postgres.tables import Tables
from diptych.index.protocol import KINDS, Collection, Hit, Hits, Item, Kind, Recall, Vectors
from diptych.index.query.filters import Filter, parse_filter
from diptych.index.query.words import Tokenizer
from diptych.index.scoring import MARGIN, Candidates, best_hits
from diptych.progress import track

T = TypeVar("T")
_GROW = "UPDATE {s}.meta SET value = (value::bigint + 1)::text WHERE key = 'generation'"
LEAST_EF, MAX_EF = 250, 1000  # candidates an HNSW search keeps; the second is pgvector's limit


class PostgresIndex(Index):
    """An index in a schema of a PostgreSQL database: many writers, many readers. Safe to share between threads.

    A server that goes away makes requests fail with ``Unavailable``; the first one after it is back works again.
    """

    engine = "postgresql"
    most_dimensions = 16_000  # pgvector's limit
    precisions = ("float32", "float16")
    path: str

    def __init__(self, url: str, *, writable: bool = False) -> None:
        self._database, self._writable = Database(url), writable
        self._tokenizer = Tokenizer()
        self.path = self._database.label
        try:
            found = Tables(self._database.index)
            self._facts = self._database.ask(found.meta)
            self._database.ask(lambda db: found.check_whole(db, self.path))
        except BaseException:
            self.close()
            raise
        self._tables = Tables(self._database.index, self._facts["precision"])
        self._codes = CodeTables(self._tables, self.dimension)

    @classmethod
    def _make(cls, place: str, facts: dict[str, str]) -> None:
        with closing(Database(place)) as database:
            new = Tables(database.index, facts["precision"])
            database.change(lambda db: new.create(db, database.label, facts), "SELECT 1")

    @staticmethod
    def exists(place: str) -> bool:
        with closing(Database(place)) as database:
            return database.ask(Tables(database.index).exists)

    def _about(self) -> dict[str, Any]:
        t = self._tables
        return self._database.ask(
            lambda db: {
                "counts": t.counts(db),
                "size": t.size(db),
                "columns": t.columns(db),
                "approximate": self._approximate(db),
                "coded": tuple(self._codes.kinds(db)),
            }
        )

    @property
    def generation(self) -> int:
        return int(self._rows_of("SELECT value FROM {s}.meta WHERE key = 'generation'")[0][0])

    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        if filter is not None:
            return self._database.ask(
                lambda db: ranking.count_items(db, self._tables, self._selection(db, kind, filter))
            )
        counts = self._database.ask(self._tables.counts)
        return sum(counts.values()) if kind is None else counts[kind]

    def delete(self, ids: Sequence[str]) -> int:
        return self._change(lambda db: self._tables.remove(db, storable_ids(ids), with_texts=True))

    def collections(self) -> tuple[Collection, ...]:
        return self._database.ask(self._tables.collections)

    def _add_collection(self, name: str, root: str) -> Collection:
        return self._change(lambda db: self._tables.add_collection(db, name, root))

    def move_collection(self, number: int, name: str, root: str) -> None:
        query = "UPDATE {s}.collections SET name = %s, root = %s WHERE number = %s"
        self._change(lambda db: self._tables.run(db, query, (name, root, number)))

    def forget_collection(self, number: int) -> None:
        query = "DELETE FROM {s}.collections WHERE number = %s AND NOT EXISTS "
        query += "(SELECT 1 FROM {s}.items WHERE collection = %s)"
        self._change(lambda db: self._tables.run(db, query, (number, number)))

    def _build_graph(self, kind: Kind, codes: bool | None, show_progress: bool) -> bool:
        """HNSW or a table of codes; from then on it follows every change."""
        before, coded = self._database.ask(lambda db: (self._approximate(db), kind in self._codes.kinds(db)))
        codes = coded if codes is None else codes
        if not codes:
            tables.check_indexable(self.dimension, self._facts["precision"])

        def write(db: Connection) -> None:
            if codes:
                self._codes.build(db, kind)
                self._tables.run(db, f"DROP INDEX IF EXISTS {{s}}.graph_{kind}")
            else:
                self._tables.build_graph(db, kind)
                self._codes.drop(db, kind)

        for _ in track([kind], "approximate index", 1, show_progress):
            self._change(write)
        return kind not in before or coded != codes

    def widths(self, kind: Kind) -> tuple[int, int]:
        if kind in self._database.ask(self._codes.kinds):
            return PROPOSALS, max(PROPOSALS, self.count(kind))
        return LEAST_EF, MAX_EF

    def _keep_recall(self, kind: Kind, recall: Recall) -> None:
        keep = "INSERT INTO {s}.meta VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self._change(lambda db: self._tables.run(db, keep, (f"recall-{kind}", recall.to_json())))
        self._facts = self._database.ask(self._tables.meta)

    def _kept_recall(self, kind: Kind) -> Recall | None:
        return Recall.read(self._facts.get(f"recall-{kind}"))

    def compact(self, *, show_progress: bool = False) -> int:
        """Give back the space of removed rows and forget their columns; the number of bytes freed.

        A table being rewritten can be neither read nor changed: requests wait a moment, then give up.
        """
        before = self._database.ask(self._tables.size)
        self._change(self._tables.recount_columns)
        statements = self._tables.vacuum([f"codes_{kind}" for kind in self._database.ask(self._codes.kinds)])
        self._database.compact(track(statements, "tables", None, show_progress))
        return max(0, before - self._database.ask(self._tables.size))

    def get(self, ids: Sequence[str]) -> list[Item | None]:
        items = self._database.ask(lambda db: self._tables.items(db, storable_ids(ids)))
        found = {one.id: one for one in items}
        return [found.get(id) for id in ids]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        join = "SELECT id, vector FROM {s}.items JOIN {s}.vectors USING (serial) WHERE id = ANY(%s)"
        found = dict(self._rows_of(join, (storable_ids(ids),), binary=True))
        self._check_present(ids, found)
        return self._rows([found[id] for id in ids])

    def thumbnail(self, id: str) -> bytes | None:
        join = "SELECT jpeg FROM {s}.thumbnails JOIN {s}.items USING (serial) WHERE id = ANY(%s)"
        found = self._rows_of(join, (storable_ids([id]),), binary=True)
        return bytes(found[0][0]) if found else None

    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        query = "SELECT id, content FROM {s}.items WHERE collection = %s AND (%s::text IS NULL OR kind = %s)"
        yield from self._rows_of(f"{query} ORDER BY serial", (collection, kind, kind))

    def _nearest(
        self, queries: Vectors, k: int, kind: Kind | None, filter: str | Filter | None, exact: bool | None
    ) -> list[Hits]:
        """In one conversation with the server.

        The approximate index answers where there is one for the kind, unless ``exact`` is True; a filtered search is
        always exact, and so is one for which the approximate index has too few answers.
        """

        kept = None if kind is None else self._kept_recall(kind)
        width = None if kind is None else self._trials.get(kind) or (kept and kept.width)

        def read(db: Connection) -> list[Hits]:
            wanted = exact is not True and filter is None
            graphs = self._approximate(db, k) if wanted else {}
            approximate = kind in graphs
            if exact is False and filter is None and not approximate:
                raise self._no_graph(kind)
            selection = self._selection(db, kind, filter)
            if not approximate:
                return self._best(db, queries, k, selection, False)
            if kind in self._codes.kinds(db):
                cursors = self._codes.nearest(
                    db, kind, queries, max(width or PROPOSALS, FACTOR * (k + MARGIN))
                )
                found = [one.hits(k, False) for one in self._score(queries, cursors)]
            else:
                effort = min(MAX_EF, max(width or LEAST_EF, 2 * (k + MARGIN)))
                db.execute("SELECT set_config('hnsw.ef_search', %s, true)", (str(effort),))
                found = self._best(db, queries, k, selection, True)
            # removed rows stay in the graph until a vacuum and may take every place it keeps
            short = [n for n, hits in enumerate(found) if len(hits) < min(k, graphs[str(kind)])]
            if short:
                again = self._best(db, queries[short], k, selection, False)
                for n, hits in zip(short, again, strict=True):
                    found[n] = hits
            return found

        return self._database.ask(read)

    def _best_words(self, text: str, k: int, kind: Kind | None, filter: str | Filter | None) -> Hits:
        words = self._tokenizer.query(text)

        def read(db: Connection) -> list[tuple[float, int, Item]]:
            selections = [self._selection(db, one, filter) for one in (KINDS if kind is None else (kind,))]
            return [row for one in selections for row in ranking.best_words(db, self._tables, words, k, one)]

        found = sorted(self._database.ask(read), key=lambda row: (-row[0], row[2].kind, row[1]))[:k]
        return Hits(tuple(Hit(one, score) for score, _, one in found))

    def values(self, column: str, limit: int = 50) -> list[tuple[str | bool, int]]:
        query = """
            SELECT value, count(*) FROM (SELECT metadata -> %s AS value FROM {s}.items) cells
            WHERE jsonb_typeof(value) IN ('string', 'boolean') GROUP BY value
            ORDER BY count(*) DESC, (value #>> ARRAY[]::text[]) COLLATE "C" LIMIT %s"""
        return self._rows_of(query, (column, limit)) if storable(column) else []

    def _view(self, read: Callable[[View], T]) -> T:
        return self._database.ask(lambda db: read(_Moment(self, db)))

    def verify(self, *, show_progress: bool = False) -> list[str]:
        def read(db: Connection) -> list[str]:
            faults = self._tables.verify(db, show_progress)
            return faults + self._codes.verify(db, self._tables.counts(db))

        return self._database.ask(read)

    def close(self) -> None:
        self._database.close()

    def _rows_of(self, text: str, values: Any = (), **options: Any) -> list[Any]:
        """All rows of the answer to one statement, whose ``{s}`` is the schema."""
        return self._database.ask(lambda db: list(self._tables.run(db, text, values, **options).fetchall()))

    def _change(self, write: Callable[[Connection], T]) -> T:
        self._check_writable()

        def counted(db: Connection) -> T:
            result = write(db)
            self._tables.run(db, _GROW)
            return result

        return self._database.change(counted, self._tables.take_turn)

    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        new = records(items, rows, self._facts["precision"], self._tokenizer)
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

    def _selection(self, db: Connection, kind: Kind | None, filter: str | Filter | None) -> SqlSelection:
        if filter is None:
            return SqlSelection(kind)
        columns = self._tables.columns(db)
        return SqlSelection(kind, *condition(parse_filter(filter, columns), columns))

    def _best(
        self, db: Connection, queries: Vectors, k: int, selection: SqlSelection, approximate: bool
    ) -> list[Hits]:
        cast = HalfVector if approximate and self._facts["precision"] == "float16" else Vector

        def find(some: Vectors, count: int) -> list[Candidates]:
            with db.pipeline():
                cursors = [
                    ranking.nearest(db, self._tables, cast(query), count, selection, approximate)
                    for query in some
                ]
            return self._score(some, cursors)

        return best_hits(queries, k, find, not approximate)

    def _score(self, queries: Vectors, cursors: Sequence[Any]) -> list[Candidates]:
        """What the cursors over (serial, vector, item …) of some queries found, with its scores."""
        out = []
        for query, cursor in zip(queries, cursors, strict=True):
            rows = cursor.fetchall()
            stored = self._rows([row[1] for row in rows])
            out.append(Candidates([Item(*row[2:]) for row in rows], [row[0] for row in rows], stored, query))
        return out

    def _rows(self, vectors: Sequence[Any]) -> Vectors:
        return rows_of(vectors, self.dimension)


@dataclass(frozen=True)
class _Moment:
    """The items that one transaction sees, by serial."""

    index: PostgresIndex
    db: Connection
    is_mapped = False

    def keys(self, kind: Kind | None, filter: str | Filter | None, size: int | None = None) -> list[int]:
        selection = self.index._selection(self.db, kind, filter)
        return ranking.spread_serials(self.db, self.index._tables, selection, size)

    def items(self, keys: Sequence[int]) -> list[Item]:
        found = self.index._tables.items_at(self.db, [int(key) for key in keys])
        return [found[int(key)] for key in keys]

    def rows(self, keys: Sequence[int]) -> Vectors:
        query = "SELECT vector FROM {s}.vectors WHERE serial = ANY(%s) ORDER BY serial"  # as keys ascend
        found = self.index._tables.run(self.db, query, ([int(key) for key in keys],), binary=True)
        return self.index._rows([vector for (vector,) in found.fetchall()])
