"""Items as PostgreSQL stores them, and filters as SQL conditions: the meaning of ``filters.matches``.

Columns and values travel as parameters, never inside the text of a statement. Texts are compared by code
point, and ``contains`` and ``like`` read ``folded``, the values lowered by Python when they were stored: no
answer depends on the locale or the version of the server.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diptych.errors import DataError
from diptych.index.engines.postgres.database import HalfVector, Vector
from diptych.index.protocol import EXACT_INTEGER, Item, Vectors, halves, record
from diptych.index.query.filters import ITEM_COLUMNS, And, Condition, Filter, Not, Value
from diptych.index.query.words import Tokenizer

Condition_ = tuple[str, dict[str, Any]]
"""A condition over ``items`` and the parameters it names."""


def condition(tree: Filter, columns: Container[str]) -> Condition_:
    """The SQL of a filter with named parameters ``f0``, ``f1``, …; it is true or false, never null.

    ``columns`` are the metadata columns the index knows: one hides an item's own column of the same name.
    """
    writer = _ConditionWriter(columns)
    return writer.expression(tree), writer.parameters


def folded(item: Item) -> dict[str, dict[str, str]]:
    """The texts of an item, lowered, by column: what ``contains`` and ``like`` search in."""
    own = {name: getattr(item, name) for name in ITEM_COLUMNS}
    return {"metadata": _lowered(item.metadata), "item": {name: v for name, v in _lowered(own).items() if v}}


class _ConditionWriter:
    def __init__(self, columns: Container[str]) -> None:
        self.columns = columns
        self.parameters: dict[str, Any] = {}

    def expression(self, tree: Filter) -> str:
        if isinstance(tree, Condition):
            return f"({self.test(tree)})"
        if isinstance(tree, Not):
            return f"(NOT {self.expression(tree.one)})"
        word, parts = (" AND ", tree.all) if isinstance(tree, And) else (" OR ", tree.any)
        return f"({word.join(self.expression(part) for part in parts)})"

    def test(self, test: Condition) -> str:
        if not storable(test.column):
            return str(test.operator == "null").lower()
        column = self.name(test.column)
        own = test.column in ITEM_COLUMNS and test.column not in self.columns
        value = f"to_jsonb(nullif(items.{test.column}, ''))" if own else f"(items.metadata -> {column})"
        if test.operator == "null":
            return f"coalesce({value}, 'null') = 'null'"
        kept = tuple(v for v in test.values if not isinstance(v, str) or storable(v))
        if test.operator in ("=", "in"):
            return self.equal(value, kept)
        if kept != test.values:
            return "false"  # no stored text holds such a character
        text = f"(items.folded -> '{'item' if own else 'metadata'}' ->> {column})"
        if test.operator == "like":
            return f"coalesce({text} LIKE {self.name(str(test.values[0]).lower())} ESCAPE '', false)"
        if test.operator == "contains":
            return self.contains(value, text, test.values[0])
        return self.ordered(value, test.operator, test.values[0])

    def equal(self, value: str, wanted: tuple[Value, ...]) -> str:
        finite = [v for v in wanted if not (isinstance(v, float) and math.isinf(v))]
        if not finite:
            return "false"
        # jsonb compares numbers by value (5 = 5.0) and never one type with another, as matches() does
        return f"coalesce({value} IN ({', '.join(self.json(v) for v in finite)}), false)"

    def contains(self, value: str, text: str, wanted: Value) -> str:
        if isinstance(wanted, float) and math.isinf(wanted):
            return "false"
        element = f"coalesce(jsonb_typeof({value}) = 'array' AND {value} @> {self.json([wanted])}, false)"
        if not isinstance(wanted, str):
            return element
        return f"coalesce(position({self.name(wanted.lower())} IN {text}) > 0, false) OR {element}"

    def ordered(self, value: str, operator: str, limit: Value) -> str:
        if isinstance(limit, str):
            # the C collation of UTF-8 is the order of code points
            text = f'({value} #>> ARRAY[]::text[]) COLLATE "C" {operator} {self.name(limit)}'
            return f"coalesce(jsonb_typeof({value}) = 'string' AND {text}, false)"
        number = f"coalesce(jsonb_typeof({value}) = 'number', false)"
        if isinstance(limit, float) and math.isinf(limit):
            return number if (limit > 0) == (operator in ("<", "<=")) else "false"
        return f"{number} AND {value} {operator} {self.json(limit)}"

    def json(self, value: Any) -> str:
        return f"{self.parameter(json.dumps(exact(value), ensure_ascii=False))}::jsonb"

    def name(self, text: str) -> str:
        return f"{self.parameter(text)}::text"

    def parameter(self, value: Any) -> str:
        name = f"f{len(self.parameters)}"
        self.parameters[name] = value
        return f"%({name})s"


def exact(value: Any) -> Any:
    """A JSON value whose numbers mean the same in decimal: of a large float, Python writes only the first digits."""
    if isinstance(value, list):
        return [exact(one) for one in value]
    return int(value) if isinstance(value, float) and abs(value) >= EXACT_INTEGER else value


def storable(text: str) -> bool:
    """Whether PostgreSQL can hold a text: it has no character for NUL, nor for half a surrogate pair."""
    return "\x00" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def _lowered(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: value.lower() for name, value in row.items() if isinstance(value, str)}


ID_BYTES = 2_000  # an index of PostgreSQL holds no longer keys
COLUMNS = ", ".join(  # of ``Item``, in its order
    f"items.{name}"
    for name in ("id", "kind", "path", "text", "image_id", "metadata", "content", "collection")
)


@dataclass(frozen=True, slots=True)
class Record:
    """An item ready to be written; ``metadata`` in plain JSON values, ``words`` with their counts."""

    item: Item
    metadata: dict[str, Any]
    words: dict[str, int]
    vector: Any
    checksum: int


def records(items: Sequence[Item], vectors: Vectors, precision: str, tokenizer: Tokenizer) -> list[Record]:
    """Items ready to be written; raises for one PostgreSQL cannot hold."""
    plain = [_check(one) for one in items]
    words = tokenizer.words([one.text for one in items])
    out = []
    for one, metadata, counts, row in zip(items, plain, words, vectors, strict=True):
        vector = Vector(row) if precision == "float32" else HalfVector(halves(row))
        out.append(Record(one, metadata, dict(counts), vector, checksum(vector)))
    return out


def checksum(vector: Any) -> int:
    """The checksum of a vector as the server stores it."""
    return zlib.crc32(vector.to_binary())


def storable_ids(ids: Sequence[str]) -> list[str]:
    """Those ids that can be in a PostgreSQL index at all."""
    return [id for id in ids if storable(id)]


def rows_of(vectors: Sequence[Any], dimension: int) -> Vectors:
    """Vectors as they come from the server, as rows (n, dimension)."""
    return np.array([vector.to_numpy() for vector in vectors], np.float32).reshape(-1, dimension)


def _check(one: Item) -> dict[str, Any]:
    data = record(one)[5]
    metadata = {name: exact(value) for name, value in json.loads(data).items()}
    if (
        any("\x00" in text for text in (one.id, one.path, one.text, one.image_id, one.content))
        or "\\u0000" in data
    ):
        raise DataError(f"item {one.id!r} holds a NUL, which PostgreSQL cannot store: remove it.")
    if len(one.id.encode()) > ID_BYTES:
        raise DataError(f"the id '{one.id[:40]}…' is longer than {ID_BYTES} bytes: shorten it.")
    return metadata
