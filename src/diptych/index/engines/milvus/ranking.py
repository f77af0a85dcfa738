"""The nearest rows of a query: found by the server in float32, scored again here in float64, ties in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.errors import SettingsError
from diptych.index import deadline
from diptych.index.engines.milvus.pushdown import Wanted, keys
from diptych.index.engines.milvus.rows import Row, item_of, vectors_of
from diptych.index.engines.milvus.table import MOST, PIECE, REQUEST, Table
from diptych.index.exact import MAX_TIES, TIE, rescore
from diptych.index.protocol import Hit, Hits, Item, Vectors

MARGIN = 32  # candidates beyond k that are scored again: the server's float32 must not decide who is in
LOOSE = (1_000, 8_000)  # rows looked through for those that pass, before all are
FIELDS = ("serial", "kind", "item")
ROW = 1_500  # bytes of an item in an answer, about


@dataclass(frozen=True, slots=True)
class Nearest:
    """Searches over the rows of an index; ``graph`` is the kind of its approximate index, flat without one."""

    table: Table
    dimension: int
    graph: str

    def __call__(self, queries: Vectors, k: int, wanted: Wanted) -> list[Hits]:
        """The k best of each query."""
        exact = self.graph == "flat"
        found = self._candidates(queries, k + MARGIN, wanted)
        if exact:
            crowded = [n for n, one in enumerate(found) if _is_crowded(queries[n], one, k)]
            again = self._candidates(queries[crowded], min(MOST, k + MAX_TIES), wanted) if crowded else []
            for n, one in zip(crowded, again, strict=True):
                found[n] = one
        return [_hits(one, k, exact) for one in found]

    def _candidates(self, queries: Vectors, count: int, wanted: Wanted) -> list[_Candidates]:
        if not wanted.is_exact:
            rows = [self._passing(query, count, wanted) for query in queries]
        else:
            rows = []
            size = count * (4 * self.dimension + ROW)
            step = max(1, REQUEST // size)
            for start in range(0, len(queries), step):
                deadline.check()
                some = queries[start : start + step]
                if size <= REQUEST:
                    rows += self._search(some, count, wanted, [*FIELDS, "vector"])
                else:  # too much for one answer: first which rows, then what they hold
                    rows += [self._whole(one) for one in self._search(some, count, wanted, [])]
        return [self._scored(query, some) for query, some in zip(queries, rows, strict=True)]

    def _search(self, queries: Vectors, count: int, wanted: Wanted, fields: Sequence[str]) -> list[list[Row]]:
        effort = _settings(self.graph, count)
        return self.table.search(queries, count, wanted.expression, fields, effort, wanted.parts)

    def _passing(self, query: Vectors, count: int, wanted: Wanted) -> list[Row]:
        """The ``count`` best that pass a filter which the server knows only loosely."""
        for depth in LOOSE:
            deadline.check()
            (rows,) = self._search(query[None], max(depth, count), wanted, FIELDS)
            passing = [row for row in rows if wanted.passes(item_of(row))]
            if len(passing) >= count or len(rows) < max(depth, count):
                return self._with_vectors(passing[:count])
        chosen = [
            row["pk"]
            for piece in self.table.rows(wanted.expression, ["item"])
            for row in _checked(piece)
            if wanted.passes(item_of(row))
        ]
        best: list[Row] = []
        for start in range(0, len(chosen), PIECE):
            deadline.check()
            some = Wanted(keys("pk", chosen[start : start + PIECE]), parts=wanted.parts)
            best += self._search(query[None], count, some, [])[0]
            best = sorted(best, key=lambda row: -row["score"])[:count]
        return self._whole(best)

    def _whole(self, rows: Sequence[Row]) -> list[Row]:
        """Rows with everything they hold; one that was removed a moment ago is left out."""
        found = self.table.pick([row["pk"] for row in rows], [*FIELDS, "vector"])
        return [found[row["pk"]] for row in rows if row["pk"] in found]

    def _with_vectors(self, rows: Sequence[Row]) -> list[Row]:
        found = self.table.pick([row["pk"] for row in rows], ["vector"])
        return [{**row, **found[row["pk"]]} for row in rows if row["pk"] in found]

    def _scored(self, query: Vectors, rows: list[Row]) -> _Candidates:
        rows = list({row["pk"]: row for row in sorted(rows, key=lambda row: row["serial"])}.values())
        stored = vectors_of(rows, self.dimension)
        return _Candidates(rows, [item_of(row) for row in rows], stored, rescore(stored, query))


def check_depth(k: int) -> None:
    """Raise when more hits are wanted than Milvus gives."""
    if k > MOST - MARGIN:
        raise SettingsError(
            f"Milvus gives at most {MOST - MARGIN:,} hits, not {k:,}: ask for fewer, or narrow the search with a "
            "filter."
        )


def best_words(table: Table, text: str, k: int, wanted: Wanted) -> Hits:
    """The k best items by the server's BM25; of equal scores images first, then in the order they were added."""
    for depth in (k + MARGIN, *(one for one in (*LOOSE, MOST) if one > k + MARGIN)):
        deadline.check()
        rows = table.search_words(text, depth, wanted.expression, FIELDS, wanted.parts)
        found = [(row, item) for row in rows if wanted.passes(item := item_of(row))]
        if wanted.is_exact or len(found) >= k or len(rows) < depth:
            break
    # a better score is a larger one; milvus-lite gives it below zero, as a distance
    best = sorted(found, key=lambda one: (-abs(one[0]["score"]), one[1].kind == "text", one[0]["serial"]))[:k]
    return Hits(tuple(Hit(item, abs(float(row["score"]))) for row, item in best))


@dataclass(frozen=True, slots=True)
class _Candidates:
    """What the server found for a query, and its scores in float64."""

    rows: list[Row]
    items: list[Item]
    stored: Vectors
    scores: NDArray[np.float64]


def _checked(piece: list[Row]) -> list[Row]:
    deadline.check()
    return piece


def _settings(graph: str, count: int) -> dict[str, Any]:
    """How thoroughly an approximate index is searched: candidates it keeps, of which ``count`` are wanted."""
    effort = min(2 * MOST, max(100, 2 * count))
    return {"flat": {}, "hnsw": {"ef": effort}, "diskann": {"search_list": effort}}[graph]


def _is_crowded(query: Vectors, found: _Candidates, k: int) -> bool:
    """Whether rows beyond the candidates may tie with the k-th: the server's float32 has chosen them."""
    if len(found.rows) < k + MARGIN:
        return False
    scores = np.sort(found.scores)
    tie = TIE * np.linalg.norm(found.stored, axis=1).max() * np.linalg.norm(query)
    return bool(scores[0] >= scores[-k] - tie)


def _hits(found: _Candidates, k: int, exact: bool) -> Hits:
    serials = np.array([row["serial"] for row in found.rows], np.int64)
    texts = np.array([one.kind == "text" for one in found.items], bool)
    best = np.lexsort((serials, texts, -found.scores))[:k]
    return Hits(tuple(Hit(found.items[n], float(found.scores[n])) for n in best), exact)
