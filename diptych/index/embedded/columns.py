"""Filters over a million items in milliseconds: columns held as arrays, read once, then extended.

A slot never changes its item between two compactions, so a column only ever grows. Numbers are float64; every
other value is an entry of a dictionary, tested once, whatever the number of items that share it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.index.embedded.segments import slot_of
from diptych.index.embedded.state import Segment, Selection, State
from diptych.index.filters import ITEM_COLUMNS, And, Condition, Filter, Not, parse_filter
from diptych.index.metadata import EXACT_INTEGER
from diptych.index.protocol import Kind

MASKS = 32  # selections remembered
PIECE = 20_000  # rows read from the catalog at once
Mask = NDArray[np.bool_]


class Column:
    """The values of one column by segment and row; a code of −1 is no entry of the dictionary."""

    def __init__(self) -> None:
        self.numbers: dict[int, NDArray[np.float64]] = {}
        self.codes: dict[int, NDArray[np.int32]] = {}
        self.values: list[Any] = []
        self.read_at: dict[int, int] = {}  # segment → the newest generation its rows were read at
        self._code_of: dict[str, int] = {}

    def extend(self, segment: int, rows: int, cells: Iterator[tuple[int, Any]]) -> None:
        """Grow a segment to ``rows`` with (row, value) of its new rows."""
        before = len(self.numbers.get(segment, ()))
        numbers = np.full(rows, np.nan)
        codes = np.full(rows, -1, np.int32)
        numbers[:before] = self.numbers.get(segment, ())
        codes[:before] = self.codes.get(segment, ())
        for row, value in cells:
            if value is None:
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < EXACT_INTEGER:
                numbers[row] = value
            else:
                codes[row] = self._code(value)
        self.numbers[segment], self.codes[segment] = numbers, codes

    def mask(self, condition: Condition, segment: int) -> Mask:
        """The rows of a segment that satisfy a condition."""
        numbers, codes = self.numbers[segment], self.codes[segment]
        if condition.operator == "null":
            return np.asarray(np.isnan(numbers) & (codes < 0))
        test = condition.predicate()
        # one entry more than the dictionary, always False: where the code −1 lands
        table = np.array([*(test(value) for value in self.values), False], bool)
        found: Mask = table[codes]
        for value in condition.values:
            if isinstance(value, int | float) and not isinstance(value, bool):
                found |= _compare(numbers, condition.operator, float(value))
        return found

    def _code(self, value: Any) -> int:
        key = json.dumps(value)  # 1, true and "1" are three values
        if key not in self._code_of:
            self._code_of[key] = len(self.values)
            self.values.append(value)
        return self._code_of[key]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a filter is asked of."""

    db: sqlite3.Connection
    generation: int
    known: dict[str, list[str]]  # the metadata columns


class Columns:
    """The columns filters have asked for so far, and the selections they led to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = -1
        self._columns: dict[tuple[str, bool], Column] = {}  # (name, whether it is metadata)
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
            known = known_columns(db)
            tree = parse_filter(filter, known) if isinstance(filter, str) else filter
            snapshot = _Snapshot(db, state.generation, known)
            if self._epoch != state.epoch:
                self._columns, self._epoch = {}, state.epoch
            selection: Selection = {}
            for segment in state.of_kind(kind):
                mask = self._mask(tree, segment, snapshot)
                mask[segment.gone] = False
                selection[segment.number] = np.flatnonzero(mask)
            self._selections[key] = selection
            while len(self._selections) > MASKS:
                self._selections.popitem(last=False)
            return selection

    def _mask(self, tree: Filter, segment: Segment, snapshot: _Snapshot) -> Mask:
        if isinstance(tree, Condition):
            return self._column(tree.column, segment, snapshot).mask(tree, segment.number)
        if isinstance(tree, Not):
            return ~self._mask(tree.one, segment, snapshot)
        parts = tree.all if isinstance(tree, And) else tree.any
        masks = [self._mask(part, segment, snapshot) for part in parts]
        combined: Mask = (np.logical_and if isinstance(tree, And) else np.logical_or).reduce(masks)
        return combined

    def _column(self, name: str, segment: Segment, snapshot: _Snapshot) -> Column:
        metadata = name not in ITEM_COLUMNS or name in snapshot.known
        column = self._columns.setdefault((name, metadata), Column())
        number, rows = segment.number, len(segment)
        if column.read_at.get(number, 0) > snapshot.generation:
            # another thread read it later: it has rows that are not there yet, and lacks some that still are
            column = Column()
        have = len(column.numbers.get(number, ()))
        if have < rows or number not in column.numbers:
            column.extend(number, rows, _cells(snapshot.db, name, metadata, number, have, rows))
            column.read_at[number] = snapshot.generation
        return column


def known_columns(db: sqlite3.Connection) -> dict[str, list[str]]:
    """The metadata columns and the kinds of value each has held."""
    return {name: json.loads(kinds) for name, kinds in db.execute("SELECT name, kinds FROM columns")}


def _cells(
    db: sqlite3.Connection, name: str, metadata: bool, segment: int, start: int, stop: int
) -> Iterator[tuple[int, Any]]:
    expression = "metadata" if metadata else name  # one of ITEM_COLUMNS: never what a user wrote
    rows = db.execute(
        f"SELECT slot, {expression} FROM items WHERE slot >= ? AND slot < ? ORDER BY slot",
        (slot_of(segment, start), slot_of(segment, stop)),
    )
    while piece := rows.fetchmany(PIECE):
        first = slot_of(segment, 0)
        if metadata:  # one parse for the piece: several times faster than one for each row
            parsed = json.loads(f"[{','.join(text for _, text in piece)}]")
            yield from ((slot - first, one.get(name)) for (slot, _), one in zip(piece, parsed, strict=True))
        else:
            yield from ((slot - first, text or None) for slot, text in piece)


def _compare(numbers: NDArray[np.float64], operator: str, value: float) -> Mask:
    if operator in ("=", "in"):
        return np.asarray(numbers == value)
    if operator == "<":
        return np.asarray(numbers < value)
    if operator == "<=":
        return np.asarray(numbers <= value)
    if operator == ">":
        return np.asarray(numbers > value)
    if operator == ">=":
        return np.asarray(numbers >= value)
    return np.zeros(len(numbers), bool)
