"""The embedded engine: a folder with memory-mapped vectors and a SQLite catalog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from diptych.index.base import Engine, Samples, check_k, check_limit, rescore
from diptych.index.engines.embedded import catalog, checksums, connections, store
from diptych.index.engines.embedded.approximate import Graphs, is_codes, is_stale
from diptych.index.engines.embedded.columns import MetadataColumns
from diptych.index.engines.embedded.scan import fetch, scan
from diptych.index.engines.embedded.segments import ROW_BITS
from diptych.index.engines.embedded.state import RowNumbers, State
from diptych.index.engines.embedded.store import ATTEMPTS, Store
from diptych.index.engines.embedded.verify import verify
from diptych.index.engines.embedded.words import Words
from diptych.index.engines.pairs import best_pairs
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
from diptych.index.query.filters import Filter


class EmbeddedIndex(Engine):
    """An index in a folder: one writer at a time, any number of readers.

    The order of a write is: vectors appended and synced, then one SQLite transaction that refers to them.
    Before the commit a crash leaves unreferenced bytes, which the next write cuts off; after it, the
    operation is durable. Safe to share between threads. Of equal scores, images come before texts.
    """

    path: Path

    def __init__(self, path: str | Path, *, writable: bool = False) -> None:
        self.path = Path(path)
        self._store = Store(self.path, writable)
        self._layout, self._facts = self._store.layout, self._store.meta
        self._dimension = self._layout.dimension
        self._read = self._store.read
        self._columns = MetadataColumns()
        self._words = Words()
        self._graphs = Graphs(self.path, self._layout)
        self._samples = Samples()

    @classmethod
    def create(
        cls,
        path: str | Path,
        dimension: int,
        *,
        model: str = "",
        fingerprint: str = "",
        precision: Precision = "float32",
    ) -> EmbeddedIndex:
        """A new, empty index, open for writing; an index that is already there is refused."""
        Store.create(Path(path), dimension, precision, model, fingerprint)
        return cls(path, writable=True)

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether there is an index in this folder."""
        return (Path(path) / "index.db").is_file()

    @property
    def info(self) -> IndexInfo:
        """What the index says of itself."""
        state, (columns, collections) = self._read(
            lambda state, db: (
                state,
                (
                    connections.rows(db, self.path, "columns"),
                    connections.rows(db, self.path, "collections"),
                ),
            )
        )
        return self._info(
            "embedded",
            counts={kind: state.count(kind) for kind in KINDS},
            deleted=sum(len(s.gone) for s in state.segments),
            size=self._store.size(),
            columns={name: tuple(catalog.column_kinds(kinds)) for name, kinds in columns},
            collections=tuple(Collection(*row) for row in collections),
            approximate={graph.kind: graph.rows for graph in state.graphs},
            coded=tuple(graph.kind for graph in state.graphs if is_codes(graph)),
        )

    @property
    def generation(self) -> int:
        """A number that grows with every change."""
        return self._read(lambda state, db: state.generation)

    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        """Items present, of one kind or of all; with a filter, those that pass."""

        def read(state: State, db: Any) -> int:
            if filter is None:
                return state.count(kind)
            chosen = self._columns.select(state, db, filter, kind)
            return sum(len(chosen[segment.number]) for segment in state.of_kind(kind))

        return self._read(read)

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items by id and say how many were there; texts of a removed image go with it."""
        with self._store.writing() as db:
            return store.remove(db, ids)

    def compact(self, *, show_progress: bool = False) -> int:
        """Give back the space of removed rows and forget their columns; the number of bytes freed.

        The rows that are left are copied to new files; one transaction puts them in the place of the old.
        """
        before = self._store.size()
        with self._store.alone() as state:
            with self._store.writing() as db:
                old, moves = store.compact(db, self.path, self._layout, state, show_progress)
                graphs = self._graphs.follow(db, state, old, moves)
                catalog.recount_columns(db)
            self._store.drop([s.file for s in old] + [graph.file for graph in graphs])
            self._store.shrink()
        return max(0, before - self._store.size())

    def build_graph(
        self, kind: Kind = "image", *, codes: bool | None = None, show_progress: bool = False
    ) -> None:
        """Make the approximate index of a kind, or bring it up to date when much was changed since."""
        with self._store.alone() as state:
            old = self._graphs.find(state, kind)
            codes = codes if codes is not None else old is not None and is_codes(old)
            fresh = old is not None and is_codes(old) == codes and not is_stale(old, state)
            if state.count(kind) == 0 or fresh:
                return
            graph = self._graphs.build(state, kind, show_progress, codes)
            with self._store.writing() as db:
                self._graphs.record(db, graph)
            self._store.drop([one.file for one in state.graphs if one.kind == kind])

    def collection(self, name: str, root: str = "") -> Collection:
        """The collection of this name and root, recorded if it is new."""
        find = "SELECT number, name, root FROM collections WHERE name = ? AND root = ?"
        found = self._read(lambda state, db: db.execute(find, (name, root)).fetchone())
        if found is None:
            with self._store.writing() as db:
                number = db.execute("SELECT coalesce(max(number) + 1, 0) FROM collections").fetchone()[0]
                db.execute("INSERT INTO collections VALUES (?, ?, ?)", (number, name, root))
                found = (number, name, root)
        return Collection(*found)

    def move_collection(self, number: int, name: str, root: str) -> None:
        """Give a collection another name and root; its items stay as they are."""
        with self._store.writing() as db:
            db.execute("UPDATE collections SET name = ?, root = ? WHERE number = ?", (name, root, number))

    def forget_collection(self, number: int) -> None:
        """Remove the record of a collection that has no items any more; one that has is left alone."""
        query = "DELETE FROM collections WHERE number = ?1 AND NOT EXISTS (SELECT 1 FROM items WHERE collection = ?1)"
        with self._store.writing() as db:
            db.execute(query, (number,))

    def get(self, ids: Sequence[str]) -> list[Item | None]:
        """The items of these ids, None where absent."""
        found = self._read(lambda state, db: catalog.items_of(db, ids))
        return [found.get(id) for id in ids]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        """The stored vectors (len(ids), dimension) of items that must be present."""

        def read(state: State, db: Any) -> Vectors:
            slots = catalog.slots_of(db, ids)
            self._check_present(ids, slots)
            return fetch(state.segments, self._layout, np.array([slots[id] for id in ids], np.int64))

        return self._read(read)

    def thumbnail(self, id: str) -> bytes | None:
        """The stored JPEG of an item, if it has one."""
        return self._read(lambda state, db: catalog.thumbnail_of(db, id))

    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        """(id, content) of every item of a collection, for a re-index to compare."""
        query = "SELECT id, content FROM items WHERE collection = ? AND (? IS NULL OR kind = ?)"
        yield from self._read(lambda state, db: db.execute(query, (collection, kind, kind)).fetchall())

    def search_many(
        self,
        vectors: Any,
        k: int = 10,
        *,
        kind: Kind | None = None,
        filter: str | Filter | None = None,
        exact: bool | None = None,
    ) -> list[Hits]:
        """``search`` for each row of (queries, dimension), in one pass over the vectors."""
        queries = self._checked(vectors, "the query")
        check_k(k)

        def read(state: State, db: Any) -> list[Hits] | int:
            graph = None if exact or filter is not None else self._graphs.find(state, kind)
            if graph is not None:
                found = self._graphs.search(graph, state, queries, k)
            elif exact is False and filter is None:
                return state.generation
            else:
                chosen = None if filter is None else self._columns.select(state, db, filter, kind)
                found = scan(state.of_kind(kind), queries, k, chosen)
            pairs = zip(queries, found, strict=True)
            return [self._hits(state, db, query, slots, k, graph is None) for query, slots in pairs]

        missed = -1
        # a state without its graph: a writer may have replaced that since, and the next state names the new one
        while isinstance(answer := self._read(read), int):
            if answer == missed:
                raise self._no_graph(kind)
            missed = answer
        return answer

    def search_words(
        self, text: str, k: int = 10, *, kind: Kind | None = None, filter: str | Filter | None = None
    ) -> Hits:
        """The k best items by BM25 over their texts; items without any of the words are absent."""
        check_k(k)

        def read(state: State, db: Any) -> Hits:
            chosen = None if filter is None else self._columns.select(state, db, filter, kind)
            found = self._words.best(state, db, text, k, kind, chosen)
            items = self._items(db, [slot for slot, _ in found])
            return Hits(tuple(Hit(item, score) for item, (_, score) in zip(items, found, strict=True)))

        return self._read(read)

    def values(self, column: str, limit: int = 50) -> list[tuple[str | bool, int]]:
        """The most frequent texts and booleans of a metadata column, and how many items have each."""
        return self._read(lambda state, db: catalog.common_values(db, column, limit))

    def sample(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 4096
    ) -> Vectors:
        """Vectors of up to ``size`` items spread evenly over the index, the same for the same state."""

        def read(state: State, db: Any) -> Vectors:
            return self._samples.get(
                (state.generation, kind, repr(filter), size),
                lambda: fetch(state.of_kind(kind), self._layout, self._spread(state, db, kind, filter, size)),
            )

        return self._read(read)

    def sample_items(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 24
    ) -> list[Item]:
        """The items whose vectors ``sample`` gives, in the same order."""

        def read(state: State, db: Any) -> list[Item]:
            slots = self._spread(state, db, kind, filter, size)
            return self._items(db, slots.tolist())

        return self._read(read)

    def near_duplicates(
        self,
        *,
        kind: Kind = "image",
        threshold: float | None = None,
        limit: int = 100,
        show_progress: bool = False,
    ) -> list[Pair]:
        """The ``limit`` best pairs, best first; with ``threshold``, only those that reach it."""
        check_limit(limit)

        def read(state: State, db: Any) -> list[Pair]:
            segments = state.of_kind(kind)
            rows = [s.live_rows + (s.number << ROW_BITS) for s in segments]
            slots = np.concatenate(rows) if rows else np.zeros(0, np.int64)
            scores, first, second = best_pairs(
                slots, lambda some: fetch(segments, self._layout, some), threshold, limit, show_progress
            )
            items = self._items(db, [*first.tolist(), *second.tolist()])
            pairs = zip(items[: len(first)], items[len(first) :], scores.tolist(), strict=True)
            return [Pair(a, b, score) for a, b, score in pairs]

        return self._read(read)

    def warm(self) -> None:
        """Compare every block of vectors with its checksum now, not when the first search needs it."""
        for segment in self._read(lambda state, db: state.segments):
            segment.blocks.check(0, len(segment))

    def verify(self, *, show_progress: bool = False) -> list[str]:
        """Read everything and compare it with its checksums: one sentence per fault."""
        faults: list[str] = []
        for _ in range(ATTEMPTS):
            state, faults = self._read(
                lambda state, db: (state, verify(state, db, self.path, self._layout, show_progress))
            )
            if not faults or state.generation == self.generation:  # else files may have gone by compaction
                break
        return faults

    def close(self) -> None:
        """Release files and locks; idempotent."""
        self._store.close()

    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        with self._store.writing() as db:
            present = catalog.slots_of(db, [item.id for item in items])
            if present and not replace:
                raise self._already(next(iter(present)))
            catalog.remove_slots(db, present.values())
            store.insert(db, self.path, self._layout, items, rows)

    def _root(self, collection: int) -> str:
        query = "SELECT root FROM collections WHERE number = ?"
        row = self._read(lambda state, db: db.execute(query, (collection,)).fetchone())
        return "" if row is None else str(row[0])

    def _spread(
        self, state: State, db: Any, kind: Kind | None, filter: str | Filter | None, size: int
    ) -> RowNumbers:
        segments = state.of_kind(kind)
        if filter is None:
            rows = [segment.live_rows + (segment.number << ROW_BITS) for segment in segments]
        else:
            chosen = self._columns.select(state, db, filter, kind)
            rows = [chosen[segment.number] + (segment.number << ROW_BITS) for segment in segments]
        slots = np.concatenate([*rows, np.zeros(0, np.int64)])
        if len(slots) > size:
            slots = slots[np.linspace(0, len(slots) - 1, size).astype(np.int64)]
        return slots

    def _hits(self, state: State, db: Any, query: Vectors, slots: RowNumbers, k: int, exact: bool) -> Hits:
        scores = rescore(fetch(state.segments, self._layout, slots), query)
        of_texts = [s.number for s in state.of_kind("text")]
        texts = np.isin(slots >> ROW_BITS, of_texts) if of_texts else np.zeros(len(slots), bool)
        best = np.lexsort((slots, texts, -scores))[:k]
        items = self._items(db, slots[best].tolist())
        pairs = zip(items, scores[best].tolist(), strict=True)
        return Hits(tuple(Hit(item, score) for item, score in pairs), exact)

    def _items(self, db: Any, slots: Sequence[int]) -> list[Item]:
        """The items at live slots of this moment: each has one, or the catalog has lost it."""
        found = catalog.items_at(db, slots)
        if any(item is None for item in found):
            raise checksums.damaged(self.path)
        return cast(list[Item], found)
