"""Filters over a million items in milliseconds: columns held as arrays, read once, then extended.

A slot never changes its item between two compactions, so a column only ever grows. Numbers are float64; every
other value is an entry of a dictionary, tested once, whatever the number of items that share it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from diptych.index import deadline
from diptych.index.capabilities import most_frequent
from diptych.index.engines.embedded.catalog import COLUMNS, item_of, known_columns, metadata_of
from diptych.index.engines.embedded.checksums import damaged
from diptych.index.engines.embedded.segments import slot_of
from diptych.index.engines.embedded.state import Segment, Selection, State
from diptych.index.protocol import EXACT_INTEGER, Kind, kind_of
from diptych.index.query.filters import ITEM_COLUMNS, ORDERS, And, Condition, Filter, Not, parse_filter
from diptych.storage import parse_json

MASKS = 32  # selections remembered
PIECE = 20_000  # rows read from the catalog at once
TESTED = 32  # values of a dictionary between two looks at the clock
COMPARISONS = {**ORDERS, "=": eq, "in": eq}  # of numbers
Mask = NDArray[np.bool_]
Reader = Callable[[int, int], Iterator[tuple[int, Any]]]
"""Reads (row, value) of the rows of a segment from a first one up to another."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The values of some first rows of a segment in one column, as they were read; nothing in it changes."""

    numbers: NDArray[np.float64]
    codes: NDArray[np.int32]  # −1: no entry of the dictionary
    values: list[Any]  # the dictionary; it may grow behind the first ``known`` entries
    known: int

    def mask(self, condition: Condition) -> Mask:
        if condition.operator == "null":
            return np.asarray(np.isnan(self.numbers) & (self.codes < 0))
        test = condition.predicate()
        # one entry more than the dictionary, always False: where the code −1 lands
        table = np.zeros(self.known + 1, bool)
        for code in range(self.known):
            if code % TESTED == 0:
                deadline.check()
            table[code] = test(self.values[code])
        found: Mask = table[self.codes]
        compare = COMPARISONS.get(condition.operator)
        for value in condition.values:
            if compare is not None and kind_of(value) == "number":
                found |= compare(self.numbers, float(value))
        return found


@dataclass
class ReadCells:
    """What was read of one segment: its first ``filled`` rows, the last of them at ``generation``."""

    numbers: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    codes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    filled: int = 0
    generation: int = 0


class MetadataColumn:
    """One column by segment and row, read a piece at a time; safe to share between threads.

    Its lock is held while a piece is read, never while a condition is tested.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: defaultdict[int, ReadCells] = defaultdict(ReadCells)
        self._values: list[Any] = []
        self._code_of: dict[str, int] = {}

    def cells(self, segment: int, rows: int, generation: int, read: Reader) -> Cells | None:
        """The first ``rows`` of a segment, read as far as they are not yet; None when they were read later than
        ``generation``: rows that are still there for this reader may have been gone by then."""
        while True:
            with self._lock:
                known = self._segments[segment]
                if known.generation > generation:
                    return None
                if known.filled >= rows:
                    return Cells(known.numbers[:rows], known.codes[:rows], self._values, len(self._values))
                stop = min(rows, known.filled + PIECE)
                self._extend(known, rows, read(known.filled, stop))
                known.filled, known.generation = stop, generation
            deadline.check()

    def _extend(self, known: ReadCells, rows: int, cells: Iterator[tuple[int, Any]]) -> None:
        """Note (row, value) of new rows; what was handed out before is never written to."""
        if len(known.numbers) < rows:
            numbers, codes = np.full(rows, np.nan), np.full(rows, -1, np.int32)
            numbers[: known.filled] = known.numbers[: known.filled]
            codes[: known.filled] = known.codes[: known.filled]
            known.numbers, known.codes = numbers, codes
        numbers, codes = known.numbers, known.codes
        for row, value in cells:
            if value is None:
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < EXACT_INTEGER:
                numbers[row] = value
            else:
                codes[row] = self._code(value)

    def _code(self, value: Any) -> int:
        key = json.dumps(value)  # 1, true and "1" are three values
        if key not in self._code_of:
            self._values.append(value)
            self._code_of[key] = len(self._values) - 1
        return self._code_of[key]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a filter is asked of."""

    db: sqlite3.Connection
    generation: int
    epoch: int
    known: dict[str, tuple[str, ...]]  # the metadata columns


class MetadataColumns:
    """The columns filters have asked for so far, and the selections they led to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._epoch = -1
        self._columns: dict[tuple[str, bool], MetadataColumn] = {}  # (name, whether it is metadata)
        self._selections: OrderedDict[tuple[str, Kind | None, int], Selection] = OrderedDict()

    def select(
        self, state: State, db: sqlite3.Connection, filter: str | Filter, kind: Kind | None
    ) -> Selection:
        """The rows, by segment, of the items that are present and pass a filter."""
        key = (filter if isinstance(filter, str) else repr(filter), kind, state.generation)
        with self._lock:
            if key in self._selections:
                self._selections.move_to_end(key)
                return self._selections[key]
        known = known_columns(db, self._folder)
        tree = parse_filter(filter, known)
        snapshot = _Snapshot(db, state.generation, state.epoch, known)
        selection: Selection = {}
        for segment in state.of_kind(kind):
            mask = self._mask(tree, segment, snapshot)
            mask[segment.gone] = False
            selection[segment.number] = np.flatnonzero(mask)
        with self._lock:
            self._selections[key] = selection
            while len(self._selections) > MASKS:
                self._selections.popitem(last=False)
        return selection

    def values(
        self, state: State, db: sqlite3.Connection, column: str, limit: int
    ) -> list[tuple[str | bool, int]]:
        snapshot = _Snapshot(db, state.generation, state.epoch, known_columns(db, self._folder))
        counts: Counter[str | bool] = Counter()
        for segment in state.segments if column in snapshot.known else ():
            cells = self._cells(column, segment, snapshot)
            found, times = np.unique(cells.codes[segment.live_rows], return_counts=True)
            for code, count in zip(found.tolist(), times.tolist(), strict=True):
                if code >= 0 and isinstance(value := cells.values[code], str | bool):
                    counts[value] += count
        return most_frequent(counts, limit)

    def _mask(self, tree: Filter, segment: Segment, snapshot: _Snapshot) -> Mask:
        deadline.check()
        if isinstance(tree, Condition):
            return self._cells(tree.column, segment, snapshot).mask(tree)
        if isinstance(tree, Not):
            return ~self._mask(tree.one, segment, snapshot)
        first, *rest = tree.all if isinstance(tree, And) else tree.any
        combined = self._mask(first, segment, snapshot)
        join = np.logical_and if isinstance(tree, And) else np.logical_or
        for part in rest:
            join(combined, self._mask(part, segment, snapshot), out=combined)
        return combined

    def _cells(self, name: str, segment: Segment, snapshot: _Snapshot) -> Cells:
        metadata = name not in ITEM_COLUMNS or name in snapshot.known
        number, rows = segment.number, len(segment)

        def read(start: int, stop: int) -> Iterator[tuple[int, Any]]:
            return _cells(snapshot.db, name, metadata, number, start, stop)

        with self._lock:
            if snapshot.epoch > self._epoch:
                self._columns, self._epoch = {}, snapshot.epoch
            own = snapshot.epoch == self._epoch
            column = self._columns.setdefault((name, metadata), MetadataColumn()) if own else MetadataColumn()
        found = column.cells(number, rows, snapshot.generation, read)
        # None: another thread read it later
        return found or cast(Cells, MetadataColumn().cells(number, rows, snapshot.generation, read))


def _cells(
    db: sqlite3.Connection, name: str, metadata: bool, segment: int, start: int, stop: int
) -> Iterator[tuple[int, Any]]:
    wanted = "slot, metadata, metadata_checksum" if metadata else COLUMNS
    rows = db.execute(
        f"SELECT {wanted} FROM items WHERE slot >= ? AND slot < ? ORDER BY slot LIMIT ?",
        (slot_of(segment, start), slot_of(segment, stop), stop - start),
    )
    piece, first = rows.fetchall(), slot_of(segment, 0)
    if metadata:  # one parse for the piece: several times faster than one for each row
        parsed = parse_json(f"[{','.join(metadata_of(*row) for row in piece)}]")
        if len(parsed) != len(piece) or not all(isinstance(one, dict) for one in parsed):
            raise damaged("the metadata of some items of the index", "")
        yield from ((row[0] - first, one.get(name)) for row, one in zip(piece, parsed, strict=True))
    else:
        yield from ((row[0] - first, getattr(item_of(row), name) or None) for row in piece)
