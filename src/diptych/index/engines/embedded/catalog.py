"""The rows of the catalog: items with their full text and thumbnails, metadata columns, which rows are gone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diptych.errors import IndexFault
from diptych.index.engines.embedded import checksums, connections
from diptych.index.engines.embedded.connections import FILE
from diptych.index.protocol import Item, grown_columns, held_kinds, kind_of, plain, record
from diptych.storage import parse_json

_KINDS = {  # kinds of metadata, by SQLite's names of JSON types
    "integer": "number", "real": "number", "text": "text", "true": "boolean", "false": "boolean",
    "array": "list", "null": "null",
}  # fmt: skip


def known_columns(db: sqlite3.Connection, folder: Path) -> dict[str, tuple[str, ...]]:
    """The metadata columns and the kinds of value each has held."""
    return {name: tuple(parse_json(kinds)) for name, kinds in connections.rows(db, folder, "columns")}


def record_columns(db: sqlite3.Connection, folder: Path, items: Sequence[Item]) -> None:
    """Add the columns of new items to those that are known."""
    held = held_kinds(
        (str(name), kind_of(plain(item.id, name, value)))
        for item in items
        for name, value in item.metadata.items()
    )
    rows = grown_columns(known_columns(db, folder), held).items()
    new = ((name, json.dumps(kinds)) for name, kinds in rows)
    db.executemany("INSERT OR REPLACE INTO columns VALUES (?, ?)", new)


def recount_columns(db: sqlite3.Connection) -> None:
    """Record the columns that items have now, and forget those of items that are gone."""
    found = db.execute("SELECT DISTINCT key, type FROM items, json_each(metadata)")
    kinds = held_kinds((name, _KINDS.get(kind, "null")) for name, kind in found)  # no object is written
    db.execute("DELETE FROM columns")
    rows = ((name, json.dumps(sorted(held))) for name, held in kinds.items())
    db.executemany("INSERT INTO columns VALUES (?, ?)", rows)


COLUMNS = "slot, id, kind, path, text, image_id, metadata, content, collection, checksum, metadata_checksum"


def check_present(folder: Path) -> None:
    """Raise when a folder is not an index at all."""
    if not folder.is_dir():
        raise IndexFault(
            f"{folder} is no folder: give one of pictures, or an index that 'diptych index' wrote."
        )
    if not (folder / FILE).is_file():
        raise IndexFault(
            f"{folder} is not an index (no {FILE}): give the folder that 'diptych index' wrote, "
            "or index a collection there."
        )


def replaced(folder: Path) -> IndexFault:
    """The refusal to go on with an index in whose place there is another."""
    return IndexFault(
        f"{folder} was replaced by another index while it was open: open it again (a service: start it again)."
    )


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another that was put in its place; None when there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def items_at(db: sqlite3.Connection, slots: Sequence[int]) -> list[Item | None]:
    """The items at these slots, in their order; None where a slot holds no item any more."""
    rows = _select(db, "slot", slots)
    found = {row[0]: item_of(row) for row in rows}
    return [found.get(slot) for slot in slots]


def items_of(db: sqlite3.Connection, ids: Sequence[str]) -> dict[str, Item]:
    """id → item of those ids that are present."""
    return {row[1]: item_of(row) for row in _select(db, "id", ids)}


def slots_of(db: sqlite3.Connection, ids: Sequence[str]) -> dict[str, int]:
    """id → slot of those ids that are present."""
    query = "SELECT id, slot FROM items WHERE id IN (SELECT value FROM json_each(?))"
    return dict(db.execute(query, (_key_list(ids),)).fetchall())


def thumbnail_of(db: sqlite3.Connection, id: str) -> bytes | None:
    """The stored JPEG of an item."""
    query = (
        "SELECT slot, jpeg, thumbnails.checksum FROM thumbnails JOIN items USING (slot) "
        "WHERE id IN (SELECT value FROM json_each(?))"
    )
    row = db.execute(query, (_key_list([id]),)).fetchone()
    return None if row is None else jpeg_of(row)


def insert_items(db: sqlite3.Connection, items: Sequence[Item], slots: Sequence[int]) -> None:
    """Rows, words and thumbnails of new items."""
    records = [record(item) for item in items]
    marks = ", ".join("?" * 11)
    db.executemany(
        f"INSERT INTO items({COLUMNS}) VALUES ({marks})",
        ((slot, *r, *_sums(slot, r)) for slot, r in zip(slots, records, strict=True)),
    )
    for kind in sorted({item.kind for item in items}):
        words = ((s, i.text) for s, i in zip(slots, items, strict=True) if i.kind == kind)
        db.executemany(f"INSERT INTO {kind}_words(rowid, text) VALUES (?, ?)", words)
    thumbnails = (
        (s, i.thumbnail, checksums.sum_of_bytes(s, i.thumbnail))
        for s, i in zip(slots, items, strict=True)
        if i.thumbnail is not None
    )
    db.executemany("INSERT INTO thumbnails VALUES (?, ?, ?)", thumbnails)


def remove_slots(db: sqlite3.Connection, slots: Iterable[int]) -> None:
    """Take items out: their words and rows go, their vectors are marked dead until compaction."""
    slots = list(slots)
    checksums.count_dead(db, slots)
    for slot in slots:
        kind, text = db.execute("SELECT kind, text FROM items WHERE slot = ?", (slot,)).fetchone()
        if not connections.kind(kind) or not connections.text(text):
            raise checksums.damaged(f"an item of the index (slot {slot})", "")
        db.execute(
            f"INSERT INTO {kind}_words({kind}_words, rowid, text) VALUES ('delete', ?, ?)", (slot, text)
        )
        db.execute("DELETE FROM items WHERE slot = ?", (slot,))
        db.execute("DELETE FROM thumbnails WHERE slot = ?", (slot,))
        db.execute("INSERT INTO dead(slot) VALUES (?)", (slot,))


def _select(db: sqlite3.Connection, column: str, keys: Sequence[Any]) -> list[tuple[Any, ...]]:
    query = f"SELECT {COLUMNS} FROM items WHERE {column} IN (SELECT value FROM json_each(?))"
    return db.execute(query, (_key_list(keys),)).fetchall()


def _key_list(keys: Sequence[Any]) -> str:
    """Keys as JSON; one with a NUL, at which SQLite would cut it off and find another, is in no index."""
    return json.dumps([key for key in keys if not isinstance(key, str) or "\x00" not in key])


def item_of(row: tuple[Any, ...]) -> Item:
    """The item of a row of ``COLUMNS``, compared with its checksums."""
    slot, id, kind, path, text, image_id, metadata, content, collection = row[:9]
    if not connections.is_item(row) or _sums(slot, row[1:9]) != row[9:]:
        raise checksums.damaged(f"the item {str(id)[:200]!a} of the index", "")
    columns = parse_json(metadata)
    if not isinstance(columns, dict):
        raise checksums.damaged(f"the metadata of '{id}' of the index", "")
    return Item(id, kind, path, text, image_id, columns, content, collection)


def metadata_of(slot: int, metadata: str, checksum: int) -> str:
    """The metadata of a slot as JSON, compared with its checksum."""
    # a JSON object, so that several of them make a list of as many
    if not isinstance(metadata, str) or checksums.sum_of(slot, metadata) != checksum or metadata[:1] != "{":
        raise checksums.damaged(f"the metadata of an item of the index (slot {slot})", "")
    return metadata


def jpeg_of(row: tuple[int, bytes, int]) -> bytes:
    """The thumbnail of (slot, bytes, checksum)."""
    slot, data, checksum = row
    if not isinstance(data, bytes) or checksums.sum_of_bytes(slot, data) != checksum:  # bytes(n) allocates n
        raise checksums.damaged(f"a thumbnail of the index (slot {slot})", "")
    return data


def _sums(slot: int, record: tuple[Any, ...]) -> tuple[int, int]:
    """The checksums of an item, of all but its metadata and of that."""
    return checksums.sum_of(slot, *record[:5], *record[6:]), checksums.sum_of(slot, record[5])
