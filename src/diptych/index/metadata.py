"""Items as every engine stores them: what their metadata may hold, and their fields as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from diptych.errors import DataError
from diptych.index.protocol import Item

MAX_COLUMNS = 2_000  # largest number of columns of an index: every filter and every page reads their list
EXACT_INTEGER = 2**53  # beyond it float64 skips integers: such numbers are compared as integers


def plain(id: str, name: object, value: Any) -> Any:
    """A value as it is stored; raises when it cannot be."""
    if hasattr(value, "tolist"):  # numpy scalars and arrays, as they come out of label columns
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if value != value or abs(value) == float("inf"):
            raise DataError(f"item '{id}' has {value} in column '{name}': use null for a missing number.")
        return value
    if isinstance(value, list | tuple) and not any(isinstance(one, list | tuple | dict) for one in value):
        values = [plain(id, name, one) for one in value]
        if not any(isinstance(one, list) for one in values):  # of arrays
            return values
    raise DataError(
        f"item '{id}' has a {type(value).__name__} in column '{name}': "
        "metadata values are numbers, texts, true, false, null, or lists of these."
    )


def check_storable(id: str, metadata: Mapping[str, Any]) -> None:
    """Raise when an id or a value of metadata cannot be stored, before an item is made of them."""
    if "\x00" in id:
        raise DataError(f"the id {id!r} holds a NUL character: remove it.")
    for name, value in metadata.items():
        plain(id, name, value)


def check_column_count(count: int) -> None:
    """Raise when an index would have more columns than one can be read in a moment."""
    if count > MAX_COLUMNS:
        raise DataError(
            f"the index would have {count} metadata columns, the limit is {MAX_COLUMNS}: give items the same columns."
        )


def held_kinds(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The kinds of value in each column, from (name, kind) of values; null is none."""
    found: dict[str, set[str]] = {}
    for name, kind in pairs:
        found.setdefault(name, set()).update({kind} - {"null"})
    return found


def record(item: Item) -> tuple[Any, ...]:
    """The stored columns of an item after its slot; raises when they cannot be stored."""
    check_storable(item.id, {})
    metadata = {str(name): plain(item.id, name, value) for name, value in item.metadata.items()}
    data = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    texts = (item.id, item.kind, item.path, item.text, item.image_id, data, item.content)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"item {item.id!r} holds {error.object[error.start]!r}, which is not a character: remove it."
        ) from error
    return (*texts, item.collection)
