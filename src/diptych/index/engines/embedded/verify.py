"""Reading everything an embedded index has and comparing it with what it says of itself."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from diptych import databases
from diptych.errors import IndexFault
from diptych.index.engines.embedded import catalog, checksums, connections
from diptych.index.engines.embedded.segments import FILES, RowLayout, checksum, slot_of
from diptych.index.engines.embedded.state import Segment, State
from diptych.index.protocol import KINDS
from diptych.progress import track


def verify(
    state: State, db: sqlite3.Connection, folder: Path, layout: RowLayout, show_progress: bool = False
) -> list[str]:
    """One sentence per fault, none when all is well."""
    lines = [line for (found,) in db.execute("PRAGMA integrity_check") for line in str(found).splitlines()]
    lines = [line for line in lines if line != "ok" and "FTS5" not in line]  # the full text is compared below
    faults = [f"the catalog is damaged: {line}." for line in lines if not line.startswith("***")]
    if faults:  # the rows of such pages might never end
        return faults
    for segment in track(state.segments, "segments of vectors", None, show_progress):
        try:
            path = FILES.path(folder, segment.file)
            faults += _blocks(db, path, layout, segment)
        except IndexFault as error:
            faults.append(str(error))
        span = (slot_of(segment.number, 0), slot_of(segment.number, len(segment)))
        items = _count(db, "SELECT count(*) FROM items WHERE slot >= ? AND slot < ?", span)
        if items != segment.alive:
            faults.append(
                f"{segment.file} has {segment.alive} live rows, but the catalog lists {items} items there."
            )
    faults += _sums(db, folder)
    total = _count(db, "SELECT count(*) FROM items")
    if total != state.count():
        faults.append(f"the catalog lists {total} items, but {state.count()} rows of vectors are live.")
    both = _count(db, "SELECT count(*) FROM dead WHERE slot IN (SELECT slot FROM items)")
    if both:
        faults.append(f"{both} removed items are still in the catalog.")
    for kind in KINDS:
        words = _count(db, f"SELECT count(*) FROM {kind}_words_docsize")
        if words != state.count(kind):
            faults.append(f"the full text covers {words} of {state.count(kind)} {kind} items.")
    for graph in state.graphs:
        try:
            path = FILES.path(folder, graph.file)
        except IndexFault as error:  # something else lies there since
            faults.append(str(error))
            continue
        if not path.is_file() or path.stat().st_size != graph.size:
            faults.append(f"the approximate index {graph.file} is missing or cut short: build it again.")
        elif checksum(path, 0, graph.size) != graph.checksum:
            faults.append(f"the approximate index {graph.file} is damaged: build it again.")
    return faults


def _sums(db: sqlite3.Connection, folder: Path) -> list[str]:
    """Faults of items, thumbnails, full text and the small tables."""
    faults = []
    readers = (
        (f"SELECT {catalog.COLUMNS} FROM items", catalog.item_of),
        ("SELECT slot, jpeg, checksum FROM thumbnails", catalog.jpeg_of),
    )
    for query, read in readers:
        for row in db.execute(query):
            try:
                read(row)
            except (IndexFault, ValueError, TypeError) as error:
                faults.append(str(error))
    stray = _count(db, "SELECT count(*) FROM thumbnails WHERE slot NOT IN (SELECT slot FROM items)")
    if stray:
        faults.append(f"{stray} thumbnails belong to no item.")
    facts = connections.facts(db, folder)
    if facts.get("columns_digest") != checksums.columns_digest(db):
        faults.append("the list of metadata columns is damaged.")
    return faults + _word_faults(folder)


def _word_faults(folder: Path) -> list[str]:
    """What is wrong with the full text, compared with the texts of the items: one sentence per fault.

    To ask for it, SQLite wants a database that may be written: this one, or a copy of it. Nothing is written.
    """
    path = folder / connections.FILE
    source = connections.connect_reader(path)
    db = source
    try:
        faults = []
        try:
            db = connections.connect_checked(path, "rw")
            db.execute("PRAGMA busy_timeout = 1000")
            db.execute("BEGIN IMMEDIATE")
        except (sqlite3.Error, IndexFault):  # also one with a second name, which would change
            if db is not source:
                db.close()
            size = _count(source, "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
            if size > databases.size_on_disk(path):  # SQLite makes no holes
                return [f"the catalog claims {size} bytes, most of which were never written."]
            db = sqlite3.connect("", isolation_level=None)  # on disk, where memory is short
            source.backup(db)
            db.execute("BEGIN IMMEDIATE")
        with connections.limited(db, path):
            for kind in KINDS:
                try:
                    db.execute(f"INSERT INTO {kind}_words({kind}_words, rank) VALUES ('integrity-check', 1)")
                except sqlite3.DatabaseError as error:
                    faults.append(f"the full text of {kind} items is damaged ({error}).")
        if db.in_transaction:
            db.execute("ROLLBACK")
        return faults
    finally:
        db.close()
        source.close()


def _blocks(db: sqlite3.Connection, path: Path, layout: RowLayout, segment: Segment) -> list[str]:
    if not path.is_file():
        return [f"{path.name} is missing."]
    faults, at = [], 0
    for start, count, expected in connections.rows(db, path.parent, "blocks", (segment.number, 0)):
        if start != at:
            faults.append(f"{path.name} has no checksum for rows {at} to {start}.")
        if checksum(path, start * layout.row_bytes, count * layout.row_bytes) != expected:
            faults.append(f"{path.name} is damaged between rows {start} and {start + count}.")
        at = start + count
    if at != len(segment):
        faults.append(f"{path.name} has checksums for {at} of its {len(segment)} rows.")
    return faults


def _count(db: sqlite3.Connection, query: str, values: tuple[int, ...] = ()) -> int:
    return int(db.execute(query, values).fetchone()[0])
