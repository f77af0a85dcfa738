"""An index in Milvus: vectors, metadata and filters on a server or a cluster, behind the same protocol.

Exact search (``index=flat``) scans the vectors on the server and scores the best again in float64 here, so it returns
what the embedded engine returns on the same items. Milvus has no transactions: an operation that has returned is
durable and whole, but while one runs, readers may see some of its items already. Every change can be repeated without
harm, so one that failed half way is finished by trying again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from diptych.errors import IndexFault, SettingsError
from diptych.index.base import Engine, Samples, check_k, check_limit, held_kinds, new_facts
from diptych.index.engines.milvus import facts, ranking
from diptych.index.engines.milvus.address import read_address
from diptych.index.engines.milvus.facts import IndexFacts, picture_rows
from diptych.index.engines.milvus.pushdown import EVERY, KIND_NUMBERS, Parts, Wanted, key_of, keys, wanted
from diptych.index.engines.milvus.ranking import Nearest, best_words, check_depth
from diptych.index.engines.milvus.rows import (
    Row,
    check_storable,
    item_of,
    row,
    vectors_of,
)
from diptych.index.engines.milvus.server import Server
from diptych.index.engines.milvus.table import STRONG, drop_quietly
from diptych.index.protocol import KINDS, Collection, Hits, IndexInfo, Item, Kind, Pair, Precision, Vectors
from diptych.index.query.filters import Filter, kind_of, parse_filter
from diptych.index.query.words import words_of
from diptych.progress import track


class MilvusIndex(Engine):
    """An index in Milvus: many writers, many readers. Safe to share between threads.

    A server that goes away makes requests fail with ``Unavailable``; the first one after it is back works again.
    """

    path: str

    def __init__(self, url: str, *, writable: bool = False) -> None:
        self._address = read_address(url)
        self._server, self._writable = Server(self._address), writable
        self.path = self._server.label
        self._items, self._meta = facts.tables(self._server)
        self._facts_of_index = IndexFacts(self._meta)
        self._samples, self._serial, self._serials = Samples(), 0, threading.Lock()
        try:
            self._facts = facts.read_facts(self._items)
            self._dimension = int(self._facts["dimension"])
            self._parts = Parts(int(self._facts["partitions"]), self._facts["partition_by"])
            self._graph = facts.prepare(self._items, self._meta, self._facts, writable)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls,
        url: str,
        dimension: int,
        *,
        model: str = "",
        fingerprint: str = "",
        precision: Precision = "float32",
    ) -> MilvusIndex:
        """A new, empty index, open for writing; an index that is already there is refused."""
        check_storable(dimension, precision)
        address = read_address(url)
        about = {
            **new_facts(dimension, precision, model, fingerprint),
            "partitions": str(address.partitions),
            "partition_by": address.partition_by,
        }
        server = Server(address)
        try:
            facts.make(server, about)
            try:
                return cls(url, writable=True)
            except SettingsError:  # options that this server cannot meet: leave nothing behind
                for table in facts.tables(server):
                    drop_quietly(table)
                raise
        finally:
            server.close()

    @staticmethod
    def exists(url: str) -> bool:
        """Whether there is an index to open."""
        server = Server(read_address(url))
        try:
            return facts.tables(server)[0].exists()
        finally:
            server.close()

    @property
    def info(self) -> IndexInfo:
        """What the index says of itself; the size is that of the vectors, Milvus tells no other."""
        counts = self._counts()
        return self._info(
            "milvus",
            counts=counts,
            deleted=0,
            size=4 * self._dimension * sum(counts.values()),
            columns=self._facts_of_index.columns(),
            collections=self._facts_of_index.collections(),
            approximate={} if self._graph == "flat" else {kind: n for kind, n in counts.items() if n},
        )

    @property
    def generation(self) -> int:
        """A number that grows with every change."""
        return self._facts_of_index.generation()

    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        """Items present, of one kind or of all; with a filter, those that pass."""
        if filter is None:
            return self._items.count(wanted(kind, None, ()).expression)
        return ranking.passing(self._items, self._wanted(kind, filter))

    # ------------------------------------------------------------------ changing

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items by id and say how many were there; texts of a removed image go with it."""
        self._check_writable()
        found = self._items.pick([key_of(id) for id in ids], ["serial", "pictures"], STRONG)
        gone = dict(found)
        images = list(found)
        for start in range(0, len(images), 1_000):
            for piece in self._items.rows(
                keys("image", images[start : start + 1_000]), ["serial", "pictures"]
            ):
                gone |= {one["pk"]: one for one in piece}
        if gone:
            self._items.remove(list(gone))
            self._facts_of_index.remove_pictures(_owners(gone.values()))
        self._facts_of_index.count_change()
        return len(found)

    def collection(self, name: str, root: str = "") -> Collection:
        """The collection of this name and root, recorded if it is new."""
        found = self._facts_of_index.find_collection(name, root, STRONG)
        if found is None:
            self._check_writable()
            found = self._facts_of_index.add_collection(name, root)
            self._facts_of_index.count_change()
        return found

    def move_collection(self, number: int, name: str, root: str) -> None:
        """Give a collection another name and root; its items stay as they are."""
        self._check_writable()
        self._facts_of_index.move_collection(number, name, root)
        self._facts_of_index.count_change()

    def forget_collection(self, number: int) -> None:
        """Remove the record of a collection that has no items any more; one that has is left alone."""
        self._check_writable()
        if not self._items.count(f"collection == {int(number)}", STRONG):
            self._facts_of_index.forget_collection(number)
            self._facts_of_index.count_change()

    def build_graph(
        self, kind: Kind = "image", *, codes: bool | None = None, show_progress: bool = False
    ) -> None:
        """Make the approximate index that the URL names (of both kinds); from then on it follows every change."""
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
            return
        for _ in track([kind], "approximate index", 1, show_progress):
            facts.change_graph(self._items, self._graph, asked)
            self._graph = asked
        self._facts_of_index.count_change()

    def compact(self, *, show_progress: bool = False) -> int:
        """Forget columns and thumbnails of items that are gone; the server gives their space back in its own time."""
        self._check_writable()
        held: dict[str, set[str]] = {}
        owners: set[tuple[str, int]] = set()
        pieces = self._items.rows(EVERY, ["item", "serial", "pictures"], ranking.ITEM_BYTES)
        for piece in track(pieces, "pieces of the index", None, show_progress):
            for one in piece:
                values = ((name, kind_of(value)) for name, value in item_of(one).metadata.items())
                for name, kinds in held_kinds(values).items():
                    held.setdefault(name, set()).update(kinds)
            owners |= {(one["pk"], one["serial"]) for one in piece if one["pictures"]}
        self._facts_of_index.keep_columns(held)
        self._meta.remove(self._facts_of_index.stray_pictures(owners))
        self._facts_of_index.count_change()
        self._items.flush()
        self._items.compact()
        return 0

    # ------------------------------------------------------------------ reading

    def get(self, ids: Sequence[str]) -> list[Item | None]:
        """The items of these ids, None where absent."""
        found = self._items.pick([key_of(id) for id in ids], ["item", "serial"])
        items = {one.id: one for one in map(item_of, found.values())}
        return [items.get(id) for id in ids]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        """The stored vectors (len(ids), dimension) of items that must be present."""
        found = self._items.pick([key_of(id) for id in ids], ["vector", "serial"])
        self._check_present(ids, {id for id in ids if key_of(id) in found})
        return vectors_of([found[key_of(id)] for id in ids], self._dimension)

    def thumbnail(self, id: str) -> bytes | None:
        """The stored JPEG of an item, if it has one."""
        key = key_of(id)
        found = self._items.pick([key], ["serial", "pictures"]).get(key)
        return self._facts_of_index.picture(key, found["serial"], found["pictures"]) if found else None

    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        """(id, content) of every item of a collection, for a re-index to compare."""
        one_kind = "" if kind is None else f" and kind == {KIND_NUMBERS[kind]}"
        for piece in self._items.rows(
            f"collection == {int(collection)}{one_kind}", ["item"], ranking.ITEM_BYTES
        ):
            yield from ((one.id, one.content) for one in map(item_of, piece))

    def search_many(
        self,
        vectors: Any,
        k: int = 10,
        *,
        kind: Kind | None = None,
        filter: str | Filter | None = None,
        exact: bool | None = None,
    ) -> list[Hits]:
        """``search`` for each row of (queries, dimension); with an approximate index, filtered searches use it too."""
        queries = self._checked(vectors, "the query")
        check_k(k)
        check_depth(k)
        if exact is False and self._graph == "flat":
            raise self._no_graph(kind)
        if exact and self._graph != "flat":
            raise IndexFault(
                f"{self.path} is searched through its {self._graph.upper()} index alone: an exact search needs an "
                "index made with index=flat in its URL."
            )
        return Nearest(self._items, self._dimension, self._graph)(queries, k, self._wanted(kind, filter))

    def search_words(
        self, text: str, k: int = 10, *, kind: Kind | None = None, filter: str | Filter | None = None
    ) -> Hits:
        """The k best items by the server's BM25 over their texts, where it has it: from Milvus 2.5 on."""
        check_k(k)
        check_depth(k)
        if not self._facts["words"]:
            self._server.needs(facts.WORDS, "full-text search (--hybrid)")
            raise SettingsError(
                f"{self.path} was made by a server without full-text search: index the collection again under another "
                "name, or search without --hybrid."
            )
        words = " ".join(words_of(text))
        return best_words(self._items, words, k, self._wanted(kind, filter)) if words else Hits()

    def values(self, column: str, limit: int = 50) -> list[tuple[str | bool, int]]:
        """The most frequent texts and booleans of a metadata column; in a large index their numbers are estimates."""
        return ranking.common_values(self._items, column, limit)

    def sample(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 4096
    ) -> Vectors:
        """Vectors of up to ``size`` items spread evenly over the index, the same for the same state."""

        def make() -> Vectors:
            chosen = ranking.spread(self._items, self._wanted(kind, filter), size)
            found = self._items.pick(chosen, ["vector", "serial"])
            return vectors_of([found[key] for key in chosen if key in found], self._dimension)

        return self._samples.get((self.generation, kind, repr(filter), size), make)

    def sample_items(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 24
    ) -> list[Item]:
        """The items whose vectors ``sample`` gives, in the same order."""
        chosen = ranking.spread(self._items, self._wanted(kind, filter), size)
        found = self._items.pick(chosen, ["item", "serial"])
        return [item_of(found[key]) for key in chosen if key in found]

    def near_duplicates(
        self,
        *,
        kind: Kind = "image",
        threshold: float | None = None,
        limit: int = 100,
        show_progress: bool = False,
    ) -> list[Pair]:
        """The ``limit`` best pairs, best first; with ``threshold``, only those that reach it.

        The vectors of the kind are brought here for it: the server has no way to compare all with all.
        """
        check_limit(limit)
        return ranking.pairs(
            self._items, wanted(kind, None, ()), self._dimension, threshold, limit, show_progress
        )

    def verify(self, *, show_progress: bool = False) -> list[str]:
        """Read everything and compare it with its checksums: one sentence per fault."""
        return ranking.faults(self._items, self._meta, self._dimension, show_progress)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._server.close()

    # ------------------------------------------------------------------ inside

    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        self._check_writable()
        known = ["serial", "pictures", *(["item"] if self._parts.count else [])]
        before = self._items.pick([key_of(one.id) for one in items], known, STRONG)
        if not replace and before:
            raise self._already(next(one.id for one in items if key_of(one.id) in before))
        made: list[Row] = []
        held: dict[str, set[str]] = {}
        parts: dict[str, list[Row]] = {}
        for serial, one, vector in zip(self._new_serials(len(items)), items, rows, strict=True):
            new, metadata = row(one, vector, serial, picture_rows(one.thumbnail), bool(self._facts["words"]))
            made.append(new)
            parts.setdefault(self._parts.of(metadata), []).append(new)
            for name, kinds in held_kinds((n, kind_of(v)) for n, v in metadata.items()).items():
                held.setdefault(name, set()).update(kinds)
        if held:
            self._facts_of_index.record_columns(held)
        self._facts_of_index.put_pictures(
            [(r["pk"], r["serial"], i.thumbnail) for r, i in zip(made, items, strict=True) if i.thumbnail]
        )
        for part, some in parts.items():
            # an update within a partition is one step; one that moves an item is two, and may have to be repeated
            self._items.remove([new["pk"] for new in some if self._is_elsewhere(before.get(new["pk"]), part)])
            self._items.write(some, part)
        self._facts_of_index.remove_pictures(_owners(before.values()))
        self._facts_of_index.count_change()

    def _is_elsewhere(self, before: Row | None, part: str) -> bool:
        return part != "" and before is not None and self._parts.of(item_of(before).metadata) != part

    def _new_serials(self, count: int) -> range:
        """Numbers for new items: the clock's, so that they grow over all writers, and always above the last."""
        with self._serials:
            first = max(self._serial + 1, time.time_ns())
            self._serial = first + count - 1
        return range(first, first + count)

    def _root(self, collection: int) -> str:
        return {one.number: one.root for one in self._facts_of_index.collections()}.get(collection, "")

    def _counts(self) -> dict[str, int]:
        return {kind: self.count(kind) for kind in KINDS}

    def _wanted(self, kind: Kind | None, filter: str | Filter | None) -> Wanted:
        if filter is None:
            return wanted(kind, None, ())
        columns = self._facts_of_index.columns()
        tree = parse_filter(filter, columns) if isinstance(filter, str) else filter
        return wanted(kind, tree, columns, self._parts)

    def _check_writable(self) -> None:
        if not self._writable:
            raise IndexFault(
                f"{self.path} is open for reading only: open it with writable=True to change it."
            )


def _owners(rows: Any) -> list[tuple[str, int, int]]:
    return [(one["pk"], one["serial"], one["pictures"]) for one in rows if one["pictures"]]
