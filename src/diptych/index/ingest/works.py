"""An image on its way into an index or a file of vectors, and what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from diptych.data.captions import StoredImage
from diptych.index.protocol import Item, Vectors
from diptych.model.protocol import Local

ABSENT = "it is named by the collection but not on disk."
NOT_FINITE = "the model makes NaN or infinity of it: check the model and the picture."


@dataclass(slots=True)
class Work:
    """An image with its texts; ``reason`` says why it cannot be indexed.

    A new picture is encoded. ``keeps`` is the id of a known image of the same picture, whose vector it takes; ``done``
    says that nothing of it must be written.
    """

    row: int
    item: Item
    key: str = ""  # of the file, as an item's content begins with it
    texts: list[Item] = field(default_factory=list)
    done: bool = False
    keeps: str = ""
    picture: StoredImage | None = None
    reduced: bool = False  # the picture has fewer pixels than its file
    vector: Vectors | None = None
    local: Local | None = None
    reason: str = ""

    @property
    def names(self) -> set[str]:
        """The ids of the image and its texts."""
        return {self.item.id, *(text.id for text in self.texts)}

    @property
    def is_encoded(self) -> bool:
        """Whether the model made numbers of the picture."""
        return self.vector is not None and bool(np.isfinite(self.vector).all())

    def skipped(self) -> tuple[str, str]:
        """The id, as it can be printed, and the reason."""
        return self.item.id.encode("utf-8", "replace").decode(), self.reason


class End(Protocol):
    """Where images go: an index, or a file of vectors.

    The threads that read call ``key_before`` and ``compare``, the thread that encodes calls ``finish``, the thread that
    writes calls the others.
    """

    collection: int

    def key_before(self, id: str) -> str:
        """The key of the file that the end has seen under this id, empty where it has none."""
        ...

    def compare(self, work: Work) -> None:
        """Note whether an image is ``done``, and which vector it ``keeps``."""
        ...

    def accept(self, work: Work, look: Callable[[Work], None]) -> bool:
        """Whether an image belongs in the next chunk; ``look`` reads the picture of one that cannot keep its vector."""
        ...

    def finish(self, works: list[Work]) -> Any:
        """Compute what a chunk needs beside its pictures."""
        ...

    def commit(self, works: list[Work], finished: Any) -> None:
        """Write a chunk."""
        ...


@dataclass(slots=True)
class Built:
    """What ``index_collection`` did.

    ``images`` and ``texts`` are those of the collection, ``total`` all images of the index; ``moved`` ones kept their
    vector under another id.
    ``skipped`` are (image id, reason) of what could not be read, ``notes`` sentences for the user.
    """

    images: int = 0
    texts: int = 0
    added: int = 0
    updated: int = 0
    unchanged: int = 0
    removed: int = 0
    moved: int = 0
    total: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
