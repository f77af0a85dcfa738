"""What reads many rows of an index: the nearest, samples, common values, near duplicates, a check of everything."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from diptych.errors import SettingsError
from diptych.index.capabilities import most_frequent, spread
from diptych.index.engines.milvus.facts import picture_keys
from diptych.index.engines.milvus.pushdown import EVERY, MilvusSelection, key_of, keys
from diptych.index.engines.milvus.rows import Row, checksum, item_of, vectors_of
from diptych.index.engines.milvus.table import MOST, PIECE, REQUEST, WHOLE, Table
from diptych.index.protocol import Hit, Hits, Vectors
from diptych.index.scoring import MARGIN, Candidates, best_hits
from diptych.progress import track

EFFORT = 100  # candidates that a search in an approximate index keeps, at least
LOOSE = (1_000, 8_000)  # rows looked through for those that pass, before all are
FIELDS = ("serial", "kind", "item")
ITEM_BYTES = 1_000  # approximate size of an item in an answer
MARK = 4  # digits of a key that choose a sample
SPARE = 1.3  # times as many rows as a sample needs are asked for
ROW = 1_500  # bytes of an item in an answer, about


@dataclass(frozen=True, slots=True)
class Nearest:
    """Searches over the rows of an index; ``graph`` is the kind of its approximate index, flat without one."""

    table: Table
    dimension: int
    graph: str
    width: int

    def __call__(self, queries: Vectors, k: int, selection: MilvusSelection) -> list[Hits]:
        """The k best of each query."""
        exact = self.graph == "flat"
        return best_hits(
            queries, k, lambda some, count: self._candidates(some, count, selection), exact, MOST
        )

    def scan(self, queries: Vectors, k: int, selection: MilvusSelection) -> list[Hits]:
        """The k best of each query without the approximate index: every vector is read and scored here."""
        wide = queries.astype(np.float64)
        best: list[list[tuple[float, int, int, str]]] = [[] for _ in queries]
        fields = [*FIELDS, "vector"] if not selection.is_exact else ["serial", "kind", "vector"]
        for piece in self.table.rows(selection.expression, fields, 4 * self.dimension + ROW):
            rows = [row for row in piece if selection.is_exact or selection.passes(item_of(row))]
            scores = -(wide @ vectors_of(rows, self.dimension).astype(np.float64).T)
            orders = [(int(row["kind"]), int(row["serial"]), str(row["pk"])) for row in rows]
            for n, found in enumerate(scores.tolist()):
                near = [(score, *order) for score, order in zip(found, orders, strict=True)]
                best[n] = heapq.nsmallest(k + MARGIN, [*best[n], *near])
        whole = (self._whole([{"pk": one[-1]} for one in some]) for some in best)
        return [self._score(query, rows).hits(k, True) for query, rows in zip(queries, whole, strict=True)]

    def _candidates(self, queries: Vectors, count: int, selection: MilvusSelection) -> list[Candidates]:
        if not selection.is_exact:
            rows = [self._filtered(query, count, selection) for query in queries]
        else:
            rows = []
            size = count * (4 * self.dimension + ROW)
            step = max(1, REQUEST // size)
            for start in range(0, len(queries), step):
                some = queries[start : start + step]
                if size <= REQUEST:
                    rows += self._search(some, count, selection, [*FIELDS, "vector"])
                else:  # too much for one answer: first which rows, then what they hold
                    rows += [self._whole(one) for one in self._search(some, count, selection, [])]
        return [self._score(query, some) for query, some in zip(queries, rows, strict=True)]

    def _search(
        self, queries: Vectors, count: int, selection: MilvusSelection, fields: Sequence[str]
    ) -> list[list[Row]]:
        effort = min(2 * MOST, max(self.width, 2 * count))  # candidates that an approximate index keeps
        params = {"flat": {}, "hnsw": {"ef": effort}, "diskann": {"search_list": effort}}[self.graph]
        about = {"metric_type": "IP", "params": params}
        return self.table.search("vector", list(queries), count, selection, fields, about)

    def _filtered(self, query: Vectors, count: int, selection: MilvusSelection) -> list[Row]:
        """The ``count`` best that pass a filter which the server knows only loosely."""
        for depth in LOOSE:
            (rows,) = self._search(query[None], max(depth, count), selection, FIELDS)
            found = [row for row in rows if selection.passes(item_of(row))]
            if len(found) >= count or len(rows) < max(depth, count):
                return self._whole(found[:count])
        names = [
            row["pk"]
            for piece in self.table.rows(selection.expression, ["item"])
            for row in piece
            if selection.passes(item_of(row))
        ]
        best: list[Row] = []
        for start in range(0, len(names), PIECE):
            some = MilvusSelection(keys("pk", names[start : start + PIECE]), parts=selection.parts)
            best += self._search(query[None], count, some, [])[0]
            best = sorted(best, key=lambda row: -row["score"])[:count]
        return self._whole(best)

    def _whole(self, rows: Sequence[Row]) -> list[Row]:
        """Rows with everything they hold; one that was removed a moment ago is left out."""
        found = self.table.pick([row["pk"] for row in rows], [*FIELDS, "vector"])
        return [found[row["pk"]] for row in rows if row["pk"] in found]

    def _score(self, query: Vectors, rows: list[Row]) -> Candidates:
        rows = list({row["pk"]: row for row in sorted(rows, key=lambda row: row["serial"])}.values())
        stored = vectors_of(rows, self.dimension)
        return Candidates([item_of(row) for row in rows], [row["serial"] for row in rows], stored, query)


def check_depth(k: int) -> None:
    """Raise when more hits are wanted than Milvus gives."""
    if k > MOST - MARGIN:
        raise SettingsError(
            f"Milvus gives at most {MOST - MARGIN:,} hits, not {k:,}: ask for fewer, or narrow the search with a "
            "filter."
        )


def best_words(table: Table, text: str, k: int, selection: MilvusSelection) -> Hits:
    """The k best items by the server's BM25; of equal scores images first, then in the order they were added."""
    for depth in (k + MARGIN, *(one for one in (*LOOSE, MOST) if one > k + MARGIN)):
        (rows,) = table.search("weights", [text], depth, selection, FIELDS, {"metric_type": "BM25"})
        found = [(row, item) for row in rows if selection.passes(item := item_of(row))]
        if selection.is_exact or len(found) >= k or len(rows) < depth:
            break
    # a better score is a larger one; milvus-lite gives it below zero, as a distance
    best = sorted(found, key=lambda one: (-abs(one[0]["score"]), one[1].kind == "text", one[0]["serial"]))[:k]
    return Hits(tuple(Hit(item, abs(float(row["score"]))) for row, item in best))


def count_items(table: Table, selection: MilvusSelection) -> int:
    """How many items are selected."""
    if selection.is_exact:
        return table.count(selection.expression)
    return sum(1 for _ in _filtered_rows(table, selection))


def _filtered_rows(table: Table, selection: MilvusSelection) -> Iterator[Row]:
    """The rows that pass where the server alone finds too many."""
    for piece in table.rows(selection.expression, ["serial", "item"], ITEM_BYTES):
        yield from (one for one in piece if selection.passes(item_of(one)))


def spread_keys(table: Table, selection: MilvusSelection, size: int | None) -> list[str]:
    """Keys of up to ``size`` items, in the order they were added, the same for the same state; all without a size.

    Of up to ``MOST`` items they stand at even distances; of more, those with the lowest keys: a key is a digest of the
    id, so they are spread evenly too.
    """
    if not selection.is_exact:
        return _even(list(_filtered_rows(table, selection)), size)
    total = table.count(selection.expression)
    if total < MOST:
        return _even(table.all_rows(selection.expression, ["serial"]), size)
    share = 1.0 if size is None else min(1.0, SPARE * size / total)
    while True:
        below = "" if share >= 1 else f' and pk < "{max(1, int(share * WHOLE)):0{MARK}x}"'
        found = [one for piece in table.rows(f"({selection.expression}){below}", ["serial"]) for one in piece]
        if share >= 1 or len(found) >= (size or 0):
            lowest = sorted(found, key=lambda one: one["pk"])[:size]
            return [one["pk"] for one in sorted(lowest, key=_order)]
        share = min(1.0, 2 * share)


def common_values(table: Table, column: str, limit: int) -> list[tuple[str | bool, int]]:
    """The most frequent texts and booleans of a metadata column, equally frequent ones in order.

    Of ``MOST`` items or more, those with the lowest keys are counted, and the numbers are scaled to all.
    """
    total = table.count(EVERY)
    share = 1.0 if total < MOST else MOST / (2 * total)
    below = "" if share >= 1 else f' and pk < "{max(1, int(share * WHOLE)):0{MARK}x}"'
    counts: Counter[str | bool] = Counter()
    seen = 0
    for piece in table.rows(f"({EVERY}){below}", ["item"], ITEM_BYTES):
        seen += len(piece)
        values = (item_of(one).metadata.get(column) for one in piece)
        counts.update(value for value in values if isinstance(value, str | bool))
    best = most_frequent(counts, limit)
    return [(value, count if share >= 1 else round(count * total / max(1, seen))) for value, count in best]


def faults(table: Table, meta: Table, dimension: int, show_progress: bool) -> list[str]:
    """One sentence per fault: vectors that differ from their checksums, rows that are no items, thumbnails lost."""
    out: list[str] = []
    fields = ["item", "serial", "pictures", "checksum", "vector"]
    lost = 0
    pieces = table.rows(EVERY, fields, 4 * dimension + ITEM_BYTES)
    for piece in track(pieces, "pieces of the index", None, show_progress):
        seen: set[str] = set()
        pictures: list[str] = []
        for one in piece:
            if one["pk"] in seen:
                out.append(f"the key {one['pk']} is there twice: index its item again.")
            seen.add(one["pk"])
            out += _row_faults(one)
            pictures += picture_keys(one["pk"], one["serial"], one["pictures"])
        lost += len(pictures) - len(meta.pick(pictures, []))
    if lost:
        out.append(f"{lost} stored thumbnails are missing: index the collection again.")
    return out


def _row_faults(row: Row) -> list[str]:
    try:
        id = item_of(row).id
    except (ValueError, TypeError):
        return [f"the row {row['pk']} holds no item: index the collection again."]
    if key_of(id) != row["pk"]:
        return [f"the row of '{id}' has the key of another item: index it again."]
    if checksum(row["vector"]) != row["checksum"]:
        return [f"the vector of '{id}' differs from its checksum: index it again."]
    return []


def _even(found: list[Row], size: int | None) -> list[str]:
    ordered = sorted(found, key=_order)
    return [ordered[place]["pk"] for place in spread(len(ordered), size).tolist()]


def _order(row: Row) -> tuple[int, str]:
    return int(row["serial"]), str(row["pk"])
