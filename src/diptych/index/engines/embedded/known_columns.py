"""The metadata columns that the catalog knows: recorded as items come, counted again at compaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from diptych.errors import IndexFault
from diptych.index.metadata import check_column_count, held_kinds
from diptych.index.protocol import Item
from diptych.index.query.filters import kind_of
from diptych.storage import parse_json

_KINDS = {  # kinds of metadata, by SQLite's names of JSON types
    "integer": "number", "real": "number", "text": "text", "true": "boolean", "false": "boolean",
    "array": "list", "null": "null",
}  # fmt: skip


def record_columns(db: sqlite3.Connection, items: Sequence[Item]) -> None:
    """Add the columns of new items to those that are known."""
    values = ((str(name), value) for item in items for name, value in item.metadata.items())
    bare = ((name, value.tolist() if hasattr(value, "tolist") else value) for name, value in values)
    found = db.execute("SELECT name, kinds FROM columns").fetchall()
    known = {name: set(column_kinds(kinds)) for name, kinds in found}
    held = held_kinds((name, kind_of(value)) for name, value in bare)
    if held.keys() - known.keys():
        check_column_count(len(held.keys() | known.keys()))
    for name, kinds in held.items():
        kinds = kinds | known.get(name, set())
        if name not in known or kinds != known[name]:
            db.execute("INSERT OR REPLACE INTO columns VALUES (?, ?)", (name, json.dumps(sorted(kinds))))


def column_kinds(kinds: str) -> list[str]:
    """The kinds of value that a column has held, from their record."""
    try:
        found: Any = parse_json(kinds)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(kind in _KINDS.values() for kind in found):
        raise IndexFault(
            f"the record of a metadata column of the index is damaged ({kinds[:40]!a}): copy the whole index again, "
            "or index the collection again."
        )
    return [str(kind) for kind in found]


def recount_columns(db: sqlite3.Connection) -> None:
    """Record the columns that items have now, and forget those of items that are gone."""
    found = db.execute("SELECT DISTINCT key, type FROM items, json_each(metadata)")
    kinds = held_kinds((name, _KINDS.get(kind, "null")) for name, kind in found)  # no object is written
    db.execute("DELETE FROM columns")
    rows = ((name, json.dumps(sorted(held))) for name, held in kinds.items())
    db.executemany("INSERT INTO columns VALUES (?, ?)", rows)


def common_values(db: sqlite3.Connection, column: str, limit: int) -> list[tuple[str | bool, int]]:
    """The most frequent texts and booleans of a metadata column; equally frequent ones in order."""
    query = (
        "SELECT type, value, count(*) FROM items, json_each(metadata) WHERE key = ? "
        "AND type IN ('text', 'true', 'false') GROUP BY type, value ORDER BY count(*) DESC, value LIMIT ?"
    )
    rows = db.execute(query, (column, limit)).fetchall()
    return [(value if kind == "text" else bool(value), count) for kind, value, count in rows]
