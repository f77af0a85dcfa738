"""What to remove from an index: a collection, what passes a filter, or images whose files are gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from diptych.errors import QueryError
from diptych.index.engines.opening import shown
from diptych.index.protocol import KINDS, Collection, Index
from diptych.index.query.filters import Filter

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
            f"'{absent[0]}' is not in the index {shown(index.info.path)}, nothing was removed: check the id."
        )
    return list(ids)


def ids_that_pass(index: Index, condition: str | Filter) -> list[str]:
    """The ids of all items that pass a filter."""
    return [item.id for item in index.sample_items(None, condition, size=max(1, len(index)))]


def find_collection(index: Index, wanted: str) -> Collection:
    """The collection of this name, folder or number."""
    known = index.info.collections
    place = str(Path(wanted).expanduser().resolve())
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
        for some in batches(ids):
            for item in index.get(some):
                if item is not None and item.path and index.file(item) is None:
                    missing.append(item.id)
    return missing


def batches(ids: Sequence[str]) -> Iterator[list[str]]:
    """Ids, as many at a time as one transaction removes."""
    for start in range(0, len(ids), BATCH):
        yield list(ids[start : start + BATCH])
