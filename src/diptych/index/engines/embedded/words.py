"""Full-text search by BM25 in SQLite's FTS5."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterator

import numpy as np

from diptych.index.engines.embedded.checksums import damaged
from diptych.index.engines.embedded.segments import ROW_BITS
from diptych.index.engines.embedded.state import Selection, State
from diptych.index.protocol import KINDS, Kind
from diptych.index.query.words import COMMON, COMMON_SHARE, words_of

REMEMBERED = 10_000  # words of which is known whether they are common; a service sees ever new ones


class Words:
    """Full-text search over one index; remembers which words are common.

    A word in more than ``COMMON`` items of a kind and more than one in ``COMMON_SHARE`` of them is left out
    while others remain: ranking by it would touch that many items to move none of them much.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = -1
        self._common: dict[tuple[Kind, str], bool] = {}

    def best(
        self,
        state: State,
        db: sqlite3.Connection,
        text: str,
        k: int,
        kind: Kind | None,
        selection: Selection | None,
    ) -> list[tuple[int, float]]:
        """(slot, BM25) of the k best items that have a word of the text, best first."""
        best: list[tuple[int, float]] = []
        for one in KINDS if kind is None else (kind,):
            words = words_of(text)
            telling = [word for word in words if not self._is_common(state, db, one, word)]
            # quoted: nothing a user wrote is read as an operator
            expression = " OR ".join(f'"{word}"' for word in telling or words)
            found = list(_rank(db, expression, k, one, selection)) if expression else []
            if not all(type(score) is float and math.isfinite(score) for _, score in found):
                raise damaged("the full text of the index", "")
            best += sorted(found, key=lambda pair: (-pair[1], pair[0]))
        return sorted(best, key=lambda pair: -pair[1])[:k]  # of equal ones the images first

    def _is_common(self, state: State, db: sqlite3.Connection, kind: Kind, word: str) -> bool:
        most = max(COMMON, state.count(kind) // COMMON_SHARE)
        if state.count(kind) <= most:
            return False
        with self._lock:
            if self._generation != state.generation or len(self._common) > REMEMBERED:
                self._generation, self._common = state.generation, {}
            known = self._common.get((kind, word))
        if known is not None:
            return known
        table = f"{kind}_words"
        matching = f"SELECT 1 FROM {table} WHERE {table} MATCH ? LIMIT ?"
        count = db.execute(f"SELECT count(*) FROM ({matching})", (f'"{word}"', most + 1)).fetchone()[0]
        with self._lock:
            if self._generation == state.generation:
                self._common[kind, word] = count > most
        return bool(count > most)


def _rank(
    db: sqlite3.Connection, expression: str, k: int, kind: Kind, selection: Selection | None
) -> Iterator[tuple[int, float]]:
    table = f"{kind}_words"
    query = f"SELECT rowid, -rank FROM {table} WHERE {table} MATCH ? ORDER BY rank"
    if selection is None:
        yield from db.execute(f"{query} LIMIT ?", (expression, k))
        return
    left = k
    for slot, score in db.execute(query, (expression,)):
        rows = selection.get(slot >> ROW_BITS)
        row = slot & ((1 << ROW_BITS) - 1)
        if rows is not None and (at := int(np.searchsorted(rows, row))) < len(rows) and rows[at] == row:
            yield slot, score
            left -= 1
            if left == 0:
                return
