"""What belongs to an index in Milvus as a whole: how it is made, and facts that writers record without a lock.

Each kind of fact is a set that only grows or a counter that only its owner changes, so two writers never undo each
other: a column and a kind of value it holds is a row; a change is counted in a row of the writer's own, and the
generation is the sum; the number of a collection is the place of its partition among all, which the server orders.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from diptych.errors import IndexFault, SettingsError
from diptych.index.engines.milvus.address import Address, Graph
from diptych.index.engines.milvus.pushdown import Parts, column_of, keys
from diptych.index.engines.milvus.rows import Row, fact_fields, item_fields
from diptych.index.engines.milvus.server import OLDEST, MilvusClient, Server
from diptych.index.engines.milvus.table import STRONG, Table
from diptych.index.protocol import INCOMPLETE, OTHER, TAKEN, Collection, Recall, grown_columns, other_format

PICTURE_BYTES = 48_000  # bytes of a thumbnail in one row: 64,000 characters as text
_CLAIM = "collection_"


class IndexFacts:
    """The rows of ``NAME_facts``; where they may be many, their keys begin with hexadecimal digits."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._writer, self._changes = uuid.uuid4().hex, 0
        self._lock = threading.Lock()

    def generation(self) -> int:
        """How many changes there were, of all writers."""
        return sum(int(value) for value in self._values("writer"))

    def count_change(self) -> None:
        """Make the generation grow; called after a change, so that who sees the number sees the change."""
        with self._lock:
            self._changes += 1
            self._put([(f"{self._writer}:writer", "writer", str(self._changes))])

    def columns(self, level: str | None = None) -> dict[str, tuple[str, ...]]:
        found: dict[str, set[str]] = {}
        for value in self._values("column", level):
            name, kind = json.loads(value)
            found.setdefault(name, set()).update({kind} - {""})
        return {name: tuple(sorted(kinds)) for name, kinds in sorted(found.items())}

    def record_columns(self, held: Mapping[str, set[str]]) -> None:
        """Add columns and kinds of value that are not known yet."""
        new = grown_columns(self.columns(STRONG), held)
        self._put([_column(name, kind) for name, kinds in new.items() for kind in kinds or {""}])

    def keep_columns(self, held: Mapping[str, set[str]]) -> None:
        """Forget what is known of columns beyond these."""
        kept = {_column(name, kind)[0] for name, kinds in held.items() for kind in {*kinds, ""}}
        self._put([_column(name, kind) for name, kinds in held.items() for kind in kinds or {""}])
        self.table.remove([row["pk"] for row in self._rows("column", STRONG) if row["pk"] not in kept])

    def collections(self, level: str | None = None) -> tuple[Collection, ...]:
        found = (Collection(*json.loads(value)) for value in self._values("collection", level))
        return tuple(sorted(found, key=lambda one: one.number))

    def add_collection(self, name: str, root: str) -> Collection:
        """Record a collection; writers that do so at once agree on its number, and no other has it."""
        others = {one.number for one in self.collections(STRONG) if (one.name, one.root) != (name, root)}
        turn = 0
        # a number may be that of a collection that was here and moved on
        while (number := self._claim(name, root, turn)) in others:
            turn += 1
        self.move_collection(number, name, root)
        return Collection(number, name, root)

    def move_collection(self, number: int, name: str, root: str) -> None:
        self._put([(f"collection:{number}", "collection", json.dumps([number, name, root]))])

    def forget_collection(self, number: int) -> None:
        """Remove the record of a collection; its number stays taken."""
        self.table.remove([f"collection:{number}"])

    def _claim(self, name: str, root: str, turn: int) -> int:
        facts = [name, root, turn] if turn else [name, root]
        claim = _CLAIM + hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
        # it may be there; partitions are listed in the order they were made
        self.table.do("create_partition", claim)
        return [one for one in self.table.do("list_partitions") if one.startswith(_CLAIM)].index(claim)

    def recalls(self) -> dict[str, Recall]:
        found = {row["pk"].removeprefix("recall:"): Recall.read(row["value"]) for row in self._rows("recall")}
        return {kind: recall for kind, recall in found.items() if recall is not None}

    def keep_recall(self, kind: str, recall: Recall) -> None:
        self._put([(f"recall:{kind}", "recall", recall.to_json())])

    def put_pictures(self, pictures: Sequence[tuple[str, int, bytes]]) -> None:
        """Store thumbnails of (key, serial, JPEG); each belongs to the item of that serial alone."""
        self._put(
            [
                (
                    name,
                    "picture",
                    base64.b64encode(data[n * PICTURE_BYTES : (n + 1) * PICTURE_BYTES]).decode(),
                )
                for key, serial, data in pictures
                for n, name in enumerate(picture_keys(key, serial, picture_rows(data)))
            ]
        )

    def picture(self, key: str, serial: int, count: int) -> bytes | None:
        """The thumbnail that ``count`` rows hold; None when one is missing."""
        names = picture_keys(key, serial, count)
        found = self.table.pick(names, ["value"])
        if not names or len(found) < count:
            return None
        return b"".join(base64.b64decode(found[name]["value"]) for name in names)

    def remove_pictures(self, owners: Sequence[tuple[str, int, int]]) -> None:
        self.table.remove([name for owner in owners for name in picture_keys(*owner)])

    def stray_pictures(self, owners: set[tuple[str, int]]) -> list[str]:
        """The keys of thumbnails whose item is gone, or was replaced."""
        rows = (row for piece in self.table.rows(keys("what", ["picture"]), []) for row in piece)
        named = ((row["pk"], *row["pk"].split(":")) for row in rows)
        return [name for name, key, serial, _ in named if (key, int(serial, 16)) not in owners]

    def _put(self, rows: Sequence[tuple[str, str, str]]) -> None:
        self.table.write(
            [{"pk": pk, "what": what, "value": value, "vector": [0.0, 0.0]} for pk, what, value in rows]
        )

    def _rows(self, what: str, level: str | None = None) -> list[Row]:
        return self.table.all_rows(keys("what", [what]), ["value"], level)

    def _values(self, what: str, level: str | None = None) -> list[Any]:
        return [row["value"] for row in self._rows(what, level)]


def picture_rows(data: bytes | None) -> int:
    """The rows that a thumbnail takes."""
    return -(-len(data or b"") // PICTURE_BYTES)


def picture_keys(key: str, serial: int, count: int) -> list[str]:
    """The keys of the rows that hold a thumbnail."""
    return [f"{key}:{serial:016x}:{n:02x}" for n in range(count)]


def _column(name: str, kind: str) -> tuple[str, str, str]:
    return f"{column_of(name, False)}:{kind}:column", "column", json.dumps([name, kind])


# at the beginning of a collection's description; raised when old ones cannot be read
FORMAT = "diptych index 1"
WORDS = (2, 5)  # the version of Milvus that has full-text search
BUILD: dict[str, dict[str, Any]] = {"flat": {}, "hnsw": {"M": 16, "efConstruction": 200}, "diskann": {}}


def tables(server: Server) -> tuple[Table, Table]:
    """The Milvus collections of an index: its items, and the facts about the whole."""
    name, level = server.address.index, server.address.consistency
    return Table(server, name, level), Table(server, f"{name}_facts", level)


def check_graph(server: Server, graph: str | None) -> None:
    """Raise when a server cannot build such an index: one that cannot tries for ever, and says nothing."""
    if graph == "diskann" and "lite" in server.version:
        raise SettingsError(
            f"the server of {server.label} is Milvus {server.version.lstrip('v')}, which is built without DiskANN: use "
            f"index=hnsw, or a full server of {OLDEST[0]}.{OLDEST[1]} or newer."
        )


def make(server: Server, facts: dict[str, str]) -> None:
    """Make the Milvus collections of a new index; one that is already there is refused."""
    items, meta = tables(server)
    if items.exists():
        read_facts(items)
        raise IndexFault(TAKEN.format(server.label))
    check_graph(server, server.address.graph)
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    fact_fields(schema)
    meta.create(schema)
    # of two that create it at once, the server takes one: their descriptions differ
    words = server.has(WORDS)
    about = f"{FORMAT} {json.dumps({**facts, 'words': 'bm25' if words else '', 'made': uuid.uuid4().hex})}"
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False, description=about)
    item_fields(schema, int(facts["dimension"]), words)
    items.create(schema)


def read_facts(items: Table) -> dict[str, str]:
    """The facts in the description of a Milvus collection; raises when it is none of ours."""
    about, label = str(items.do("describe_collection").get("description", "")), items.server.label
    if not about.startswith("diptych index "):
        raise IndexFault(OTHER.format(label, "a Milvus collection"))
    if not about.startswith(f"{FORMAT} "):
        raise other_format(label, about.split()[2], FORMAT.split()[2])
    facts: dict[str, str] = json.loads(about.removeprefix(FORMAT))
    return facts


def prepare(items: Table, meta: Table, facts: dict[str, str], writable: bool) -> Graph:
    """The kind of index of the vectors, made if a creator did not come to it; after this the index can be read."""
    address, label = items.server.address, items.server.label
    if not meta.exists():
        raise IndexFault(INCOMPLETE.format(label, f"its Milvus collection {meta.name} is missing"))
    _check_partitions(address, facts, label)
    made = set(items.do("list_partitions")) if facts["partition_by"] else set()
    for name in Parts(int(facts["partitions"]), facts["partition_by"]).names:
        if name not in made:
            items.do("create_partition", name)
    graph = items.index_type()
    if not graph:
        graph = address.graph or "flat"
        items.make_index("vector", graph.upper(), "IP", BUILD[graph])
    if facts["words"]:
        items.make_index("weights", "SPARSE_INVERTED_INDEX", "BM25")
    if not meta.index_type():
        meta.make_index("vector", "FLAT", "IP")
    if not meta.is_loaded():
        meta.load()
    if not items.is_loaded():
        items.load(address.replicas)
    elif address.replicas > 1 and (there := len(items.do("describe_replica"))) != address.replicas:
        raise SettingsError(
            f"{label} is in the memory of {there} query nodes, not {address.replicas}: leave replicas= out of its URL, "
            "or release it in Milvus first."
        )
    if address.graph not in (None, graph) and not writable:
        raise SettingsError(
            f"{label} has index={graph}, not {address.graph}: leave index= out of its URL, or build the other with "
            "'diptych index MODEL PATH --approximate'."
        )
    return graph  # type: ignore[return-value]


def change_graph(items: Table, before: Graph, after: Graph) -> None:
    """Give the vectors another kind of index; nothing can be read meanwhile, and a failure brings the old one back."""
    replicas = items.server.address.replicas
    check_graph(items.server, after)
    items.flush()
    items.drop_index()
    try:
        items.make_index("vector", after.upper(), "IP", BUILD[after])
        items.load(replicas)
    except BaseException:
        items.drop_index()
        items.make_index("vector", before.upper(), "IP", BUILD[before])
        items.load(replicas)
        raise


def _check_partitions(address: Address, facts: dict[str, str], label: str) -> None:
    for name in ("partitions", "partition_by"):
        given, kept = getattr(address, name), facts[name]
        if given and str(given) != kept:
            told = f"{name}={kept}" if kept not in ("", "0") else "no partitions"
            raise SettingsError(
                f"{label} was made with {told}, not {name}={given}: leave partitions out of its URL."
            )
