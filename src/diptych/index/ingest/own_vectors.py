"""An index of vectors that were made elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diptych.data.arrays import as_rows, check_rows, unit_rows
from diptych.errors import DataError, IndexFault
from diptych.index.base import Index
from diptych.index.engines.opening import empty_index, index_exists, shown
from diptych.index.protocol import Item, check_items, record

ROWS = 10_000  # written together


def create_index(
    path: str | Path,
    vectors: Any,
    *,
    ids: Sequence[str] | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    texts: Sequence[str] | None = None,
    normalize: bool = True,
) -> Index:
    """A new index of your own vectors, open for writing; nothing is written unless all of it is sound.

    ``vectors`` (N, D) is a numpy array, a tensor or a list of lists. Scores are dot products, so rows must have length
    1: with ``normalize`` they are brought to it, without it other rows are refused. ``ids`` name the rows (by default
    their numbers, "0", "1", …), ``metadata`` is one mapping of columns per row for filters, ``texts`` are words that
    full-text search reads. ``path`` is a folder or a database URL.

    Example::

        index = diptych.create_index("own.index", vectors, ids=["a", "b"], metadata=[{"price": 5}, {"price": 9}])
        hits = index.search(vectors[0], k=1, filter="price < 8")
    """
    rows = as_rows(vectors, "the vectors")
    check_rows(rows, "the vectors", unit=not normalize)
    if not len(rows):
        raise DataError("there are no vectors: an index needs at least one.")
    for name, values in (("ids", ids), ("metadata", metadata), ("texts", texts)):
        if values is not None and len(values) != len(rows):
            raise DataError(f"{len(rows)} vectors came with {len(values)} {name}: give one for each vector.")
    items = [
        Item(
            str(number) if ids is None else str(ids[number]),
            text="" if texts is None else texts[number],
            metadata={} if metadata is None else metadata[number],
        )
        for number in range(len(rows))
    ]
    check_items(items, len(rows))
    for item in items:
        record(item)
    if index_exists(path):
        raise IndexFault(
            f"{shown(path)} already holds an index: add to it with open_index, or choose another path."
        )
    index = empty_index(path, rows.shape[1])
    try:
        index.collection("vectors")
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            index.add(
                items[start : start + ROWS], unit_rows(some) if normalize else np.asarray(some, np.float32)
            )
    except BaseException:
        index.close()
        if "://" not in str(path):
            shutil.rmtree(Path(path).expanduser())
        raise
    return index
