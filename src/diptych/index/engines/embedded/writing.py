"""Changes to an embedded index, each in one catalog transaction: vectors first, then what names them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from pathlib import Path

import numpy as np

from diptych.index.engines.embedded import catalog, checksums
from diptych.index.engines.embedded.segments import FILES, ROW_BITS, RowLayout, append, slot_of
from diptych.index.engines.embedded.state import RowNumbers, Segment, State
from diptych.index.protocol import KINDS, Item, Kind, Vectors
from diptych.progress import track

PIECE = 1 << 25  # bytes copied at once while compacting

Moves = dict[Kind, RowNumbers]
"""Kind → (n, 2) of new and old slots: where compaction put the rows of a kind, in the order of both."""


def insert(
    db: sqlite3.Connection, folder: Path, layout: RowLayout, items: Sequence[Item], rows: Vectors
) -> None:
    """Store new items: vectors are on disk when this returns, the rest when the transaction commits."""
    for kind in KINDS:
        chosen = [n for n, item in enumerate(items) if item.kind == kind]
        if chosen:
            packed = layout.pack(rows[chosen])
            slots = [slot for piece in _append(db, folder, layout, kind, packed) for slot in piece]
            catalog.insert_items(db, [items[n] for n in chosen], slots)


def remove(db: sqlite3.Connection, ids: Sequence[str]) -> int:
    """Remove items by id, and the texts of removed images; how many of the ids were there."""
    slots = catalog.slots_of(db, ids)
    catalog.remove_slots(db, slots.values())
    linked = db.execute(
        "SELECT slot FROM items WHERE image_id != '' AND image_id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(slots)),),
    ).fetchall()
    catalog.remove_slots(db, [slot for (slot,) in linked])
    return len(slots)


def compact(
    db: sqlite3.Connection, folder: Path, layout: RowLayout, state: State, show_progress: bool = False
) -> tuple[list[Segment], Moves]:
    """Copy the rows that are left into new segments; the old ones, which are returned, may go once committed."""
    old: list[Segment] = []
    moves: Moves = {}
    for kind in KINDS:
        # from the first that has room on, full ones too: behind the others, its rows would change their order
        whole = lambda s: not len(s.gone) and len(s) >= layout.capacity  # noqa: E731
        segments = list(dropwhile(whole, state.of_kind(kind)))
        if not segments or (len(segments) == 1 and not len(segments[0].gone)):
            continue
        _new_segment(db, layout, kind)
        shown = track(segments, f"segments of {kind}s", None, show_progress)
        moved = [pairs for segment in shown for pairs in _move(db, folder, layout, segment)]
        moves[kind] = np.concatenate([np.zeros((0, 2), np.int64), *moved])
        for segment in segments:
            span = (slot_of(segment.number, 0), slot_of(segment.number + 1, 0))
            db.execute("DELETE FROM segments WHERE number = ?", (segment.number,))
            db.execute("DELETE FROM blocks WHERE segment = ?", (segment.number,))
            db.execute("DELETE FROM dead WHERE slot >= ? AND slot < ?", span)
        db.execute("DELETE FROM segments WHERE rows = 0")
        db.execute(f"INSERT INTO {kind}_words({kind}_words) VALUES ('rebuild')")
        old += segments
    checksums.recount_dead(db)
    if old:
        db.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
    return old, moves


def _move(db: sqlite3.Connection, folder: Path, layout: RowLayout, segment: Segment) -> Iterator[RowNumbers]:
    """Copy what is left of a segment behind the newest one of its kind; (n, 2) of new and old slots, in pieces."""
    step = max(1, PIECE // layout.row_bytes)
    live = segment.live_rows
    for start in range(0, len(live), step):
        rows = live[start : start + step]
        slots = [s for piece in _append(db, folder, layout, segment.kind, segment.take(rows)) for s in piece]
        pairs = list(zip(slots, (rows + (segment.number << ROW_BITS)).tolist(), strict=True))
        checksums.move(db, pairs)
        yield np.array(pairs, np.int64)


def _append(
    db: sqlite3.Connection, folder: Path, layout: RowLayout, kind: Kind, packed: np.ndarray
) -> list[range]:
    """Write stored rows to the last segment of a kind and to new ones as it fills; their slots."""
    slots = []
    while len(packed):
        last = db.execute(
            "SELECT number, rows, file FROM segments WHERE kind = ? ORDER BY number DESC LIMIT 1", (kind,)
        ).fetchone()
        if last is None or last[1] >= layout.capacity:
            last = _new_segment(db, layout, kind)
        number, committed, file = last
        piece = packed[: layout.capacity - committed]
        checksum = append(FILES.path(folder, file), layout, committed, piece)
        db.execute("INSERT INTO blocks VALUES (?, ?, ?, ?)", (number, committed, len(piece), checksum))
        db.execute("UPDATE segments SET rows = rows + ? WHERE number = ?", (len(piece), number))
        slots.append(range(slot_of(number, committed), slot_of(number, committed + len(piece))))
        packed = packed[len(piece) :]
    return slots


def _new_segment(db: sqlite3.Connection, layout: RowLayout, kind: Kind) -> tuple[int, int, str]:
    """Numbers are never used twice: a reader with an old state cannot take one file for another."""
    number = int(db.execute("SELECT value FROM meta WHERE key = 'next_segment'").fetchone()[0])
    file = layout.file(number, kind)
    db.execute("UPDATE meta SET value = value + 1 WHERE key = 'next_segment'")
    db.execute("INSERT INTO segments VALUES (?, ?, 0, ?)", (number, kind, file))
    return number, 0, file
