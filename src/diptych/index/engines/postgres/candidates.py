"""What the server found for a query, scored again here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.index.base import TIE, rescore
from diptych.index.engines.postgres.records import item, rows_of
from diptych.index.protocol import Hit, Hits, Vectors

MARGIN = 32  # candidates beyond k that are scored again: the server's float32 must not decide who is in


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the server found for a query: (serial, vector, item …), the vectors as rows, their scores in float64."""

    rows: list[tuple[Any, ...]]
    stored: Vectors
    scores: NDArray[np.float64]


def scored(queries: Vectors, cursors: Sequence[Any], dimension: int) -> list[Candidates]:
    """What the cursors of some queries (Q, dimension) found, with its scores."""
    out = []
    for query, cursor in zip(queries, cursors, strict=True):
        rows = cursor.fetchall()
        stored = rows_of([row[1] for row in rows], dimension)
        out.append(Candidates(rows, stored, rescore(stored, query)))
    return out


def is_crowded(query: Vectors, found: Candidates, k: int) -> bool:
    """Whether items beyond the candidates may tie with the k-th: the server's float32 has chosen them."""
    if len(found.rows) < k + MARGIN:
        return False
    scores = np.sort(found.scores)
    tie = TIE * np.linalg.norm(found.stored, axis=1).max() * np.linalg.norm(query)
    return bool(scores[0] >= scores[-k] - tie)


def hits_of(found: Candidates, k: int, exact: bool) -> Hits:
    """The k best of the candidates; of equal scores images first, then in the order in which they were added."""
    items = [item(row[2:]) for row in found.rows]
    serials, texts = np.array([row[0] for row in found.rows]), np.array([one.kind == "text" for one in items])
    best = np.lexsort((serials, texts, -found.scores))[:k]
    return Hits(tuple(Hit(items[n], float(found.scores[n])) for n in best), exact)
