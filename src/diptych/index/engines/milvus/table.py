"""One Milvus collection: rows in, rows out, in requests that Milvus answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from diptych.errors import IndexFault, SettingsError
from diptych.index.engines.milvus.pushdown import keys
from diptych.index.engines.milvus.rows import Row, row_bytes
from diptych.index.engines.milvus.server import MilvusException, Server, TooLarge
from diptych.index.protocol import Vectors

MOST = 16_384  # rows of one answer: Milvus's limit
PIECE = 1_000  # keys named in one request
REQUEST = 16_000_000  # bytes of one request or answer, about; Milvus takes and sends 64 MB at most
BUILDING = 86_400.0  # seconds for a request that works through all rows: an index, a load
WHOLE = 0x10000  # number of values of a key's first four digits: ranges of them divide a table into pieces
STRONG = "Strong"


class Table:
    """The rows of a Milvus collection, by their primary keys of hexadecimal digits.

    ``level`` is the consistency of reads that do not say otherwise.
    """

    def __init__(self, server: Server, name: str, level: str) -> None:
        self.server, self.name, self.level = server, name, level

    # ------------------------------------------------------------------ making

    def exists(self) -> bool:
        """Whether the Milvus collection is there."""
        return bool(self.server.ask(lambda db, seconds: db.has_collection(self.name, timeout=seconds)))

    def create(self, schema: Any) -> None:
        """Make the Milvus collection; one of the same schema and description may be there."""
        self.server.ask(
            lambda db, seconds: db.create_collection(
                self.name, schema=schema, consistency_level=STRONG, timeout=seconds
            )
        )

    def drop(self) -> None:
        """Remove the Milvus collection."""
        self.server.ask(lambda db, seconds: db.drop_collection(self.name, timeout=seconds))

    def describe(self) -> dict[str, Any]:
        """What the server says of it."""
        found: dict[str, Any] = self.server.ask(
            lambda db, seconds: db.describe_collection(self.name, timeout=seconds)
        )
        return found

    def index_type(self) -> str:
        """The kind of index over its vectors, empty without one."""
        found = self.server.ask(self._describe_index)
        return str((found or {}).get("index_type", "")).lower()

    def make_index(self, kind: str, settings: dict[str, Any]) -> None:
        """Give its vectors an index, and wait until it is built; the same one may be there."""

        def make(db: Any, seconds: float) -> None:
            wanted = db.prepare_index_params()
            wanted.add_index("vector", index_type=kind.upper(), metric_type="IP", params=settings)
            db.create_index(self.name, wanted, timeout=BUILDING)

        self.server.ask(make)

    def make_words_index(self) -> None:
        """Give the texts an index for BM25; it may be there."""

        def make(db: Any, seconds: float) -> None:
            wanted = db.prepare_index_params()
            wanted.add_index("weights", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25")
            db.create_index(self.name, wanted, timeout=BUILDING)

        self.server.ask(make)

    def drop_index(self) -> None:
        """Take the vectors out of memory and their index away; until ``load`` nothing can be read."""

        def drop(db: Any, seconds: float) -> None:
            db.release_collection(self.name, timeout=seconds)
            for name in db.list_indexes(self.name, "vector", timeout=seconds):
                db.drop_index(self.name, name, timeout=seconds)

        self.server.ask(drop)

    def is_loaded(self) -> bool:
        """Whether it can be read now."""
        found = self.server.ask(lambda db, seconds: db.get_load_state(self.name, timeout=seconds))
        return "Loaded" in str(found.get("state")) and "NotLoad" not in str(found.get("state"))

    def load(self, replicas: int = 1) -> None:
        """Make it readable, in the memory of ``replicas`` query nodes."""

        def load(db: Any, seconds: float) -> None:
            try:
                db.load_collection(self.name, replica_number=replicas, timeout=BUILDING)
            except MilvusException as error:
                if replicas > 1 and (
                    any(words in error.message for words in ("not enough", "insufficient", "resource group"))
                ):
                    raise SettingsError(
                        f"{self.server.label} has too few query nodes for replicas={replicas}: ask for fewer, or add "
                        "query nodes to the cluster."
                    ) from error
                raise

        self.server.ask(load)

    def replicas(self) -> int:
        """How many copies of it are in the memory of query nodes."""
        return len(self.server.ask(lambda db, seconds: db.describe_replica(self.name, timeout=seconds)))

    def _describe_index(self, db: Any, seconds: float) -> dict[str, Any] | None:
        names = db.list_indexes(self.name, "vector", timeout=seconds)
        return db.describe_index(self.name, names[0], timeout=seconds) if names else None

    # ------------------------------------------------------------------ writing

    def write(self, rows: Sequence[Row], partition: str = "") -> None:
        """Write rows, replacing those of the same keys; what was written before an error stays written."""
        for piece in _pieces(rows):
            self.server.ask(partial(self._upsert, list(piece), partition))

    def remove(self, found: Sequence[str]) -> None:
        """Remove rows by key."""
        for start in range(0, len(found), PIECE):
            some = keys("pk", list(found[start : start + PIECE]))
            self.server.ask(partial(self._delete, some))

    def flush(self) -> None:
        """Close the segments that still grow: an index is built over closed ones."""
        self.server.ask(lambda db, seconds: db.flush(self.name, timeout=BUILDING))

    def compact(self) -> None:
        """Let the server merge segments and drop removed rows, in its own time."""
        self.server.ask(lambda db, seconds: db.compact(self.name, timeout=seconds))

    # ------------------------------------------------------------------ reading

    def count(self, expression: str, level: str | None = None) -> int:
        """Rows that an expression selects."""
        found = self._query(expression, ["count(*)"], level)
        return int(found[0]["count(*)"])

    def pick(self, wanted: Sequence[str], fields: Sequence[str], level: str | None = None) -> dict[str, Row]:
        """Key → row of those keys that are there."""
        out: dict[str, Row] = {}
        waiting = [list(wanted[start : start + PIECE]) for start in range(0, len(wanted), PIECE)]
        while waiting:
            some = waiting.pop()
            try:
                found = self._query(keys("pk", some), ["pk", *fields], level)
            except TooLarge:
                if len(some) == 1:
                    raise
                waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
                continue
            for row in found:
                # a server killed in an update may show a row twice until it is repeated
                before = out.get(row["pk"])
                if before is None or before.get("serial", 0) <= row.get("serial", 0):
                    out[row["pk"]] = row
        return out

    def rows(
        self, expression: str, fields: Sequence[str], row_size: int = 500, level: str | None = None
    ) -> Iterator[list[Row]]:
        """Every row that an expression selects, piece by piece, in no order; ``row_size`` bytes each, about.

        A piece is a range of keys: those of items are digests, so equal ranges hold about equally many.
        """
        total = self.count(expression, level)
        piece = max(1, min(MOST // 2, REQUEST // row_size))
        count = min(WHOLE, -(-total // piece)) if total else 0
        waiting = [(n * WHOLE // count, (n + 1) * WHOLE // count) for n in range(count)][::-1]
        while waiting:
            first, last = waiting.pop()
            above = f'pk >= "{first:04x}"' if first else 'pk >= ""'
            below = f' and pk < "{last:04x}"' if last < WHOLE else ""
            try:
                found = self._query(f"({expression}) and {above}{below}", ["pk", *fields], level)
                full = len(found) >= MOST
            except TooLarge:
                full = True
            if full and last - first > 1:
                waiting += [((first + last) // 2, last), (first, (first + last) // 2)]
            elif full:
                raise IndexFault(
                    f"{self.server.label} holds more rows of one key than it can send: shorten them."
                )
            else:
                yield found

    def all_rows(self, expression: str, fields: Sequence[str], level: str | None = None) -> list[Row]:
        """Every row that an expression selects, which are few; in no order."""
        found = self._query(expression, ["pk", *fields], level)
        if len(found) < MOST:
            return found
        return [row for piece in self.rows(expression, fields, level=level) for row in piece]

    def search(
        self,
        queries: Vectors,
        count: int,
        expression: str,
        fields: Sequence[str],
        settings: dict[str, Any],
        parts: Sequence[str] = (),
    ) -> list[list[Row]]:
        """For each query the ``count`` best rows by the server's arithmetic, best first, with their ``score``.

        Only the partitions ``parts`` are read, where some are named.
        """
        about = {"metric_type": "IP", "params": settings}
        return self._search("vector", list(queries), count, expression, fields, about, parts)

    def search_words(
        self, text: str, count: int, expression: str, fields: Sequence[str], parts: Sequence[str] = ()
    ) -> list[Row]:
        """The ``count`` best rows by the server's BM25, best first, with their ``score``; others have no word of it."""
        about = {"metric_type": "BM25"}
        (found,) = self._search("weights", [text], count, expression, fields, about, parts)
        return found

    def partitions(self) -> list[str]:
        """The names of its partitions, in the order in which they were made."""
        return list(self.server.ask(lambda db, seconds: db.list_partitions(self.name, timeout=seconds)))

    def make_partition(self, name: str) -> None:
        """Make a partition; it may be there."""
        self.server.ask(lambda db, seconds: db.create_partition(self.name, name, timeout=seconds))

    def _search(
        self,
        field: str,
        queries: list[Any],
        count: int,
        expression: str,
        fields: Sequence[str],
        about: dict[str, Any],
        parts: Sequence[str],
    ) -> list[list[Row]]:
        found = self.server.ask(
            lambda db, seconds: db.search(
                self.name,
                data=queries,
                anns_field=field,
                limit=count,
                filter=expression,
                output_fields=["pk", *fields],
                partition_names=list(parts) or None,
                search_params=about,
                consistency_level=self.level,
                timeout=seconds,
            )
        )
        return [[{**hit["entity"], "score": hit["distance"]} for hit in hits] for hits in found]

    def _upsert(self, rows: list[Row], partition: str, db: Any, seconds: float) -> None:
        db.upsert(self.name, rows, timeout=seconds, partition_name=partition)

    def _delete(self, expression: str, db: Any, seconds: float) -> None:
        db.delete(self.name, filter=expression, timeout=seconds)

    def _query(self, expression: str, fields: list[str], level: str | None) -> list[Row]:
        limit = {} if fields == ["count(*)"] else {"limit": MOST}
        found: Iterable[Row] = self.server.ask(
            lambda db, seconds: db.query(
                self.name,
                filter=expression,
                output_fields=fields,
                consistency_level=level or self.level,
                timeout=seconds,
                **limit,
            )
        )
        return list(found)


def drop_quietly(table: Table) -> None:
    """Remove a Milvus collection that was being made, whatever state it is in."""
    with suppress(IndexFault):
        table.drop()


def _pieces(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    start, size = 0, 0
    for n, one in enumerate(rows):
        size += row_bytes(one)
        if size > REQUEST and n > start:
            yield rows[start:n]
            start, size = n, row_bytes(one)
    if len(rows) > start:
        yield rows[start:]
