"""Checksums of the catalog: what is read of it is what was written, or an error.

SQLite notices a page that is no page; a bit that changed inside a text it hands out as it is. So each item has two
sums, of its metadata (which filters read alone) and of the rest, each thumbnail one, the removed slots one together,
and the few rows that say what the index is one. The slot is part of each: items that swap slots are noticed.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.errors import IndexFault
from diptych.index.engines.embedded.segments import ANEW, FILES

_SMALL = (
    "SELECT * FROM meta WHERE key NOT IN ('digest', 'columns_digest') ORDER BY key",
    "SELECT * FROM segments ORDER BY number",
    "SELECT * FROM graphs ORDER BY kind",
    "SELECT * FROM collections ORDER BY number",
)
_COLUMNS = "SELECT * FROM columns ORDER BY name"
_LOW = 0xFFFFFFFF
_XOR = "({0} | :both) - ({0} & :both)"  # SQLite has no operator for it


def damaged(what: str | Path, why: str = "its catalog") -> IndexFault:
    """The refusal of something that is not what was written; ``why`` may be empty."""
    return IndexFault(f"{what} is damaged{f' ({why})' * bool(why)}: {ANEW}")


def check_length(path: Path) -> None:
    """Raise when a database that nobody writes is shorter than its first page says: SQLite fills up with zeros."""
    if has_log(path):
        return
    with os.fdopen(FILES.open(path), "rb") as file:
        head = file.read(100)
        size = file.seek(0, 2)
    page = int.from_bytes(head[16:18], "big")
    page = 65_536 if page == 1 else page
    if len(head) == 100 and head[24:28] == head[92:96] and size < page * int.from_bytes(head[28:32], "big"):
        raise IndexFault(f"{path} is damaged or half copied (it has only {size} bytes): {ANEW}")


def log_of(path: Path) -> Path:
    """The file of SQLite's log."""
    return path.with_name(path.name + "-wal")


def has_log(path: Path) -> bool:
    """Whether something was written that is not in the database yet."""
    log = log_of(path)
    return log.exists() and log.stat().st_size > 0


def sum_of(slot: int, *fields: object) -> int:
    """The checksum of some fields of the item at a slot."""
    data = "\x1f".join(map(str, fields)).encode("utf-8", "surrogatepass")
    return zlib.crc32(data) ^ _mixed(slot)


def sum_of_bytes(slot: int, data: bytes) -> int:
    """The checksum of a blob of the item at a slot."""
    return zlib.crc32(data) ^ _mixed(slot)


def move(db: sqlite3.Connection, pairs: Sequence[tuple[int, int]]) -> None:
    """Put items and thumbnails at new slots; (new, old) of each."""
    rows = [{"new": new, "old": old, "both": _mixed(new) ^ _mixed(old)} for new, old in pairs]
    sums = ", ".join(f"{name} = {_XOR.format(name)}" for name in ("checksum", "metadata_checksum"))
    db.executemany(f"UPDATE items SET slot = :new, {sums} WHERE slot = :old", rows)
    db.executemany(
        f"UPDATE thumbnails SET slot = :new, checksum = {_XOR.format('checksum')} WHERE slot = :old", rows
    )


def slot_sum(slots: NDArray[np.int64] | Iterable[int]) -> int:
    """The checksum of removed slots, in any order: those of two lists add up."""
    array = slots if isinstance(slots, np.ndarray) else np.fromiter(slots, np.int64)
    return int((array & _LOW).sum()) + 1_000_003 * int((array >> 32).sum())


def count_dead(db: sqlite3.Connection, slots: Iterable[int]) -> None:
    """Add removed slots to their checksum."""
    db.execute("UPDATE meta SET value = value + ? WHERE key = 'dead_sum'", (slot_sum(slots),))


def recount_dead(db: sqlite3.Connection) -> None:
    """Compute the checksum of removed slots again, after some are forgotten."""
    total = slot_sum(slot for (slot,) in db.execute("SELECT slot FROM dead"))
    db.execute("UPDATE meta SET value = ? WHERE key = 'dead_sum'", (str(total),))


def seal(db: sqlite3.Connection) -> None:
    """Record the checksums of the small tables, before a commit."""
    db.execute("INSERT OR REPLACE INTO meta VALUES ('columns_digest', ?)", (columns_digest(db),))
    db.execute("INSERT OR REPLACE INTO meta VALUES ('digest', ?)", (small_digest(db),))


def small_digest(db: sqlite3.Connection) -> str:
    """The checksum of what the index says of itself."""
    return _digest(row for query in _SMALL for row in db.execute(query))


def columns_digest(db: sqlite3.Connection) -> str:
    """The checksum of the list of metadata columns."""
    return _digest(db.execute(_COLUMNS))


def _digest(rows: Iterable[tuple[Any, ...]]) -> str:
    crc = 0
    for row in rows:
        crc = zlib.crc32(repr(row).encode("utf-8", "surrogatepass"), crc)
    return str(crc)


def _mixed(slot: int) -> int:
    return (slot ^ slot >> 32) * 0x9E3779B1 & _LOW
