"""One Milvus collection: rows in, rows out, in requests that Milvus answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from diptych.errors import DiptychError, IndexFault, SettingsError
from diptych.index.engines.milvus.pushdown import MilvusSelection, keys
from diptych.index.engines.milvus.rows import Row, row_bytes
from diptych.index.engines.milvus.server import MilvusClient, Server, TooLarge

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

    def do(self, request: str, *values: Any, seconds: float | None = None, **options: Any) -> Any:
        """The answer of the client to a request about this Milvus collection."""
        return self.server.ask(
            lambda db, limit: getattr(db, request)(self.name, *values, timeout=seconds or limit, **options)
        )

    def exists(self) -> bool:
        return bool(self.do("has_collection"))

    def create(self, schema: Any) -> None:
        """Make the Milvus collection; one of the same schema and description may be there."""
        self.do("create_collection", schema=schema, consistency_level=STRONG)

    def index_type(self) -> str:
        """The kind of index over its vectors, empty without one."""
        names = self.do("list_indexes", "vector")
        found = self.do("describe_index", names[0]) if names else None
        return str((found or {}).get("index_type", "")).lower()

    def make_index(self, field: str, kind: str, metric: str, settings: dict[str, Any] | None = None) -> None:
        """Give a field an index, and wait until it is built; the same one may be there."""
        plan = MilvusClient.prepare_index_params()
        plan.add_index(field, index_type=kind, metric_type=metric, params=settings or {})
        self.do("create_index", plan, seconds=BUILDING)

    def drop_index(self) -> None:
        """Take the vectors out of memory and their index away; until ``load`` nothing can be read."""
        self.do("release_collection")
        for name in self.do("list_indexes", "vector"):
            self.do("drop_index", name)

    def is_loaded(self) -> bool:
        state = str(self.do("get_load_state").get("state"))
        return "Loaded" in state and "NotLoad" not in state

    def load(self, replicas: int = 1) -> None:
        """Make it readable, in the memory of ``replicas`` query nodes."""
        try:
            self.do("load_collection", replica_number=replicas, seconds=BUILDING)
        except DiptychError as error:
            few = ("not enough", "insufficient", "resource group")
            if replicas > 1 and any(words in str(error.__cause__ or error) for words in few):
                raise SettingsError(
                    f"{self.server.label} has too few query nodes for replicas={replicas}: ask for fewer, or add "
                    "query nodes to the cluster."
                ) from error
            raise

    def write(self, rows: Sequence[Row], partition: str = "") -> None:
        """Write rows, replacing those of the same keys; what was written before an error stays written."""
        for piece in _pieces(rows):
            self.do("upsert", list(piece), partition_name=partition)

    def remove(self, found: Sequence[str]) -> None:
        for start in range(0, len(found), PIECE):
            self.do("delete", filter=keys("pk", list(found[start : start + PIECE])))

    def flush(self) -> None:
        """Close the segments that still grow: an index is built over closed ones."""
        self.do("flush", seconds=BUILDING)

    def count(self, expression: str, level: str | None = None) -> int:
        """Rows that an expression selects."""
        found = self._query(expression, ["count(*)"], level)
        return int(found[0]["count(*)"])

    def pick(self, names: Sequence[str], fields: Sequence[str], level: str | None = None) -> dict[str, Row]:
        """Key → row of those keys that are there."""
        out: dict[str, Row] = {}
        waiting = [list(names[start : start + PIECE]) for start in range(0, len(names), PIECE)]
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
        field: str,
        queries: list[Any],
        count: int,
        selection: MilvusSelection,
        fields: Sequence[str],
        about: dict[str, Any],
    ) -> list[list[Row]]:
        """For each query the ``count`` best rows by the server's arithmetic, best first, with their ``score``.

        A query is a vector, or for the field ``weights`` a text: then rows without a word of it are left out. Only the
        partitions of the selection are read, where it names some.
        """
        found = self.do(
            "search",
            data=queries,
            anns_field=field,
            limit=count,
            filter=selection.expression,
            output_fields=["pk", *fields],
            partition_names=list(selection.parts) or None,
            search_params=about,
            consistency_level=self.level,
        )
        return [[{**hit["entity"], "score": hit["distance"]} for hit in hits] for hits in found]

    def _query(self, expression: str, fields: list[str], level: str | None) -> list[Row]:
        limit = {} if fields == ["count(*)"] else {"limit": MOST}
        level = level or self.level
        return list(
            self.do("query", filter=expression, output_fields=fields, consistency_level=level, **limit)
        )


def _pieces(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    start, size = 0, 0
    for n, one in enumerate(rows):
        size += row_bytes(one)
        if size > REQUEST and n > start:
            yield rows[start:n]
            start, size = n, row_bytes(one)
    if len(rows) > start:
        yield rows[start:]
