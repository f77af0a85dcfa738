"""Items on their way into PostgreSQL: checked, their words counted, their vectors as they are stored."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diptych.errors import DataError, SettingsError
from diptych.index.engines.postgres.database import HalfVector, Vector
from diptych.index.engines.postgres.pushdown import exact, storable
from diptych.index.metadata import record
from diptych.index.protocol import Item, Vectors
from diptych.index.query.bm25 import Tokenizer

ID_BYTES = 2_000  # an index of PostgreSQL holds no longer keys
COLUMNS = ", ".join(
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
    plain = [_checked(one) for one in items]
    words = tokenizer.words([one.text for one in items])
    out = []
    for one, metadata, counts, row in zip(items, plain, words, vectors, strict=True):
        vector = Vector(row) if precision == "float32" else HalfVector(_halves(row))
        out.append(Record(one, metadata, dict(counts), vector, checksum(vector)))
    return out


def item(row: Sequence[Any]) -> Item:
    """The item of a row of ``COLUMNS``."""
    id, kind, path, text, image_id, metadata, content, collection = row
    return Item(id, kind, path, text, image_id, metadata, content, collection)


def checksum(vector: Any) -> int:
    """The checksum of a vector as the server stores it."""
    return zlib.crc32(vector.to_binary())


def storable_ids(ids: Sequence[str]) -> list[str]:
    """Those ids that can be in a PostgreSQL index at all."""
    return [id for id in ids if storable(id)]


def rows_of(vectors: Sequence[Any], dimension: int) -> Vectors:
    """Vectors as they come from the server, as rows (n, dimension)."""
    out = np.zeros((len(vectors), dimension), np.float32)
    for row, vector in enumerate(vectors):
        out[row] = vector.to_numpy()
    return out


def _checked(one: Item) -> dict[str, Any]:
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


def _halves(row: Vectors) -> Any:
    with np.errstate(over="ignore"):
        halves = row.astype(np.float16)
    if not np.isfinite(halves).all():
        raise SettingsError(
            f"a vector has the value {np.abs(row).max():g}, beyond float16: store this index as float32."
        )
    return halves
