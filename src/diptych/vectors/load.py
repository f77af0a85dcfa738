"""Vectors from files into an index: what ``diptych embed`` wrote, into any engine.

A loader compares every batch of a file with what the index holds and writes what differs, so a second run goes on where
a killed one was, and several loaders may run at once. It keeps no state of its own beside the index.

From a data set to the shards it is embedded in: a tar, a Parquet file, or a block of rows of anything else.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from diptych.data.captions import Captions
from diptych.data.formats import find, open_captions, split_options
from diptych.data.problems import Absent
from diptych.data.readers import parquet, webdataset
from diptych.errors import DataError
from diptych.index.ingest.collection_files import CollectionFiles, collection_id, own_name
from diptych.index.ingest.target import APPROXIMATE_ABOVE, Target, add_approximate, held_items
from diptych.index.protocol import Item, Precision
from diptych.progress import track
from diptych.storage import expanded
from diptych.vectors.files import GROUP, Shard, VectorFolder, open_vectors

PATIENCE = 600.0  # seconds for which an index that another loader writes is waited for


@dataclass(slots=True)
class LoadResult:
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
) -> LoadResult:
    """Fill an index from a folder of vectors, creating it if need be.

    ``part`` (i, n) takes each n-th shard from the i-th on. An index of another model is refused. Items keep the ids
    that ``diptych index`` would give them: those of a collection that is not the first of the index begin with its
    number. Nothing is removed. A shard that is damaged is left out and listed; the others are loaded. From
    ``approximate_above`` items of a kind on, the index is given an approximate index of them (None: never).
    """
    folder = open_vectors(out)
    # every n-th of all that are planned, so that parts stay apart while some are not whole
    names = set(folder.manifest.shards[part[0] - 1 :: part[1]])
    shards = [shard for shard in folder.shards if shard.name in names]
    if not shards:
        raise DataError(
            f"{folder.path} has no whole shard to load yet: run diptych embed to its end first, or wait for it."
        )
    done, begin = LoadResult(missing=len(folder.missing)), time.monotonic()
    manifest = folder.manifest
    target = Target(place, manifest.dim, manifest.fingerprint, manifest.model, precision, PATIENCE)
    with target.ready():  # an index that cannot take these vectors is refused before a file is read
        pass
    batches = sum(-(-shard.receipt.rows // GROUP) for shard in shards)
    for _ in track(_batches(shards, target, folder, done), "batches", batches, show_progress):
        pass
    if approximate_above is not None and not done.failed:
        with target.ready() as index:
            done.notes += add_approximate(index, approximate_above, show_progress=show_progress)
    done.seconds = time.monotonic() - begin
    return done


def _batches(shards: list[Shard], target: Target, folder: VectorFolder, done: LoadResult) -> Iterator[None]:
    """Load shards, batch by batch; the index is held for one shard at a time."""
    for shard in shards:
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
                same = [(one.content, one.path) if one else None for one in held]
                new = [n for n, item in enumerate(mine) if same[n] != (item.content, item.path)]
                if new:
                    index.update([mine[n] for n in new], np.ascontiguousarray(vectors[new]))
                done.written += len(new)
                done.unchanged += len(mine) - len(new)
                yield
        done.images += shard.receipt.images
        done.texts += shard.receipt.texts
        done.shards += 1


def _of_collection(item: Item, number: int) -> Item:
    """An item under the ids that ``diptych index`` gives those of a collection."""
    linked = collection_id(item.image_id, number) if item.image_id else ""
    return replace(item, id=collection_id(item.id, number), image_id=linked, collection=number)


ROWS = 10_000  # images of a shard where the data are not files of their own


@dataclass(frozen=True)
class ShardData:
    """The data of one shard, the pictures it names that are not on disk, and the size of its file."""

    captions: Captions
    absent: Sequence[str] = ()
    source_bytes: int = 0


@dataclass(frozen=True)
class FileSources:
    """Shards that are files: each is read by itself, so that a machine reads only its own.

    With several files an id is ``SHARD/KEY``: no process sees all keys, and tars often count from 0.
    """

    name: str
    names: tuple[str, ...]
    files: tuple[Path, ...]
    format: str
    options: dict[str, Any]
    root: str = ""
    digest: str = ""

    def size(self, name: str) -> int | None:
        """Bytes of the file behind a shard; None when it is not there."""
        file = self.files[self.names.index(name)]
        return file.stat().st_size if file.is_file() else None

    def open(self, name: str) -> ShardData:
        file, absent = self.files[self.names.index(name)], Absent()
        size = self.size(name)
        if size is None:
            raise DataError(f"{file} does not exist: copy it, or leave it out of the data.")
        captions = open_captions(file, format=self.format, problems=absent, **self.options)
        if len(self.files) > 1:
            captions = replace(captions, image_ids=[f"{name}/{id}" for id in captions.image_ids])
        return ShardData(captions, absent.files, size)


@dataclass(frozen=True)
class RowSources:
    """Shards that are blocks of rows of one data set, in its order."""

    name: str
    names: tuple[str, ...]
    captions: Captions
    rows: int
    absent: Sequence[str]
    root: str
    digest: str = field(repr=False)

    def size(self, name: str) -> int | None:
        """Blocks have no file of their own."""
        return 0

    def open(self, name: str) -> ShardData:
        """The data of one shard; pictures that are not on disk are listed with the first."""
        number = self.names.index(name)
        stop = min((number + 1) * self.rows, len(self.captions.images))
        return ShardData(
            self.captions.subset(range(number * self.rows, stop)), self.absent if number == 0 else ()
        )


Sources = FileSources | RowSources


def open_sources(data: str | Path, rows: int = ROWS) -> Sources:
    """What a data set is divided into. Tars and Parquet files are only listed, anything else is opened."""
    path, options = split_options(data)
    found = find(path)
    place = expanded(path)
    listed = {"webdataset": webdataset.tars, "parquet": parquet.tables}
    if found.name in listed:
        found.refuse_unknown(options)
        files = tuple(file.resolve() for file in listed[found.name](place))
        if found.name == "parquet" and "images" not in options:
            # every shard must find its pictures in the same folder, whichever machine reads it
            options = {**options, "images": str(parquet.image_folder(files))}
        root = str(Path(options["images"]).resolve()) if "images" in options else ""
        name = str(place.resolve()) if place.exists() else str(place)
        return FileSources(name, _names(files), files, found.name, options, root)
    absent = Absent()
    captions = open_captions(data, problems=absent)
    count = len(captions.images)
    if count == 0:
        raise DataError(f"{captions.name} has no images: there is nothing to embed.")
    width = max(5, len(str(count // rows)))
    names = tuple(f"{number:0{width}d}" for number in range(-(-count // rows)))
    root = CollectionFiles(captions).root
    return RowSources(own_name(captions), names, captions, rows, absent.files, root, _digest(captions, rows))


def absolute(data: str) -> str:
    """The same data as another process finds them, whatever folder it runs in."""
    path, options = split_options(data)
    place = expanded(path)
    if find(path).name == "emoji":  # a word, not a path
        return data
    written = [f"{name}={_absolute(value)}" for name, value in options.items()]
    return str(place.resolve() if place.exists() else place.absolute()) + ("?" + "&".join(written)) * bool(
        written
    )


def _absolute(value: Any) -> Any:
    known = isinstance(value, str) and expanded(value).exists()
    return expanded(value).resolve() if known else str(value).lower() if isinstance(value, bool) else value


def _names(files: Sequence[Path]) -> tuple[str, ...]:
    """The names of shards: those of the files, numbered where two are called alike."""
    stems = [file.name.removesuffix(file.suffix) for file in files]
    if max(Counter(stems).values(), default=0) == 1:
        return tuple(stems)
    return tuple(f"{number:05d}-{stem}" for number, stem in enumerate(stems))


def _digest(captions: Captions, rows: int) -> str:
    """A hash of what is divided: the ids in their order, the texts, and the size of a block."""
    digest = hashlib.sha256(f"{rows}\0".encode())
    for strings in (captions.image_ids, captions.texts):
        for string in strings:
            digest.update(string.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]
