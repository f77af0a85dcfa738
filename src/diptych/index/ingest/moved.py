"""A collection is known again by its pictures: a folder that was renamed or moved stays the same collection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from diptych.data.captions import Captions
from diptych.data.decode.video_files import is_video
from diptych.index.ingest.collection_files import CollectionFiles
from diptych.index.protocol import Collection, Index

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
    rows = _rows_by_name(captions)
    sample = contents[:: -(-len(contents) // SAMPLE)]
    return sum(_is_here(id, content, rows, files) for id, content in sample) / len(sample)


def _rows_by_name(captions: Captions) -> Mapping[str, list[int]]:
    rows: dict[str, list[int]] = defaultdict(list)
    for row, id in enumerate(captions.image_ids):
        rows[str(id).rsplit("/", 1)[-1]].append(row)
    return rows


def _is_here(id: str, content: str, rows: Mapping[str, list[int]], files: CollectionFiles) -> bool:
    before = content.rsplit("|", 1)[0]
    for row in rows.get(id.rsplit("/", 1)[-1], [])[:ALIKE]:
        try:
            if files.content(files.key(row, before)) == files.content(before):
                return True
        except OSError:
            continue
    return False
