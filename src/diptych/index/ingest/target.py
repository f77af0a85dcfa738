"""An index that changes: opened or made to be filled, given an approximate index, and what to remove from it.

An index of vectors that were made elsewhere.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout

from diptych.data.arrays import as_rows, check_rows, unit_rows
from diptych.errors import DataError, DiptychError, IndexFault, MissingExtra, QueryError, SettingsError
from diptych.index.base import Index
from diptych.index.engines.opening import empty_index, index_exists, open_index, without_password
from diptych.index.protocol import KINDS, Collection, Item, Precision, check_items, record
from diptych.index.query.filters import Filter
from diptych.storage import expanded

APPROXIMATE_ABOVE = 200_000  # items of a kind from which a scan takes tens of milliseconds on two cores
PAUSE = 0.1  # seconds between two attempts to open an index that another process writes


@dataclass(frozen=True)
class Target:
    """The place of an index, and what its vectors must be: ``precision`` None is float32 in a new index.

    ``patience`` is for how many seconds an embedded index that another process writes is waited for.
    """

    place: str | Path
    dimension: int
    fingerprint: str
    model: str = ""
    precision: Precision | None = None
    patience: float = 0.0

    @contextmanager
    def ready(self) -> Iterator[Index]:
        """The index, open for writing, made if there is none; one made here that stays empty is removed."""
        index, made = self._open()
        try:
            with index:
                self._check(index)
                yield index
        except DiptychError:
            if made:  # an empty index of a model that cannot read these images would stand in another's way
                _discard_empty(self.place)
            raise

    def _open(self) -> tuple[Index, bool]:
        """The index, and whether it was made just now."""
        until = time.monotonic() + self.patience
        while True:
            if not index_exists(self.place):
                try:
                    return empty_index(
                        self.place,
                        self.dimension,
                        model=self.model,
                        fingerprint=self.fingerprint,
                        precision=self.precision or "float32",
                    ), True
                except IndexFault:
                    if not index_exists(self.place):  # else another process made it first
                        raise
            try:
                return open_index(
                    self.place, writable=True, fingerprint=self.fingerprint, model=self.model
                ), False
            except IndexFault as error:
                if not isinstance(error.__context__, Timeout) or time.monotonic() >= until:
                    raise
                time.sleep(PAUSE)

    def _check(self, index: Index) -> None:
        info = index.info
        if self.precision is not None and info.precision != self.precision:
            raise SettingsError(
                f"{info.path} stores {info.precision} vectors, not {self.precision}: "
                "leave the precision out, or use another place."
            )
        if info.dimension != self.dimension:
            raise DataError(
                f"these vectors have {self.dimension} dimensions, {info.path} holds vectors of {info.dimension}: "
                "they are not those of its model; embed again, or use another place."
            )


def _discard_empty(place: str | Path) -> None:
    """Remove an index on disk that holds nothing; in a database it stays."""
    if "://" in str(place):
        return
    with suppress(IndexFault), open_index(place, writable=True) as index:  # unless another writes it by now
        if not any(index.count(kind) for kind in KINDS):
            shutil.rmtree(expanded(place))


def check_clash(taken: Sequence[str]) -> None:
    """Raise when ids that are about to be written belong to other items."""
    if taken:
        raise DataError(
            f"the index already has another item with the id '{min(taken)}': index it into another place."
        )


def held_items(index: Index, ids: Sequence[str], collection: int) -> list[Item | None]:
    """The items of these ids in the index; one that belongs to another collection is refused."""
    held = index.get(ids)
    check_clash([item.id for item in held if item is not None and item.collection != collection])
    return held


def add_approximate(
    index: Index,
    above: int | None,
    *,
    codes: bool | None = None,
    target_recall: float | None = None,
    show_progress: bool = False,
) -> list[str]:
    """Give an index approximate indexes of the kinds with at least ``above`` items (None: never).

    Notes say which kinds are searched without, and the recall of one that misses ``target_recall``.
    """
    notes = []
    for kind in KINDS if above is not None else ():
        if index.count(kind) >= max(1, above or 0):
            try:
                index.build_graph(kind, codes=codes, target_recall=target_recall, show_progress=show_progress)
                found = index.info.recall.get(kind)
                if found is not None and target_recall is not None and found.value < target_recall:
                    notes.append(
                        f"the approximate index of {kind}s misses the target {target_recall:g}: {found}."
                    )
            except (MissingExtra, SettingsError) as error:  # nothing that an exact search needs
                notes.append(f"the {index.count(kind):,} {kind} items are searched one by one: {error}")
    return notes


BATCH = 10_000  # ids removed in one transaction


def remove_items(index: Index, ids: Sequence[str]) -> dict[str, int]:
    """Remove items by id, images with their texts; how many of each kind went."""
    before = {kind: index.count(kind) for kind in KINDS}
    for some in batches(ids):
        index.delete(some)
    return {kind: before[kind] - index.count(kind) for kind in KINDS}


def known_ids(index: Index, ids: Sequence[str]) -> list[str]:
    """Ids that must all be in the index."""
    present = {item.id for item in index.get(ids) if item is not None}
    absent = [id for id in ids if id not in present]
    if absent:
        raise QueryError(
            f"'{absent[0]}' is not in the index {without_password(index.info.path)}, nothing was removed: check the id."
        )
    return list(ids)


def ids_that_pass(index: Index, condition: str | Filter) -> list[str]:
    """The ids of all items that pass a filter."""
    return [item.id for item in index.sample_items(None, condition, size=max(1, len(index)))]


def find_collection(index: Index, wanted: str) -> Collection:
    """The collection of this name, folder or number."""
    known = index.info.collections
    place = str(expanded(wanted).resolve())
    for same in (
        [one for one in known if wanted in (one.name, one.root)],
        [one for one in known if place in (one.name, one.root)],
        [one for one in known if wanted == str(one.number)],
    ):
        if len(same) == 1:
            return same[0]
        if same:
            roots = " or ".join(one.root or str(one.number) for one in same)
            raise QueryError(f"{len(same)} collections are called '{wanted}': say which, {roots}.")
    names = ", ".join(f"{one.number}: {one.root or one.name}" for one in known) or "none"
    raise QueryError(f"the index has no collection '{wanted}': it has {names}.")


def missing_ids(index: Index) -> list[str]:
    """The ids of images whose files are gone; a collection whose whole folder is gone is refused."""
    missing = []
    for one in index.info.collections:
        ids = [id for id, _ in index.contents(one.number, "image")]
        if one.root and ids and not Path(one.root).is_dir():
            raise QueryError(
                f"the folder {one.root} is not there, perhaps a drive that is not mounted, nothing was removed: bring "
                f"it back, or remove all its items with --collection {one.root}."
            )
        items = (item for some in batches(ids) for item in index.get(some) if item is not None)
        missing += [item.id for item in items if item.path and index.file(item) is None]
    return missing


def batches(ids: Sequence[str]) -> Iterator[list[str]]:
    """Ids, as many at a time as one transaction removes."""
    for start in range(0, len(ids), BATCH):
        yield list(ids[start : start + BATCH])


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
            f"{without_password(path)} already holds an index: add to it with open_index, or choose another path."
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
            shutil.rmtree(expanded(path))
        raise
    return index
