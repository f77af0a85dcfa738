"""One committed moment of an embedded index: its segments, mapped, and which of their rows are gone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.index.embedded.catalog import replaced
from diptych.index.embedded.segments import ROW_BITS, Layout, attach
from diptych.index.protocol import Kind

RowNumbers = NDArray[np.int64]
Selection = dict[int, RowNumbers]
"""Segment number → sorted rows: what a filter left."""
SAMPLED = 16  # rows of a segment whose length is measured


@dataclass(frozen=True)
class Segment:
    """A segment file at one moment; ``gone`` are the removed rows, sorted."""

    number: int
    kind: Kind
    file: str
    layout: Layout
    stored: NDArray[Any]  # (rows, width), memory-mapped
    gone: RowNumbers

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def alive(self) -> int:
        """Rows that are not removed."""
        return len(self.stored) - len(self.gone)

    @cached_property
    def length(self) -> float:
        """How long the rows are: the longest of a few, spread evenly."""
        some = self.layout.unpack(self.stored[:: max(1, -(-len(self) // SAMPLED))])
        return float(np.linalg.norm(some, axis=1).max()) if len(some) else 0.0

    @cached_property
    def live_rows(self) -> RowNumbers:
        """The rows that are not removed, sorted."""
        keep = np.ones(len(self.stored), bool)
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


@dataclass(frozen=True)
class State:
    """What a search reads; within one ``epoch`` (compaction begins the next) a slot never changes."""

    generation: int
    epoch: int
    segments: tuple[Segment, ...]
    last_dead: int
    graphs: tuple[Graph, ...]

    def of_kind(self, kind: Kind | None) -> tuple[Segment, ...]:
        """The segments that hold a kind, all for None."""
        return tuple(s for s in self.segments if kind is None or s.kind == kind)

    def count(self, kind: Kind | None = None) -> int:
        """Items present."""
        return sum(s.alive for s in self.of_kind(kind))


def index_id(facts: Mapping[str, str]) -> str:
    """What tells an index from every other; those made before they had one go by when they were made."""
    return facts.get("id") or facts["created"]


def load_state(
    db: sqlite3.Connection, folder: Path, layout: Layout, id: str, before: State | None = None
) -> State:
    """The state this transaction sees; what ``before`` knew is kept: a refresh costs what changed.

    Raises when the index here is another than the one of this ``id``.
    """
    keys = "('generation', 'epoch', 'id', 'created')"
    facts = dict(db.execute(f"SELECT key, value FROM meta WHERE key IN {keys}").fetchall())
    if index_id(facts) != id:
        raise replaced(folder)
    generation, epoch = int(facts["generation"]), int(facts["epoch"])
    if before is not None and before.generation == generation:
        return before
    if before is not None and before.generation > generation:  # another thread is ahead of this snapshot
        before = None
    known = {s.number: s for s in before.segments} if before is not None and before.epoch == epoch else {}
    last = before.last_dead if before is not None and known else 0
    dead = np.fromiter(
        (slot for (slot,) in db.execute("SELECT slot FROM dead WHERE serial > ?", (last,))), dtype=np.int64
    )
    last = db.execute("SELECT coalesce(max(serial), 0) FROM dead").fetchone()[0]
    segments = []
    for number, kind, rows, file in db.execute(
        "SELECT number, kind, rows, file FROM segments ORDER BY number"
    ):
        old = known.get(number)
        stored = old.stored if old is not None and len(old) == rows else attach(folder / file, layout, rows)
        fresh = dead[dead >> ROW_BITS == number] & ((1 << ROW_BITS) - 1)
        gone = old.gone if old is not None else fresh[:0]
        if len(fresh):
            gone = np.union1d(gone, fresh)
        if old is None or stored is not old.stored or gone is not old.gone:
            old = Segment(number, kind, file, layout, stored, gone)
        segments.append(old)
    graphs = tuple(
        Graph(kind, file, rows, size, {int(k): v for k, v in json.loads(covers).items()})
        for kind, file, rows, size, covers in db.execute("SELECT kind, file, rows, size, covers FROM graphs")
    )
    return State(generation, epoch, tuple(segments), last, graphs)
