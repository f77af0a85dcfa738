"""What a collection's files tell beside their pixels, and features of them that another command has computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diptych.data.captions import StoredImage
from diptych.data.readers.webdataset import Member
from diptych.errors import DataError, StorageError
from diptych.index.ingest.exif import is_photo, photo_facts
from diptych.model.protocol import CellCache

EXIF = (
    "exif 1"  # part of an item's digest: an item that was indexed before its EXIF was read is written again
)


@dataclass
class PhotoColumns:
    """The EXIF columns of photos; dates that are none are counted."""

    nonsense: dict[str, str] = field(default_factory=dict)

    def of(self, id: str, photo: Path | Member | None) -> dict[str, Any]:
        """The columns of one photo, none for what is not a file."""
        if photo is None or not is_photo(photo):
            return {}
        facts, claimed = photo_facts(photo)
        if claimed:
            self.nonsense[id] = claimed
        return facts

    def notes(self) -> list[str]:
        """A sentence about dates that are none."""
        if not self.nonsense:
            return []
        count, (id, claimed) = len(self.nonsense), next(iter(self.nonsense.items()))
        photos = "1 photo has" if count == 1 else f"{count:,} photos have"
        return [f"{photos} an EXIF date that is none, which is ignored: {id} says '{claimed[:40]}'."]


class SharedFeatures:
    """The feature cache as an index uses it: cells that are known are read, others are computed and added.

    The cache is a convenience here: where it cannot be written, the index is made without it.
    """

    def __init__(self, cache: CellCache) -> None:
        self.cache, self.writing = cache, True
        self.note = ""

    @staticmethod
    def of(model: Any) -> SharedFeatures | None:
        """The cache of a model whose image encoder has a frozen backbone, else None."""
        opening = getattr(model, "cell_cache", None)
        cache = None if opening is None else opening()
        return None if cache is None else SharedFeatures(cache)

    def known(self, key: str) -> NDArray[Any] | None:
        """The cells of a picture that some command has computed."""
        try:
            return self.cache.known(key)
        except DataError:  # it was cleared meanwhile
            return None

    def items(self, keys: Sequence[str], pictures: Sequence[StoredImage]) -> Sequence[StoredImage]:
        """Cells in the place of pictures; what is cells already stays."""
        new = [n for n, picture in enumerate(pictures) if isinstance(picture, Image.Image)]
        if not new or not self.writing:
            return pictures if not new else self._computed(keys, pictures, new, store=False)
        try:
            return self._computed(keys, pictures, new, store=True)
        except StorageError as error:
            self.writing, self.note = False, f"features are not cached: {error}"
            return self._computed(keys, pictures, new, store=False)

    def _computed(
        self, keys: Sequence[str], pictures: Sequence[StoredImage], new: Sequence[int], store: bool
    ) -> Sequence[StoredImage]:
        cells = self.cache.compute([keys[n] for n in new], [pictures[n] for n in new], store=store)
        made: dict[int, NDArray[np.float16]] = dict(zip(new, cells, strict=True))
        return [made.get(n, picture) for n, picture in enumerate(pictures)]
