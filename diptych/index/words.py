"""Full-text search by BM25 in SQLite's FTS5, and the fusion of two rankings."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence

import numpy as np

from diptych.index.protocol import KINDS, Kind
from diptych.index.segments import ROW_BITS
from diptych.index.state import Selection

MAX_WORDS = 64  # of a text that are looked up
FUSION = 60  # the constant of reciprocal rank fusion (Cormack, Clarke and Büttcher 2009)


def match_expression(text: str) -> str:
    """An FTS5 expression for any of the words of a text, each quoted: no operator of the text survives."""
    words = list(dict.fromkeys(re.findall(r"\w+", text.lower())))[:MAX_WORDS]
    return " OR ".join(f'"{word}"' for word in words)


def best_words(
    db: sqlite3.Connection, text: str, k: int, kind: Kind | None, selection: Selection | None
) -> list[tuple[int, float]]:
    """(slot, BM25) of the k best items that have a word of the text, best first."""
    expression = match_expression(text)
    if not expression:
        return []
    found: list[tuple[int, float]] = []
    for one in KINDS if kind is None else (kind,):
        found += _best(db, expression, k, one, selection)
    return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:k]


def _best(
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


def fuse(rankings: Sequence[Sequence[str]]) -> dict[str, float]:
    """Reciprocal rank fusion: Σ over rankings of 1 / (60 + rank), rank from 1, for each id."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, id in enumerate(ranking, 1):
            scores[id] = scores.get(id, 0.0) + 1.0 / (FUSION + rank)
    return scores
