"""Items as rows of Milvus, and back; the schemas of the two Milvus collections an index is made of.

``NAME`` holds a row per item, and in its description the facts of the index. ``NAME_facts`` holds what belongs to the
index as a whole: columns, collections, counters of changes, and the stored thumbnails. Milvus has no transaction over
several rows or collections, so every row can be written again without harm, and nothing counts until its item is there.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diptych.errors import DataError
from diptych.index.engines.milvus.pushdown import KIND_NUMBERS, cells_of, key_of
from diptych.index.engines.milvus.server import DataType, Function, FunctionType
from diptych.index.protocol import Item, Vectors, record

FIELD_BYTES = 65_535  # largest text or JSON value in Milvus
OVERHEAD = 600  # bytes of a row beside its vector and its item, to size requests by
Row = dict[str, Any]


def item_fields(schema: Any, dimension: int, words: bool = False) -> None:
    """The columns of a row per item; with ``words``, those from which the server computes BM25."""
    schema.add_field("pk", DataType.VARCHAR, is_primary=True, max_length=32)
    # grows with every item written, and decides between equal scores
    schema.add_field("serial", DataType.INT64)
    schema.add_field("kind", DataType.INT8)
    schema.add_field("collection", DataType.INT64)
    schema.add_field("image", DataType.VARCHAR, max_length=32)  # the key of a text's image, empty without one
    schema.add_field("pictures", DataType.INT64)  # rows of ``NAME_facts`` that hold its thumbnail
    schema.add_field("checksum", DataType.INT64)
    schema.add_field("item", DataType.VARCHAR, max_length=FIELD_BYTES)
    schema.add_field("cells", DataType.JSON)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
    if words:
        schema.add_field("words", DataType.VARCHAR, max_length=FIELD_BYTES, enable_analyzer=True)
        schema.add_field("weights", DataType.SPARSE_FLOAT_VECTOR)
        schema.add_function(
            Function(
                name="bm25",
                function_type=FunctionType.BM25,
                input_field_names=["words"],
                output_field_names=["weights"],
            )
        )


def fact_fields(schema: Any) -> None:
    """The columns of a row of ``NAME_facts``; Milvus wants a vector in every collection."""
    schema.add_field("pk", DataType.VARCHAR, is_primary=True, max_length=128)
    schema.add_field("what", DataType.VARCHAR, max_length=32)
    schema.add_field("value", DataType.VARCHAR, max_length=FIELD_BYTES)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)


def row(
    item: Item, vector: Vectors, serial: int, pictures: int, words: bool = False
) -> tuple[Row, dict[str, Any]]:
    """The row of an item and its metadata in plain values; raises for an item Milvus cannot hold."""
    fields = list(record(item))
    metadata: dict[str, Any] = json.loads(fields[5])
    fields[5] = metadata
    text, cells = json.dumps(fields, ensure_ascii=False), cells_of(item, metadata)
    size = max(len(text.encode()), len(json.dumps(cells)))
    if size > FIELD_BYTES:
        raise DataError(
            f"the texts and metadata of item '{item.id[:40]}' take {size:,} bytes, and Milvus holds {FIELD_BYTES:,} of "
            "an item: shorten them."
        )
    made: Row = {
        "pk": key_of(item.id),
        "serial": serial,
        "kind": KIND_NUMBERS[item.kind],
        "collection": item.collection,
        "image": key_of(item.image_id) if item.image_id else "",
        "pictures": pictures,
        "checksum": checksum(vector),
        "item": text,
        "cells": cells,
        "vector": vector,
    }
    if words:
        made["words"] = item.text
    return made, metadata


def item_of(row: Mapping[str, Any]) -> Item:
    """The item of a row."""
    return Item(*json.loads(row["item"]))


def checksum(vector: Any) -> int:
    """The checksum of a vector as it is stored."""
    return zlib.crc32(np.asarray(vector, "<f4").tobytes())


def vectors_of(rows: Sequence[Mapping[str, Any]], dimension: int) -> Vectors:
    """The vectors of rows, as rows (n, dimension)."""
    return np.array([one["vector"] for one in rows], np.float32).reshape(-1, dimension)


def row_bytes(row: Mapping[str, Any]) -> int:
    """About how much of a request a row takes."""
    return len(row.get("item", row.get("value", ""))) + 4 * len(row["vector"]) + OVERHEAD
