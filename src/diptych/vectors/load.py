"""Vectors from files into an index: what ``diptych embed`` wrote, into any engine.

A loader compares every batch of a file with what the index holds and writes what differs, so a second run goes on where
a killed one was, and several loaders may run at once. It keeps no state of its own beside the index.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from diptych.errors import DataError
from diptych.index.ingest.collection_files import collection_id
from diptych.index.ingest.target import APPROXIMATE_ABOVE, Target, add_approximate, held_items
from diptych.index.protocol import Item, Precision
from diptych.progress import track
from diptych.vectors.files import GROUP, VectorFolder, Written, open_vectors

PATIENCE = 600.0  # seconds for which an index that another loader writes is waited for


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
    manifest = folder.manifest
    target = Target(place, manifest.dim, manifest.fingerprint, manifest.model, precision, PATIENCE)
    with target.ready():  # an index that cannot take these vectors is refused before a file is read
        pass
    batches = sum(-(-shard.receipt.rows // GROUP) for shard in chosen)
    for _ in track(_batches(chosen, target, folder, done), "batches", batches, show_progress):
        pass
    if approximate_above is not None and not done.failed:
        with target.ready() as index:
            done.notes += add_approximate(index, approximate_above, show_progress=show_progress)
    done.seconds = time.monotonic() - begin
    return done


def _of_part(folder: VectorFolder, part: tuple[int, int]) -> list[Written]:
    """The whole shards of a part: every n-th of all that are planned, so that parts stay apart while some are not."""
    names = set(folder.manifest.shards[part[0] - 1 :: part[1]])
    return [shard for shard in folder.written if shard.name in names]


def _batches(chosen: list[Written], target: Target, folder: VectorFolder, done: Loaded) -> Iterator[None]:
    """Load shards, batch by batch; the index is held for one shard at a time."""
    for shard in chosen:
        try:
            shard.check()
        except DataError as error:
            done.failed.append((shard.name, str(error)))
            continue
        with target.ready() as index:
            number = index.collection(folder.manifest.name, folder.manifest.root).number
            for items, vectors in shard.batches(GROUP):
                mine = [_of_collection(item, number) for item in items]
                held = held_items(index, [item.id for item in mine], number)
                new = [n for n, item in enumerate(mine) if _differs(item, held[n])]
                if new:
                    index.update([mine[n] for n in new], np.ascontiguousarray(vectors[new]))
                done.written += len(new)
                done.unchanged += len(mine) - len(new)
                yield
        done.images += shard.images
        done.texts += shard.texts
        done.shards += 1


def _of_collection(item: Item, number: int) -> Item:
    """An item under the ids that ``diptych index`` gives those of a collection."""
    linked = collection_id(item.image_id, number) if item.image_id else ""
    return replace(item, id=collection_id(item.id, number), image_id=linked, collection=number)


def _differs(item: Item, held: Item | None) -> bool:
    return held is None or (held.content, held.path) != (item.content, item.path)
