"""From a data set to the shards it is embedded in: a tar, a Parquet file, or a block of rows of anything else."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diptych.data.captions import Captions
from diptych.data.formats import divided, find, located, open_captions
from diptych.data.problems import Absent
from diptych.data.readers import parquet, webdataset
from diptych.errors import DataError
from diptych.index.ingest.collection_files import CollectionFiles, own_name

ROWS = 10_000  # images of a shard where the data are not files of their own


@dataclass(frozen=True)
class Opened:
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

    def open(self, name: str) -> Opened:
        """The data of one shard."""
        file, absent = self.files[self.names.index(name)], Absent()
        size = self.size(name)
        if size is None:
            raise DataError(f"{file} does not exist: copy it, or leave it out of the data.")
        captions = open_captions(file, format=self.format, problems=absent, **self.options)
        if len(self.files) > 1:
            captions = replace(captions, image_ids=[f"{name}/{id}" for id in captions.image_ids])
        return Opened(captions, absent.files, size)


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

    def open(self, name: str) -> Opened:
        """The data of one shard; pictures that are not on disk are listed with the first."""
        number = self.names.index(name)
        stop = min((number + 1) * self.rows, len(self.captions.images))
        return Opened(
            self.captions.subset(range(number * self.rows, stop)), self.absent if number == 0 else ()
        )


Sources = FileSources | RowSources


def open_sources(data: str | Path, rows: int = ROWS) -> Sources:
    """What a data set is divided into. Tars and Parquet files are only listed, anything else is opened."""
    path, options = divided(data)
    found = find(path)
    place = located(path)
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
    path, options = divided(data)
    place = located(path)
    if find(path).name == "emoji":  # a word, not a path
        return data
    written = [f"{name}={_absolute(value)}" for name, value in options.items()]
    return str(place.resolve() if place.exists() else place.absolute()) + ("?" + "&".join(written)) * bool(
        written
    )


def _absolute(value: Any) -> Any:
    known = isinstance(value, str) and located(value).exists()
    return located(value).resolve() if known else str(value).lower() if isinstance(value, bool) else value


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
