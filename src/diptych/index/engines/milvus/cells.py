"""Metadata as Milvus compares it: every value as hexadecimal digits, so that nothing in it is ever read as a filter.

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
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from diptych.index.protocol import Item
from diptych.index.query.filters import ITEM_COLUMNS, kind_of

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
        value = _exact(value)
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


def _exact(number: float) -> str:
    if isinstance(number, float) and math.isfinite(number) and number.is_integer():
        number = int(number)
    return repr(number)


def _digest(data: bytes, size: int) -> str:
    return hashlib.blake2b(data, digest_size=size).hexdigest()
