"""One committed moment of an embedded index: its segments, mapped, and which of their rows are gone."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych.index.engines.embedded import connections
from diptych.index.engines.embedded.catalog import replaced
from diptych.index.engines.embedded.checksums import damaged, slot_sum, small_digest
from diptych.index.engines.embedded.segments import FILES, ROW_BITS, RowLayout, Rows, attach
from diptych.index.protocol import Kind, Recall
from diptych.storage import parse_json

RowNumbers = NDArray[np.int64]
Selection = dict[int, RowNumbers]
"""Segment number → sorted rows: what a filter left."""
CODES = ".codes"  # the suffix of a table of binary codes
STALE = 0.2  # share of rows outside or removed from a graph at which it is brought up to date
SAMPLED = 16  # rows of a segment whose length is measured


@dataclass(frozen=True)
class Segment:
    """A segment file at one moment; ``gone`` are the removed rows, sorted."""

    number: int
    kind: Kind
    file: str
    layout: RowLayout
    rows: Rows
    gone: RowNumbers

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def alive(self) -> int:
        return len(self) - len(self.gone)

    @cached_property
    def length(self) -> float:
        """How long the rows are: the longest of a few, spread evenly."""
        rows = np.arange(0, len(self), max(1, -(-len(self) // SAMPLED)), dtype=np.int64)
        some = self.layout.unpack(self.rows.take(rows))
        return float(np.linalg.norm(some, axis=1).max()) if len(some) else 0.0

    @cached_property
    def live_rows(self) -> RowNumbers:
        """The rows that are not removed, sorted."""
        keep = np.ones(len(self), bool)
        keep[self.gone] = False
        return np.flatnonzero(keep)


@dataclass(frozen=True)
class Graph:
    """The approximate index of a kind: its file, and how many rows of each segment it covers."""

    kind: Kind
    file: str
    rows: int
    size: int
    covers: dict[int, int]
    checksum: int
    signature: str = ""  # by the key of whoever made it
    recall: Recall | None = None  # measured when it was built

    @property
    def is_codes(self) -> bool:
        return self.file.endswith(CODES)

    def is_stale(self, state: State) -> bool:
        """Whether so much was added or removed since it was built that it should be brought up to date."""
        segments = state.of_kind(self.kind)
        outside = sum(len(s) - self.covers.get(s.number, 0) for s in segments)
        return outside + sum(len(s.gone) for s in segments) > STALE * self.rows


@dataclass(frozen=True)
class State:
    """What a search reads; within one ``epoch`` (compaction begins the next) a slot never changes."""

    generation: int
    epoch: int
    segments: tuple[Segment, ...]
    last_dead: int
    dead_sum: int  # of the slots that are gone
    graphs: tuple[Graph, ...]

    def of_kind(self, kind: Kind | None) -> tuple[Segment, ...]:
        """The segments that hold a kind, all for None."""
        return tuple(s for s in self.segments if kind is None or s.kind == kind)

    def count(self, kind: Kind | None = None) -> int:
        return sum(s.alive for s in self.of_kind(kind))


def read_state(
    db: sqlite3.Connection, folder: Path, layout: RowLayout, id: str, before: State | None = None
) -> State:
    """The state this transaction sees; what ``before`` knew is kept: a refresh costs what changed.

    Raises when the index here is another than the one of this ``id``.
    """
    keys = "('generation', 'epoch', 'id', 'next_segment', 'dead_sum', 'digest')"
    facts: dict[str, str] = dict(db.execute(f"SELECT key, value FROM meta WHERE key IN {keys}").fetchall())
    if facts.get("id") != id:
        raise replaced(folder)
    if before is not None and str(before.generation) == facts.get("generation"):
        return before
    if facts.get("digest") != small_digest(db):
        raise damaged(folder)
    generation, epoch = (connections.number(folder, facts, name) for name in ("generation", "epoch"))
    if before is not None and before.generation > generation:  # another thread is ahead of this snapshot
        before = None
    known = {s.number: s for s in before.segments} if before is not None and before.epoch == epoch else {}
    last = before.last_dead if before is not None and known else 0
    dead = np.array([slot for (slot,) in connections.rows(db, folder, "dead", (last,))], np.int64)
    last = db.execute("SELECT coalesce(max(serial), 0) FROM dead").fetchone()[0]
    total = slot_sum(dead) + (before.dead_sum if before is not None and known else 0)
    if str(total) != facts.get("dead_sum"):
        raise damaged(folder)
    segments = [
        _segment(db, folder, layout, row, known.get(row[0]), dead)
        for row in connections.rows(db, folder, "segments")
    ]
    if segments and segments[-1].number >= connections.number(folder, facts, "next_segment"):
        raise damaged(folder, "the number of its next segment is taken")
    return State(generation, epoch, tuple(segments), last, total, _read_graphs(db, folder))


def _segment(
    db: sqlite3.Connection,
    folder: Path,
    layout: RowLayout,
    row: tuple[int, Kind, int, str],
    old: Segment | None,
    dead: RowNumbers,
) -> Segment:
    """A segment as the catalog has it now, and what is known of it; ``dead`` are the slots removed since."""
    number, kind, count, file = row
    path = FILES.path(folder, file)
    if file != layout.file(number, kind):  # two would share a file, or read one of other rows
        raise damaged(folder, f"its segment {number} claims the file {file}")
    have = 0 if old is None else len(old)
    if have > count:
        raise damaged(folder, f"its segment {number} has lost rows")
    if old is not None and have == count:
        rows = old.rows
    else:
        rows = attach(path, layout, count, None if old is None else old.rows)
        rows.extend(connections.rows(db, folder, "blocks", (number, have)))
    fresh = dead[dead >> ROW_BITS == number] & ((1 << ROW_BITS) - 1)
    if len(fresh) and fresh.max() >= count:
        raise damaged(folder, f"its segment {number} has fewer rows than were removed")
    gone = old.gone if old is not None else fresh[:0]
    if len(fresh):
        gone = np.union1d(gone, fresh)
    if old is not None and rows is old.rows and gone is old.gone:
        return old
    return Segment(number, kind, file, layout, rows, gone)


def _read_graphs(db: sqlite3.Connection, folder: Path) -> tuple[Graph, ...]:
    graphs = []
    beside = "SELECT key, value FROM meta WHERE key LIKE 'signature-%' OR key LIKE 'recall-%'"
    signed = dict(db.execute(beside).fetchall())
    for kind, file, rows, size, covers, checksum in connections.rows(db, folder, "graphs"):
        name = FILES.path(folder, file).name
        covered = parse_json(covers)
        if not isinstance(covered, dict) or not all(
            key.isdecimal() and len(key) < 12 and type(count) is int and 0 <= count <= connections.MAX_ROWS
            for key, count in covered.items()
        ):
            raise damaged(folder, f"the rows that {name} covers")
        graphs.append(
            Graph(
                kind, name, rows, size, {int(key): count for key, count in covered.items()}, checksum,
                str(signed.get(f"signature-{kind}", "")), Recall.read(signed.get(f"recall-{kind}")),
            )
        )  # fmt: skip
    return tuple(graphs)
