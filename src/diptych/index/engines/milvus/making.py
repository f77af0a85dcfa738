"""Making an index in Milvus and finding it again: its two Milvus collections, their indexes, and what they say."""

from __future__ import annotations

import json
import uuid
from typing import Any

from diptych.errors import IndexFault, SettingsError
from diptych.index.engines.milvus.address import Address, Graph
from diptych.index.engines.milvus.pushdown import Parts
from diptych.index.engines.milvus.rows import fact_fields, item_fields
from diptych.index.engines.milvus.server import OLDEST, MilvusClient, Server
from diptych.index.engines.milvus.table import Table

FORMAT = (
    "diptych index 1"  # at the beginning of a collection's description; raised when old ones cannot be read
)
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
        raise IndexFault(f"{server.label} is already an index: open it, or choose another name.")
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
    about, label = str(items.describe().get("description", "")), items.server.label
    if not about.startswith("diptych index "):
        raise IndexFault(
            f"{label} is a Milvus collection of something else: choose another name for the index."
        )
    if not about.startswith(f"{FORMAT} "):
        theirs, ours = about.split()[2], FORMAT.split()[2]
        raise IndexFault(
            f"{label} has index format {theirs}, this version reads {ours}: update diptych, or index the collection "
            "again."
        )
    facts: dict[str, str] = json.loads(about.removeprefix(FORMAT))
    return facts


def prepare(items: Table, meta: Table, facts: dict[str, str], writable: bool) -> Graph:
    """The kind of index of the vectors, made if a creator did not come to it; after this the index can be read."""
    address, label = items.server.address, items.server.label
    if not meta.exists():
        raise IndexFault(
            f"{label} is incomplete (its Milvus collection {meta.name} is missing): restore both, or index the "
            "collection again under another name."
        )
    _check_partitions(address, facts, label)
    made = set(items.partitions()) if facts["partition_by"] else set()
    for name in Parts(int(facts["partitions"]), facts["partition_by"]).names:
        if name not in made:
            items.make_partition(name)
    graph = items.index_type()
    if not graph:
        graph = address.graph or "flat"
        items.make_index(graph, BUILD[graph])
    if facts["words"]:
        items.make_words_index()
    if not meta.index_type():
        meta.make_index("flat", {})
    if not meta.is_loaded():
        meta.load()
    if not items.is_loaded():
        items.load(address.replicas)
    elif address.replicas > 1 and (there := items.replicas()) != address.replicas:
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
        items.make_index(after, BUILD[after])
        items.load(replicas)
    except BaseException:
        items.drop_index()
        items.make_index(before, BUILD[before])
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
