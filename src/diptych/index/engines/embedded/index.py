"""The embedded engine: a folder with memory-mapped vectors and a SQLite catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from diptych.index.base import Index
from diptych.index.capabilities import View, spread
from diptych.index.engines.embedded import catalog, checksums, connections, store
from diptych.index.engines.embedded.scan import fetch, scan
from diptych.index.engines.embedded.segments import ROW_BITS
from diptych.index.engines.embedded.state import Graph, RowNumbers, Selection, State
from diptych.index.engines.embedded.store import ATTEMPTS, Store
from diptych.index.protocol import KINDS, Collection, Hit, Hits, Item, Kind, Recall, Vectors, next_collection
from diptych.index.scoring import rescore

if TYPE_CHECKING:  # what few searches need is imported where it is used
    from diptych.index.engines.embedded.approximate import Graphs
    from diptych.index.engines.embedded.columns import MetadataColumns
    from diptych.index.engines.embedded.words import Words
    from diptych.index.query.filters import Filter

T = TypeVar("T")


class EmbeddedIndex(Index):
    """An index in a folder: one writer at a time, any number of readers.

    The order of a write is: vectors appended and synced, then one SQLite transaction that refers to them.
    Before the commit a crash leaves unreferenced bytes, which the next write cuts off; after it, the
    operation is durable. Safe to share between threads. Of equal scores, images come before texts.
    """

    engine = "embedded"
    path: Path

    def __init__(self, path: str | Path, *, writable: bool = False) -> None:
        self.path = Path(path)
        self._store = Store(self.path, writable)
        self._layout, self._facts = self._store.layout, self._store.meta
        self._read = self._store.read

    @cached_property
    def _columns(self) -> MetadataColumns:
        from diptych.index.engines.embedded.columns import MetadataColumns

        return MetadataColumns(self.path)

    @cached_property
    def _words(self) -> Words:
        from diptych.index.engines.embedded.words import Words

        return Words()

    @cached_property
    def _graphs(self) -> Graphs:
        from diptych.index.engines.embedded.approximate import Graphs

        return Graphs(self.path, self._layout)

    @classmethod
    def _make(cls, place: str | Path, facts: dict[str, str]) -> None:
        Store.create(Path(place), facts)

    @staticmethod
    def exists(place: str | Path) -> bool:
        return (Path(place) / "index.db").is_file()

    def _about(self) -> dict[str, Any]:
        state, columns = self._read(lambda state, db: (state, catalog.known_columns(db, self.path)))
        return {
            "counts": {kind: state.count(kind) for kind in KINDS},
            "deleted": sum(len(s.gone) for s in state.segments),
            "size": self._store.size(),
            "columns": columns,
            "approximate": {graph.kind: graph.rows for graph in state.graphs},
            "coded": tuple(graph.kind for graph in state.graphs if graph.is_codes),
        }

    @property
    def generation(self) -> int:
        return self._read(lambda state, db: state.generation)

    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        def read(state: State, db: Any) -> int:
            if filter is None:
                return state.count(kind)
            rows = self._columns.select(state, db, filter, kind)
            return sum(len(rows[segment.number]) for segment in state.of_kind(kind))

        return self._read(read)

    def delete(self, ids: Sequence[str]) -> int:
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

    def _build_graph(self, kind: Kind, codes: bool | None, show_progress: bool) -> bool:
        with self._store.alone() as state:
            old = self._graphs.find(state, kind)
            codes = codes if codes is not None else old is not None and old.is_codes
            fresh = old is not None and old.is_codes == codes and not old.is_stale(state)
            if state.count(kind) == 0 or fresh:
                return False
            graph = self._graphs.build(state, kind, show_progress, codes)
            with self._store.writing() as db:
                self._graphs.record(db, graph)
            self._store.drop([one.file for one in state.graphs if one.kind == kind])
        return True

    def widths(self, kind: Kind) -> tuple[int, int]:
        from diptych.index.engines.embedded.approximate import usual_width

        usual = usual_width(self._graph(kind))
        return usual, max(usual, self.count(kind))

    def _keep_recall(self, kind: Kind, recall: Recall) -> None:
        with self._store.alone():
            graph = self._graph(kind)
            if graph is not None:
                with self._store.writing() as db:
                    self._graphs.record(db, replace(graph, recall=recall))

    def _kept_recall(self, kind: Kind) -> Recall | None:
        graph = self._graph(kind)
        return None if graph is None else graph.recall

    def _graph(self, kind: Kind) -> Graph | None:
        return self._read(lambda state, db: next((g for g in state.graphs if g.kind == kind), None))

    def collections(self) -> tuple[Collection, ...]:
        return self._read(lambda state, db: self._collections_in(db))

    def _add_collection(self, name: str, root: str) -> Collection:
        with self._store.writing() as db:
            known = self._collections_in(db)
            found = next_collection(known, name, root)
            if found not in known:
                db.execute("INSERT INTO collections VALUES (?, ?, ?)", (found.number, name, root))
        return found

    def _collections_in(self, db: Any) -> tuple[Collection, ...]:
        return tuple(Collection(*row) for row in connections.rows(db, self.path, "collections"))

    def move_collection(self, number: int, name: str, root: str) -> None:
        with self._store.writing() as db:
            db.execute("UPDATE collections SET name = ?, root = ? WHERE number = ?", (name, root, number))

    def forget_collection(self, number: int) -> None:
        query = "DELETE FROM collections WHERE number = ?1 AND NOT EXISTS (SELECT 1 FROM items WHERE collection = ?1)"
        with self._store.writing() as db:
            db.execute(query, (number,))

    def get(self, ids: Sequence[str]) -> list[Item | None]:
        found = self._read(lambda state, db: catalog.items_of(db, ids))
        return [found.get(id) for id in ids]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        def read(state: State, db: Any) -> Vectors:
            slots = catalog.slots_of(db, ids)
            self._check_present(ids, slots)
            return fetch(state.segments, self._layout, np.array([slots[id] for id in ids], np.int64))

        return self._read(read)

    def thumbnail(self, id: str) -> bytes | None:
        return self._read(lambda state, db: catalog.thumbnail_of(db, id))

    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        yield from self._read(lambda state, db: connections.rows(db, self.path, "items", (collection, kind)))

    def _nearest(
        self, queries: Vectors, k: int, kind: Kind | None, filter: str | Filter | None, exact: bool | None
    ) -> list[Hits]:
        def read(state: State, db: Any) -> list[Hits] | int:
            wanted = not exact and filter is None and state.graphs
            graph = self._graphs.find(state, kind) if wanted else None
            if graph is not None:
                found = self._graphs.search(graph, state, queries, k, self._trials.get(graph.kind))
            elif exact is False and filter is None:
                return state.generation
            else:
                found = scan(state.of_kind(kind), queries, k, self._selection(state, db, filter, kind))
            best = [self._best(state, *pair, k) for pair in zip(queries, found, strict=True)]
            # an item is read once, however many queries find it
            slots = sorted({slot for pairs in best for slot, _ in pairs})
            items = dict(zip(slots, self._items(db, slots), strict=True))
            return [Hits(tuple(Hit(items[slot], s) for slot, s in pairs), graph is None) for pairs in best]

        missed = -1
        # a state without its graph: a writer may have replaced that since, and the next state names the new one
        while isinstance(answer := self._read(read), int):
            if answer == missed:
                raise self._no_graph(kind)
            missed = answer
        return answer

    def _best_words(self, text: str, k: int, kind: Kind | None, filter: str | Filter | None) -> Hits:
        def read(state: State, db: Any) -> Hits:
            found = self._words.best(state, db, text, k, kind, self._selection(state, db, filter, kind))
            items = self._items(db, [slot for slot, _ in found])
            return Hits(tuple(Hit(item, score) for item, (_, score) in zip(items, found, strict=True)))

        return self._read(read)

    def values(self, column: str, limit: int = 50) -> list[tuple[str | bool, int]]:
        return self._read(lambda state, db: self._columns.values(state, db, column, limit))

    def _view(self, read: Callable[[View], T]) -> T:
        return self._read(lambda state, db: read(_Moment(self, state, db)))

    def warm(self) -> None:
        """Compare every block of vectors with its checksum now, not when the first search needs it."""
        for segment in self._read(lambda state, db: state.segments):
            segment.rows.check(0, len(segment))

    def verify(self, *, show_progress: bool = False) -> list[str]:
        from diptych.index.engines.embedded.verify import verify

        faults: list[str] = []
        for _ in range(ATTEMPTS):
            state, faults = self._read(
                lambda state, db: (state, verify(state, db, self.path, self._layout, show_progress))
            )
            if not faults or state.generation == self.generation:  # else files may have gone by compaction
                break
        return faults

    def close(self) -> None:
        self._store.close()

    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        with self._store.writing() as db:
            present = catalog.slots_of(db, [item.id for item in items])
            if present and not replace:
                raise self._already(next(iter(present)))
            catalog.remove_slots(db, present.values())
            store.insert(db, self.path, self._layout, items, rows)

    def _selection(
        self, state: State, db: Any, filter: str | Filter | None, kind: Kind | None
    ) -> Selection | None:
        return None if filter is None else self._columns.select(state, db, filter, kind)

    def _best(self, state: State, query: Vectors, slots: RowNumbers, k: int) -> list[tuple[int, float]]:
        """The best k of some slots, each with its score."""
        scores = rescore(fetch(state.segments, self._layout, slots), query)
        of_texts = [s.number for s in state.of_kind("text")]
        texts = np.isin(slots >> ROW_BITS, of_texts) if of_texts else np.zeros(len(slots), bool)
        best = np.lexsort((slots, texts, -scores))[:k]
        return list(zip(slots[best].tolist(), scores[best].tolist(), strict=True))

    def _items(self, db: Any, slots: Sequence[int]) -> list[Item]:
        """The items at live slots of this moment: each has one, or the catalog has lost it."""
        found = catalog.items_at(db, slots)
        if any(item is None for item in found):
            raise checksums.damaged(self.path)
        return cast(list[Item], found)


@dataclass(frozen=True)
class _Moment:
    """The items of a state, by slot."""

    index: EmbeddedIndex
    state: State
    db: Any
    is_mapped = True

    def keys(self, kind: Kind | None, filter: str | Filter | None, size: int | None = None) -> RowNumbers:
        segments = self.state.of_kind(kind)
        selection = self.index._selection(self.state, self.db, filter, kind)
        rows = [s.live_rows if selection is None else selection[s.number] for s in segments]
        bases = [segment.number << ROW_BITS for segment in segments]
        slots = np.concatenate([np.zeros(0, np.int64), *map(np.add, rows, bases)])
        return slots[spread(len(slots), size)]

    def items(self, keys: RowNumbers) -> list[Item]:
        return self.index._items(self.db, keys.tolist())

    def rows(self, keys: RowNumbers) -> Vectors:
        return fetch(self.state.segments, self.index._layout, keys)
