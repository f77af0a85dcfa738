"""Filters as Milvus expressions over ``cells``: the meaning of ``filters.matches``, computed by the server.

What Milvus cannot compute exactly (a part of a text, a pattern, the order of long texts) is asked of it loosely, so
that every item that passes is among those it finds, and ``Selection.passes`` decides about each of them here.

Milvus takes a filter as one text, and its rules for quotes have changed between versions. Here column names and values
go into filters as digests and digits only (0-9, a-f, one g as an end mark): there is nothing to quote, and what an id
or a filter of a user holds cannot change the meaning of the rest. ``cells`` is a JSON object with, for each column c of
an item (``#c`` is the digest of its name):

========  ========================================================================================================
``e#c``   the digest of a text, number or boolean: equal values have equal digests, and 5 equals 5.0
``l#c``   the digests of the elements of a list
``n#c``   a number as digits whose order as text is the order of the numbers, exactly, whatever their size
``t#c``   a text as the digits of its UTF-8 bytes, whose order is that of the code points; of a long text the beginning
========  ========================================================================================================
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from diptych.index.protocol import Item, Kind, kind_of
from diptych.index.query.filters import ITEM_COLUMNS, And, Condition, Filter, Not, matches

TEXT_BYTES = 100  # bytes of a text that are kept to compare it by order
KEPT = 65_536  # digests remembered: a column repeats its name always, its values often
_FLIP = str.maketrans("0123456789abcdef", "fedcba9876543210")


def key_of(id: str) -> str:
    """The primary key of an item: 32 hexadecimal digits of its id."""
    return _digest(id.encode("utf-8", "surrogatepass"), 16)


@lru_cache(KEPT)
def column_of(name: str, own: bool) -> str:
    """The digits of a column's name; an item's own columns (id, path, …) differ from metadata of the same name."""
    return _digest(f"{'item' if own else 'metadata'}:{name}".encode("utf-8", "surrogatepass"), 6)


@lru_cache(KEPT, typed=True)
def digest_of(value: Any) -> str:
    """The digits of a text, number or boolean: equal for equal values of one kind."""
    kind = kind_of(value)
    if kind == "number":
        is_whole = isinstance(value, float) and math.isfinite(value) and value.is_integer()
        value = repr(int(value) if is_whole else value)
    return _digest(f"{kind}:{value}".encode("utf-8", "surrogatepass"), 12)


def cells_of(item: Item, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored of an item for filters; ``metadata`` holds plain values."""
    cells: dict[str, Any] = {}
    own = {name: getattr(item, name) or None for name in ITEM_COLUMNS}
    for columns, is_own in ((own, True), (metadata, False)):
        for name, value in columns.items():
            _store(cells, column_of(name, is_own), value)
    return cells


@lru_cache(KEPT, typed=True)
def ordered_number(value: float) -> str:
    """Digits of a finite number: one is below another exactly where its text is below the other's.

    A sign (0 below zero, 1 zero, 2 above), the place of the highest bit, and the bits below it; of a number below
    zero all digits are turned round, and an end mark above every digit stands where a longer one would go on.
    """
    exact = Fraction(value)
    if exact == 0:
        return "1"
    size = abs(exact)
    highest = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** highest > size:
        highest -= 1
    rest = size / Fraction(2) ** highest - 1  # in [0, 1), a finite binary fraction
    bits = rest.denominator.bit_length() - 1
    width = -(-bits // 4)
    digits = f"{(1 << 31) + highest:08x}" + (f"{int(rest * 16**width):0{width}x}" if width else "")
    return f"2{digits}" if exact > 0 else f"0{digits.translate(_FLIP)}g"


def ordered_text(text: str) -> str:
    """Digits of a text's bytes; of one that is longer than ``TEXT_BYTES``, its beginning and an end mark."""
    data = text.encode("utf-8", "surrogatepass")
    return data[:TEXT_BYTES].hex() + "g" * (len(data) > TEXT_BYTES)


def is_long(text: str) -> bool:
    """Whether only the beginning of a text is kept to compare it by order."""
    return len(text.encode("utf-8", "surrogatepass")) > TEXT_BYTES


def _store(cells: dict[str, Any], column: str, value: Any) -> None:
    kind = kind_of(value)
    if kind == "null":
        return
    if kind == "list":
        cells[f"l{column}"] = sorted({digest_of(one) for one in value})
        return
    cells[f"e{column}"] = digest_of(value)
    if kind == "number":
        cells[f"n{column}"] = ordered_number(value)
    elif kind == "text":
        cells[f"t{column}"] = ordered_text(value)


def _digest(data: bytes, size: int) -> str:
    return hashlib.blake2b(data, digest_size=size).hexdigest()


EVERY, NONE = "(serial >= 0)", "(serial < 0)"  # of no item is the number below zero
KIND_NUMBERS: dict[str, int] = {"image": 0, "text": 1}


@dataclass(frozen=True, slots=True)
class MilvusSelection:
    """The items a search looks at: ``expression`` finds them, and where it finds more, ``tree`` decides."""

    expression: str
    tree: Filter | None = None
    hidden: frozenset[str] = frozenset()  # columns of an item that metadata columns of the same name hide
    parts: tuple[str, ...] = ()  # the partitions that hold them, all where none is named

    @property
    def is_exact(self) -> bool:
        """Whether the server's answer needs no second look."""
        return self.tree is None

    def passes(self, item: Item) -> bool:
        """Whether an item that the server found is one of them."""
        if self.tree is None:
            return True
        own = {name: getattr(item, name) or None for name in ITEM_COLUMNS if name not in self.hidden}
        return matches(self.tree, {**own, **item.metadata})


@dataclass(frozen=True, slots=True)
class Parts:
    """How the rows of an index are divided: into ``count`` partitions by the values of a metadata column."""

    count: int = 0
    column: str = ""

    @property
    def names(self) -> list[str]:
        return [f"part_{n}" for n in range(self.count)]

    def of(self, metadata: Mapping[str, Any]) -> str:
        """The partition of an item; empty where the index is not divided."""
        return self._of_value(metadata.get(self.column)) if self.count else ""

    def of_filter(self, tree: Filter) -> tuple[str, ...]:
        """The partitions that a filter allows, where it names values (= or in, alone or with and); empty for all."""
        for part in tree.all if isinstance(tree, And) else (tree,):
            if isinstance(part, Condition) and part.column == self.column and part.operator in ("=", "in"):
                return tuple(sorted({self._of_value(value) for value in part.values}))
        return ()

    def _of_value(self, value: Any) -> str:
        if value is None or isinstance(value, list | tuple):
            return self.names[0]
        return f"part_{int(digest_of(value)[:12], 16) % self.count}"


def select(
    kind: Kind | None, tree: Filter | None, columns: Container[str], parts: Parts | None = None
) -> MilvusSelection:
    """The items of a kind that pass a filter.

    ``columns`` are the metadata columns the index knows: one hides an item's own column of the same name.
    """
    tests = [] if kind is None else [f"kind == {KIND_NUMBERS[kind]}"]
    hidden = frozenset(name for name in ITEM_COLUMNS if name in columns)
    is_exact = True
    if tree is not None:
        writer = _ExpressionWriter(hidden)
        tests.append(writer.expression(tree, loose=True))
        is_exact = not writer.loosened
    expression = " and ".join(f"({one})" for one in tests) or EVERY
    allowed = parts.of_filter(tree) if parts is not None and parts.count and tree is not None else ()
    return MilvusSelection(expression, None if is_exact else tree, hidden, allowed)


def keys(field: str, digits: list[str]) -> str:
    """The expression of rows whose ``field`` is one of some digits."""
    return f"{field} in {_key_list(digits)}"


class _ExpressionWriter:
    """Writes a tree; ``loosened`` says whether a test was replaced by one that lets more through."""

    def __init__(self, hidden: frozenset[str]) -> None:
        self.hidden, self.loosened = hidden, False

    def expression(self, tree: Filter, loose: bool) -> str:
        """``loose``: where exactness is not to be had, let more through; under a not, less."""
        if isinstance(tree, Condition):
            exact = self.test(tree)
            if exact is not None:
                return f"({exact})"
            self.loosened = True
            return EVERY if loose else NONE
        if isinstance(tree, Not):
            return f"(not {self.expression(tree.one, not loose)})"
        word, parts = (" and ", tree.all) if isinstance(tree, And) else (" or ", tree.any)
        return f"({word.join(f'({self.expression(part, loose)})' for part in parts)})"

    def test(self, test: Condition) -> str | None:
        own = test.column in ITEM_COLUMNS and test.column not in self.hidden
        column = column_of(test.column, own)
        if test.operator == "null":
            return f'not ((exists cells["e{column}"]) or (exists cells["l{column}"]))'
        if test.operator in ("=", "in"):
            return f'cells["e{column}"] in {_key_list([digest_of(value) for value in test.values])}'
        value = test.values[0]
        if test.operator == "contains" and not isinstance(value, str):
            return f'json_contains(cells["l{column}"], "{digest_of(value)}")'
        if test.operator in ("contains", "like"):
            return None
        if isinstance(value, str):
            return None if is_long(value) else f'cells["t{column}"] {test.operator} "{ordered_text(value)}"'
        if isinstance(value, float) and math.isinf(value):
            return f'exists cells["n{column}"]' if (value > 0) == (test.operator in ("<", "<=")) else NONE
        return f'cells["n{column}"] {test.operator} "{ordered_number(value)}"'


def _key_list(digits: list[str]) -> str:
    return "[" + ", ".join(f'"{one}"' for one in digits) + "]"
