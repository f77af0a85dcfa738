"""Vectors from files into an index: what ``diptych embed`` wrote, into any engine.

A loader compares every batch of a file with what the index holds and writes what differs, so a second run goes on where
a killed one was, and several loaders may run at once. It keeps no state of its own beside the index.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import filelock
import numpy as np

from diptych.errors import DataError, IndexFault, MissingExtra, SettingsError
from diptych.index.engines.opening import empty_index, index_exists, open_index
from diptych.index.ingest.build import APPROXIMATE_ABOVE
from diptych.index.protocol import KINDS, Index, Item, Precision
from diptych.progress import track
from diptych.vectors.files import GROUP, VectorFolder, Written, open_vectors
from diptych.vectors.manifest import Manifest

PAUSE, PATIENCE = 0.1, 600.0  # seconds between two tries for an index that another writes, and of all tries


@dataclass(slots=True)
class Loaded:
    """What ``load`` did: ``failed`` are (shard, reason), ``missing`` shards that are not embedded yet."""

    images: int = 0
    texts: int = 0
    written: int = 0
    unchanged: int = 0
    shards: int = 0
    seconds: float = 0.0
    failed: list[tuple[str, str]] = field(default_factory=list)
    missing: int = 0
    notes: list[str] = field(default_factory=list)


def load(
    out: str | Path,
    place: str | Path,
    *,
    part: tuple[int, int] = (1, 1),
    precision: Precision | None = None,
    approximate_above: int | None = APPROXIMATE_ABOVE,
    show_progress: bool = False,
) -> Loaded:
    """Fill an index from a folder of vectors, creating it if need be.

    ``part`` (i, n) takes each n-th shard from the i-th on. An index of another model is refused. Items keep the ids
    that ``diptych index`` would give them: those of a collection that is not the first of the index begin with its
    number. Nothing is removed. A shard that is damaged is left out and listed; the others are loaded. From
    ``approximate_above`` items of a kind on, the index is given an approximate index of them (None: never).
    """
    folder = open_vectors(out)
    chosen = _of_part(folder, part)
    if not chosen:
        raise DataError(
            f"{folder.path} has no whole shard to load yet: run diptych embed to its end first, or wait for it."
        )
    done, begin = Loaded(missing=len(folder.missing)), time.monotonic()
    _ensure(folder.manifest, place, precision)
    batches = sum(-(-shard.receipt.rows // GROUP) for shard in chosen)
    for _ in track(_batches(chosen, place, folder.manifest, done), "batches", batches, show_progress):
        pass
    if approximate_above is not None and not done.failed:
        with _writer(place, folder.manifest) as index:
            _build(index, max(1, approximate_above), done, show_progress)
    done.seconds = time.monotonic() - begin
    return done


def _of_part(folder: VectorFolder, part: tuple[int, int]) -> list[Written]:
    """The whole shards of a part: every n-th of all that are planned, so that parts stay apart while some are not."""
    names = set(folder.manifest.shards[part[0] - 1 :: part[1]])
    return [shard for shard in folder.written if shard.name in names]


def _ensure(manifest: Manifest, place: str | Path, precision: Precision | None) -> None:
    """An index at a place that takes these vectors: made if there is none, by whichever loader is first."""
    if not index_exists(place):
        try:
            empty_index(
                place,
                manifest.dim,
                model=manifest.model,
                fingerprint=manifest.fingerprint,
                precision=precision or "float32",
            ).close()
        except IndexFault:
            if not index_exists(place):  # another loader was quicker otherwise
                raise
    with open_index(place, fingerprint=manifest.fingerprint, model=manifest.model) as index:
        info = index.info
    if precision is not None and info.precision != precision:
        raise SettingsError(
            f"{info.path} stores {info.precision} vectors, not {precision}: leave the precision out, or load into "
            "another place."
        )
    if info.dimension != manifest.dim:
        raise DataError(
            f"the manifest says {manifest.dim} dimensions, {info.path} holds vectors of {info.dimension}: embed again, "
            "the manifest is not that of its files."
        )


@contextmanager
def _writer(place: str | Path, manifest: Manifest) -> Iterator[Index]:
    """The index, open for writing; an embedded one that another loader writes is waited for."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            index = open_index(place, writable=True, fingerprint=manifest.fingerprint, model=manifest.model)
            break
        except IndexFault as error:
            if not isinstance(error.__context__, filelock.Timeout) or time.monotonic() > until:
                raise
            time.sleep(PAUSE)
    with index:
        yield index


def _batches(chosen: list[Written], place: str | Path, manifest: Manifest, done: Loaded) -> Iterator[None]:
    """Load shards, batch by batch; the index is held for one shard at a time."""
    for shard in chosen:
        try:
            shard.check()
        except DataError as error:
            done.failed.append((shard.name, str(error)))
            continue
        with _writer(place, manifest) as index:
            number = index.collection(manifest.name, manifest.root).number
            for items, vectors in shard.batches(GROUP):
                mine = [_of_collection(item, number) for item in items]
                new = _differing(index, mine)
                if new:
                    index.update([mine[n] for n in new], np.ascontiguousarray(vectors[new]))
                done.written += len(new)
                done.unchanged += len(mine) - len(new)
                yield
        done.images += shard.images
        done.texts += shard.texts
        done.shards += 1


def _of_collection(item: Item, number: int) -> Item:
    """An item as ``diptych index`` names those of a collection: a later one's number stands before every id."""
    if number == 0:
        return replace(item, collection=0)
    linked = f"{number}/{item.image_id}" if item.image_id else ""
    return replace(item, id=f"{number}/{item.id}", image_id=linked, collection=number)


def _differing(index: Index, items: list[Item]) -> list[int]:
    """Which items the index does not hold as they are; one of another collection stands in the way of the same id."""
    new = []
    for n, (item, held) in enumerate(zip(items, index.get([item.id for item in items]), strict=True)):
        if held is None or (held.content, held.path) != (item.content, item.path):
            new.append(n)
        if held is not None and held.collection != item.collection:
            raise DataError(
                f"the index already has another item with the id '{item.id}': load these vectors into another place."
            )
    return new


def _build(index: Index, above: int, done: Loaded, show_progress: bool) -> None:
    for kind in KINDS:
        if index.count(kind) >= above:
            try:
                index.build_graph(kind, show_progress=show_progress)
            except (MissingExtra, SettingsError) as error:  # nothing that an exact search needs
                done.notes.append(f"the {index.count(kind):,} {kind} items are searched one by one: {error}")
