"""Pages of SQLite that lead to each other: a short file in which a table never ends."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path

INNER = (2, 5)  # kinds of pages that lead to others, of tables without and with row ids


def lead_in_circles(place: Path, table: str, depth: int = 13) -> None:
    """Each of ``depth`` pages of a table leads to the next one as often as it can, the last to a page of rows."""
    with closing(sqlite3.connect(place, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        (root,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    data = bytearray(place.read_bytes())

    def pointers(page: int) -> list[int]:
        at = (page - 1) * size
        cells = int.from_bytes(data[at + 3 : at + 5], "big")
        starts = (at + 12 + 2 * cell for cell in range(cells))
        return [at + 8, *(at + int.from_bytes(data[start : start + 2], "big") for start in starts)]

    below: list[int] = [root]  # all pages of the table, by level
    for page in below:
        if data[(page - 1) * size] in INNER:
            below += [int.from_bytes(data[at : at + 4], "big") for at in pointers(page)]
    inner = [page for page in below[1:] if data[(page - 1) * size] in INNER]
    assert len(inner) >= depth - 1, "the table is too small"
    leaf = next(page for page in below if data[(page - 1) * size] not in INNER)
    for page, following in itertools.pairwise([root, *inner[: depth - 1], leaf]):
        for at in pointers(page):
            data[at : at + 4] = following.to_bytes(4, "big")
    place.write_bytes(data)
