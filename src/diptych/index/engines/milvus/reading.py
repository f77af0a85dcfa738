"""What needs many rows of an index: samples, common values, near duplicates, a check of everything."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from diptych.index import deadline
from diptych.index.engines.milvus.cells import key_of
from diptych.index.engines.milvus.pushdown import EVERY, Wanted
from diptych.index.engines.milvus.rows import Row, checksum, item_of, vectors_of
from diptych.index.engines.milvus.table import MOST, WHOLE, Table
from diptych.index.engines.pairs import best_pairs
from diptych.index.protocol import Pair, Vectors
from diptych.progress import track

ITEM_BYTES = 1_000  # approximate size of an item in an answer
MARK = 4  # digits of a key that choose a sample
SPARE = 1.3  # times as many rows as a sample needs are asked for


def passing(table: Table, wanted: Wanted) -> int:
    """How many items are wanted."""
    if wanted.is_exact:
        return table.count(wanted.expression)
    return sum(1 for _ in _passing_rows(table, wanted))


def _passing_rows(table: Table, wanted: Wanted) -> Iterator[Row]:
    """The rows that pass where the server alone finds too many."""
    for piece in table.rows(wanted.expression, ["serial", "item"], ITEM_BYTES):
        yield from (one for one in piece if wanted.passes(item_of(one)))


def spread(table: Table, wanted: Wanted, size: int) -> list[str]:
    """Keys of up to ``size`` items, in the order they were added, the same for the same state.

    Of up to ``MOST`` items they stand at even distances; of more, those with the lowest keys: a key is a digest of the
    id, so they are spread evenly too.
    """
    if not wanted.is_exact:
        return _even(list(_passing_rows(table, wanted)), size)
    total = table.count(wanted.expression)
    if total < MOST:
        return _even(table.all_rows(wanted.expression, ["serial"]), size)
    share = min(1.0, SPARE * size / total)
    while True:
        deadline.check()
        below = "" if share >= 1 else f' and pk < "{max(1, int(share * WHOLE)):0{MARK}x}"'
        found = [one for piece in table.rows(f"({wanted.expression}){below}", ["serial"]) for one in piece]
        if len(found) >= size or share >= 1:
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
    counts: Counter[str] = Counter()
    seen = 0
    for piece in table.rows(f"({EVERY}){below}", ["item"], ITEM_BYTES):
        deadline.check()
        seen += len(piece)
        values = (item_of(one).metadata.get(column) for one in piece)
        counts.update(
            json.dumps(value, ensure_ascii=False) for value in values if isinstance(value, str | bool)
        )
    read = [(json.loads(text), count) for text, count in counts.items()]
    best = sorted(read, key=lambda one: (-one[1], _shown(one[0])))[:limit]
    return [(value, count if share >= 1 else round(count * total / max(1, seen))) for value, count in best]


def pairs(
    table: Table, wanted: Wanted, dimension: int, threshold: float | None, limit: int, show_progress: bool
) -> list[Pair]:
    """The best pairs of the items that are wanted."""
    found: list[tuple[int, str]] = []
    stored: list[Vectors] = []
    for piece in table.rows(wanted.expression, ["serial", "vector"], 4 * dimension + 100):
        found += [(one["serial"], one["pk"]) for one in piece]
        stored.append(vectors_of(piece, dimension))
    order = sorted(range(len(found)), key=found.__getitem__)
    rows = np.concatenate([*stored, np.zeros((0, dimension), np.float32)])[order]
    scores, first, second = best_pairs(
        np.arange(len(rows)), lambda some: rows[some], threshold, limit, show_progress
    )
    both = [(found[order[a]][1], found[order[b]][1]) for a, b in zip(first, second, strict=True)]
    items = table.pick(sorted({key for pair in both for key in pair}), ["item", "serial"])
    return [
        Pair(item_of(items[a]), item_of(items[b]), float(score))
        for (a, b), score in zip(both, scores, strict=True)
        if a in items and b in items
    ]


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
            pictures += [f"{one['pk']}:{one['serial']:016x}:{n:02x}" for n in range(one["pictures"])]
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


def _even(found: list[Row], size: int) -> list[str]:
    ordered = sorted(found, key=_order)
    places = np.linspace(0, max(0, len(ordered) - 1), min(size, len(ordered))).astype(np.int64).tolist()
    return [ordered[place]["pk"] for place in places]


def _order(row: Row) -> tuple[int, str]:
    return int(row["serial"]), str(row["pk"])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
