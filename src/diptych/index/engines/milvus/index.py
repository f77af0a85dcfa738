"""An index in Milvus: vectors, metadata and filters on a server or a cluster, behind the same protocol.

Exact search (``index=flat``) scans the vectors on the server and scores the best again in float64 here, so it returns
what the embedded engine returns on the same items. Milvus has no transactions: an operation that has returned is
durable and whole, but while one runs, readers may see some of its items already. Every change can be repeated without
harm, so one that failed half way is finished by trying again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from diptych.errors import IndexFault, SettingsError
from diptych.index.base import Index
from diptych.index.capabilities import View
from diptych.index.engines.milvus import facts, ranking
from diptych.index.engines.milvus.address import read_address
from diptych.index.engines.milvus.facts import IndexFacts, picture_rows
from diptych.index.engines.milvus.pushdown import (
    EVERY,
    KIND_NUMBERS,
    MilvusSelection,
    Parts,
    key_of,
    keys,
    select,
)
from diptych.index.engines.milvus.ranking import Nearest, best_words, check_depth
from diptych.index.engines.milvus.rows import Row, item_of, row, vectors_of
from diptych.index.engines.milvus.server import Server, check_version
from diptych.index.engines.milvus.table import MOST, STRONG
from diptych.index.protocol import KINDS, Collection, Hits, Item, Kind, Recall, Vectors, held_kinds, kind_of
from diptych.index.query.filters import Filter, parse_filter
from diptych.index.query.words import words_of
from diptych.progress import track

T = TypeVar("T")


class MilvusIndex(Index):
    """An index in Milvus: many writers, many readers. Safe to share between threads.

    A server that goes away makes requests fail with ``Unavailable``; the first one after it is back works again.
    """

    engine = "milvus"
    most_dimensions = 32_768  # Milvus's limit
    precisions = ("float32",)
    path: str

    def __init__(self, url: str, *, writable: bool = False) -> None:
        self._address = read_address(url)
        self._server, self._writable = Server(self._address), writable
        self.path = self._server.label
        self._items, self._meta = facts.tables(self._server)
        self._whole = IndexFacts(self._meta)
        self._serial, self._serials = 0, threading.Lock()
        try:
            self._facts = facts.read_facts(self._items)
            self._parts = Parts(int(self._facts["partitions"]), self._facts["partition_by"])
            self._graph = facts.prepare(self._items, self._meta, self._facts, writable)
            self._measured = {} if self._graph == "flat" else self._whole.recalls()
        except BaseException:
            self.close()
            raise

    @classmethod
    def _make(cls, place: str, about: dict[str, str]) -> None:
        address = read_address(place)
        parts = {"partitions": str(address.partitions), "partition_by": address.partition_by}
        with closing(Server(address)) as server:
            facts.make(server, {**about, **parts})
            try:
                cls(place, writable=True).close()
            except SettingsError:  # options that this server cannot meet: leave nothing behind
                for table in facts.tables(server):
                    with suppress(IndexFault):  # whatever state it is in
                        table.do("drop_collection")
                raise

    @staticmethod
    def exists(place: str) -> bool:
        with closing(Server(read_address(place))) as server:
            return facts.tables(server)[0].exists()

    def _about(self) -> dict[str, Any]:
        """The size is that of the vectors: Milvus tells no other."""
        counts = {kind: self.count(kind) for kind in KINDS}
        return {
            "counts": counts,
            "size": 4 * self.dimension * sum(counts.values()),
            "columns": self._whole.columns(),
            "approximate": {} if self._graph == "flat" else {kind: n for kind, n in counts.items() if n},
        }

    @property
    def generation(self) -> int:
        return self._whole.generation()

    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        return ranking.count_items(self._items, self._selection(kind, filter))

    def delete(self, ids: Sequence[str]) -> int:
        with self._changing():
            found = self._picked(ids, "pictures", STRONG)
            gone, images = dict(found), list(found)
            for start in range(0, len(images), 1_000):
                linked = keys("image", images[start : start + 1_000])
                for piece in self._items.rows(linked, ["serial", "pictures"]):
                    gone |= {one["pk"]: one for one in piece}
            if gone:
                self._items.remove(list(gone))
                self._whole.remove_pictures(_owners(gone.values()))
        return len(found)

    def collections(self) -> tuple[Collection, ...]:
        return self._whole.collections()

    def _add_collection(self, name: str, root: str) -> Collection:
        with self._changing():
            return self._whole.add_collection(name, root)

    def move_collection(self, number: int, name: str, root: str) -> None:
        with self._changing():
            self._whole.move_collection(number, name, root)

    def forget_collection(self, number: int) -> None:
        self._check_writable()
        if not self._items.count(f"collection == {int(number)}", STRONG):
            with self._changing():
                self._whole.forget_collection(number)

    def _build_graph(self, kind: Kind, codes: bool | None, show_progress: bool) -> bool:
        """The one that the URL names, of both kinds; from then on it follows every change."""
        self._check_writable()
        if codes:
            raise SettingsError("Milvus has no binary codes: leave out --codes.")
        asked = self._address.graph or self._graph
        if asked == "flat":
            raise SettingsError(
                f"{self.path} is exact (index=flat): add index=hnsw or index=diskann to its URL for an approximate "
                "one."
            )
        if asked == self._graph:
            return self._kept_recall(kind) is None
        for _ in track([kind], "approximate index", 1, show_progress):
            facts.change_graph(self._items, self._graph, asked)
            self._graph = asked
        self._whole.count_change()
        return True

    def widths(self, kind: Kind) -> tuple[int, int]:
        return ranking.EFFORT, 2 * MOST

    def _keep_recall(self, kind: Kind, recall: Recall) -> None:
        self._whole.keep_recall(kind, recall)
        self._measured = self._whole.recalls()

    def _kept_recall(self, kind: Kind) -> Recall | None:
        return self._measured.get(kind)

    def compact(self, *, show_progress: bool = False) -> int:
        """Forget columns and thumbnails of items that are gone; the server gives their space back in its own time."""
        owners: set[tuple[str, int]] = set()

        def values() -> Iterator[tuple[str, str]]:
            pieces = self._items.rows(EVERY, ["item", "serial", "pictures"], ranking.ITEM_BYTES)
            for piece in track(pieces, "pieces of the index", None, show_progress):
                owners.update((one["pk"], one["serial"]) for one in piece if one["pictures"])
                for one in piece:
                    yield from ((name, kind_of(value)) for name, value in item_of(one).metadata.items())

        with self._changing():
            self._whole.keep_columns(held_kinds(values()))
            self._meta.remove(self._whole.stray_pictures(owners))
        self._items.flush()
        self._items.do("compact")
        return 0

    def get(self, ids: Sequence[str]) -> list[Item | None]:
        items = {one.id: one for one in map(item_of, self._picked(ids, "item").values())}
        return [items.get(id) for id in ids]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        found = self._picked(ids, "vector")
        self._check_present(ids, {id for id in ids if key_of(id) in found})
        return vectors_of([found[key_of(id)] for id in ids], self.dimension)

    def thumbnail(self, id: str) -> bytes | None:
        found = list(self._picked([id], "pictures").values())
        return self._whole.picture(key_of(id), found[0]["serial"], found[0]["pictures"]) if found else None

    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        one_kind = "" if kind is None else f" and kind == {KIND_NUMBERS[kind]}"
        for piece in self._items.rows(
            f"collection == {int(collection)}{one_kind}", ["item"], ranking.ITEM_BYTES
        ):
            yield from ((one.id, one.content) for one in map(item_of, piece))

    def _nearest(
        self, queries: Vectors, k: int, kind: Kind | None, filter: str | Filter | None, exact: bool | None
    ) -> list[Hits]:
        """With an approximate index, filtered searches use it too; an exact one then reads every vector from here."""
        check_depth(k)
        if exact is False and self._graph == "flat":
            raise self._no_graph(kind)
        width = ranking.EFFORT if kind is None else self.width(kind)
        nearest = Nearest(self._items, self.dimension, self._graph, width)
        selection = self._selection(kind, filter)
        return (
            nearest.scan(queries, k, selection)
            if exact and self._graph != "flat"
            else nearest(queries, k, selection)
        )

    def _best_words(self, text: str, k: int, kind: Kind | None, filter: str | Filter | None) -> Hits:
        """By the server's BM25, where it has it: from Milvus 2.5 on."""
        check_depth(k)
        if not self._facts["words"]:
            check_version(self._server.version, facts.WORDS, self.path, "full-text search (--hybrid)")
            raise SettingsError(
                f"{self.path} was made by a server without full-text search: index the collection again under another "
                "name, or search without --hybrid."
            )
        words = " ".join(words_of(text))
        return best_words(self._items, words, k, self._selection(kind, filter)) if words else Hits()

    def values(self, column: str, limit: int = 50) -> list[tuple[str | bool, int]]:
        """The most frequent texts and booleans of a metadata column; in a large index their numbers are estimates."""
        return ranking.common_values(self._items, column, limit)

    def _view(self, read: Callable[[View], T]) -> T:
        return read(_Moment(self))

    def verify(self, *, show_progress: bool = False) -> list[str]:
        return ranking.faults(self._items, self._meta, self.dimension, show_progress)

    def close(self) -> None:
        self._server.close()

    def _picked(self, ids: Sequence[str], field: str, level: str | None = None) -> dict[str, Row]:
        """Key → row of those ids that are there."""
        return self._items.pick([key_of(id) for id in ids], ["serial", field], level)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around a change, which others see by its number once it is whole."""
        self._check_writable()
        yield
        self._whole.count_change()

    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        self._check_writable()
        fields = ["serial", "pictures", *(["item"] if self._parts.count else [])]
        before = self._items.pick([key_of(one.id) for one in items], fields, STRONG)
        if not replace and before:
            raise self._already(next(one.id for one in items if key_of(one.id) in before))
        made: list[Row] = []
        values: list[tuple[str, str]] = []
        parts: dict[str, list[Row]] = {}
        for serial, one, vector in zip(self._new_serials(len(items)), items, rows, strict=True):
            new, metadata = row(one, vector, serial, picture_rows(one.thumbnail), bool(self._facts["words"]))
            made.append(new)
            parts.setdefault(self._parts.of(metadata), []).append(new)
            values += [(name, kind_of(value)) for name, value in metadata.items()]
        if values:
            self._whole.record_columns(held_kinds(values))
        pairs = zip(made, items, strict=True)
        with self._changing():
            self._whole.put_pictures([(r["pk"], r["serial"], i.thumbnail) for r, i in pairs if i.thumbnail])
            for part, some in parts.items():
                # an update within a partition is one step; one that moves an item is two, and may have to be repeated
                known = [new["pk"] for new in some if part and new["pk"] in before]
                self._items.remove(
                    [pk for pk in known if self._parts.of(item_of(before[pk]).metadata) != part]
                )
                self._items.write(some, part)
            self._whole.remove_pictures(_owners(before.values()))

    def _new_serials(self, count: int) -> range:
        """Numbers for new items: the clock's, so that they grow over all writers, and always above the last."""
        with self._serials:
            first = max(self._serial + 1, time.time_ns())
            self._serial = first + count - 1
        return range(first, first + count)

    def _selection(self, kind: Kind | None, filter: str | Filter | None) -> MilvusSelection:
        if filter is None:
            return select(kind, None, ())
        columns = self._whole.columns()
        return select(kind, parse_filter(filter, columns), columns, self._parts)


@dataclass(frozen=True)
class _Moment:
    """The items of an index, by key; Milvus has no snapshots, so some may be gone when they are read."""

    index: MilvusIndex
    is_mapped = False

    def keys(self, kind: Kind | None, filter: str | Filter | None, size: int | None = None) -> list[str]:
        return ranking.spread_keys(self.index._items, self.index._selection(kind, filter), size)

    def items(self, keys: Sequence[str]) -> list[Item]:
        found = self.index._items.pick([str(key) for key in keys], ["item", "serial"])
        return [item_of(found[key]) for key in keys if key in found]

    def rows(self, keys: Sequence[str]) -> Vectors:
        found = self.index._items.pick([str(key) for key in keys], ["vector", "serial"])
        return vectors_of([found[key] for key in keys if key in found], self.index.dimension)


def _owners(rows: Any) -> list[tuple[str, int, int]]:
    return [(one["pk"], one["serial"], one["pictures"]) for one in rows if one["pictures"]]
