"""The files and columns behind a collection: where each lies, and a key that tells when one has changed.

A collection is recognised by its pictures: a folder that was renamed or moved stays the same collection.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from diptych.data.captions import Captions, StoreRows
from diptych.data.decode.extra_formats import is_video
from diptych.data.files import Member
from diptych.errors import DataError
from diptych.index.base import Index
from diptych.index.ingest.photos import PhotoFile
from diptych.index.protocol import Collection, Item


class CollectionFiles:
    """The files behind a collection's images, where there are any."""

    def __init__(self, captions: Captions) -> None:
        store: Any = captions.images
        self.rows = store.rows if isinstance(store, StoreRows) else None
        self.store: Any = store.store if isinstance(store, StoreRows) else store
        self.captions = captions
        root = getattr(self.store, "root", None)
        self.root = str(Path(root).resolve()) if root is not None and hasattr(self.store, "path") else ""

    def path(self, row: int) -> Path | None:
        """Where an image lies; None when the collection has no files."""
        if not self.root:
            return None
        return Path(self.store.path(self._row_in_store(row)))

    def open(self, row: int) -> AbstractContextManager[PhotoFile | None]:
        """The file or the member of a tar that an image is all of; None for images that have none of their own."""
        photo: Path | Member | None = self.path(row)
        if photo is None and self.has_photos:
            photo = self.store.member(self._row_in_store(row))
        return nullcontext() if photo is None or is_video(photo.name) else PhotoFile(photo)

    @property
    def has_photos(self) -> bool:
        """Whether images have bytes of their own, in files or in tars."""
        return bool(self.root) or hasattr(self.store, "member")

    def _row_in_store(self, row: int) -> int:
        return row if self.rows is None else int(self.rows[row])

    def relative(self, row: int) -> str:
        """The path of an image below the root, empty when it has no file there."""
        path = self.path(row)
        if path is None or not path.resolve().is_relative_to(self.root):
            return ""
        return os.path.relpath(path.resolve(), self.root).replace(os.sep, "/")

    def own_file(self, row: int) -> str:
        """The same for an image that is all of its file; empty for a frame of a video, too."""
        file = self.relative(row)
        return "" if is_video(file) else file

    def content(self, key: str) -> str:
        """The part of a key that depends on the content alone."""
        return key.rsplit(":", 1)[-1] if self.root else key

    def key(self, row: int, before: str, photo: PhotoFile | None = None) -> str:
        """size:time:hash of a file (hashed again only when size or time differ), else the store's key."""
        path, start = self.path(row), ""
        if path is not None:
            stat = path.stat()
            start = f"{stat.st_size}:{stat.st_mtime_ns}:"
            if before.startswith(start):
                return before
        return start + (self.captions.images.content_key(row) if photo is None else photo.content())

    def check_there(self) -> None:
        """Raise when the folder of the files is gone, or empty as the place of a drive that is not mounted."""
        _, folders, names = next(os.walk(self.root), ("", [], []))
        if self.root and not folders and not names:
            raise DataError(
                f"{self.root} disappeared while it was read; nothing was removed: bring it back and run the same "
                "command again, it continues."
            )


def collection_id(id: str, collection: int) -> str:
    """The id of an item in an index: its own, with the number of any later collection in front."""
    return id if collection == 0 else f"{collection}/{id}"


def own_name(captions: Captions) -> str:
    """The name of a collection: where it lies, however that was written, else what it is called."""
    place = Path(captions.name)
    return str(place.resolve()) if place.exists() else captions.name


def metadata_of(captions: Captions, row: int) -> Mapping[str, Any]:
    """The columns of one image, its split among them; NaN is not a value."""
    metadata = {str(name): values[row] for name, values in captions.labels.items()}
    metadata.setdefault("split", captions.splits[row])
    return {name: None if _is_nan(value) else value for name, value in metadata.items()}


def content_of(
    key: str, lines: Sequence[str], metadata: Mapping[str, Any], further: Sequence[str] = ()
) -> str:
    """What an item keeps of an image to know a change by: the key of its file, and a digest of what is said of it.

    ``further`` names columns that follow from the picture or its file, and so are not in ``metadata`` yet.
    """
    return f"{key}|{_digest([lines, metadata, *further])}"


def text_items(
    image_id: str,
    lines: Sequence[str],
    metadata: Mapping[str, Any],
    further: Sequence[str] = (),
    collection: int = 0,
) -> list[Item]:
    """The texts of an image as items; each has the columns of its image, so that a filter finds both."""
    return [
        Item(
            id=f"{image_id}#text{number}",
            kind="text",
            text=line,
            image_id=image_id,
            metadata=metadata,
            content=_digest([line, metadata, *further]),
            collection=collection,
        )
        for number, line in enumerate(lines)
    ]


def _digest(facts: Any) -> str:
    """16 hex digits of facts that JSON can write."""
    # numpy values as JSON knows them; a value that it does not know is refused by the index, by name
    plain = lambda value: value.tolist() if hasattr(value, "tolist") else repr(value)  # noqa: E731
    return hashlib.blake2b(json.dumps(facts, default=plain).encode(), digest_size=8).hexdigest()


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


SAMPLE = 48  # known pictures that are looked for at the new place
SHARE = 0.5  # share of them that must be there for a collection to count as the same
ALIKE = 8  # files of one name that are compared with a known one, at most


def settle(index: Index, captions: Captions, files: CollectionFiles, name: str) -> tuple[Collection, str]:
    """The collection that captions belong to, and a sentence for the user, empty where there is nothing to say.

    One of the same name and root; else one whose own place is gone and whose pictures are here: it moves with them;
    else a new one. A second copy of pictures that are still at the first place is a collection of its own.
    """
    known = index.info.collections
    if any((one.name, one.root) == (name, files.root) for one in known) or not files.root:
        return index.collection(name, files.root), ""
    note = ""
    for one in known:
        if not one.root or _share(index, one, captions, files) < SHARE:
            continue
        if not Path(one.root).exists() or one.root == files.root:
            index.move_collection(one.number, name, files.root)
            return Collection(
                one.number, name, files.root
            ), f"moved here from {one.root}: known by its pictures."
        note = (
            f"the index holds these pictures from {one.root} too: remove them with 'diptych index remove INDEX "
            f"--collection {one.root}'."
        )
    return index.collection(name, files.root), note


class KeptVectors:
    """Vectors of known images that others of the same content take: a renamed file is not encoded again.

    ``known`` are the (id, content) of the images; ``taken`` maps the id of a new one to the known id it takes after.
    """

    def __init__(self, index: Index, files: CollectionFiles, known: Iterable[tuple[str, str]]) -> None:
        self.index, self.files = index, files
        self.ids = {self._own(content): id for id, content in known} if files.root else {}
        self.taken: dict[str, str] = {}

    def find(self, row: int, key: str) -> str:
        """A known image of the content that a key names, empty where there is none; a frame has no file to compare."""
        return "" if is_video(self.files.relative(row)) else self.ids.get(self.files.content(key), "")

    def take(self, id: str, known: str, content: str) -> bool:
        """Note that an image takes the vector of a known one; False where this very run has changed that one."""
        (item,) = self.index.get([known])
        if item is None or self._own(item.content) != self._own(content):
            return False
        self.taken[id] = known
        return True

    def _own(self, content: str) -> str:
        """Of an item's content, the part that says what the picture shows."""
        return self.files.content(content.rsplit("|", 1)[0])


def _share(index: Index, known: Collection, captions: Captions, files: CollectionFiles) -> float:
    """Which part of a sample of a collection's images lies among these captions, by file name and content."""
    contents = list(index.contents(known.number, "image"))
    if not contents:
        return 0.0
    rows: dict[str, list[int]] = defaultdict(list)
    for row, here in enumerate(captions.image_ids):
        rows[str(here).rsplit("/", 1)[-1]].append(row)
    sample = contents[:: -(-len(contents) // SAMPLE)]
    return sum(_is_here(id, content, rows, files) for id, content in sample) / len(sample)


def _is_here(id: str, content: str, rows: Mapping[str, list[int]], files: CollectionFiles) -> bool:
    before = content.rsplit("|", 1)[0]
    for row in rows.get(id.rsplit("/", 1)[-1], [])[:ALIKE]:
        try:
            if files.content(files.key(row, before)) == files.content(before):
                return True
        except OSError:
            continue
    return False
