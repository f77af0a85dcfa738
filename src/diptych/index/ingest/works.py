"""An image on its way into an index: as it was read, what is to be written of it, and what was done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diptych.data.captions import StoredImage
from diptych.index.protocol import Item, Vectors
from diptych.model.protocol import Local

NOT_FINITE = "the model makes NaN or infinity of it: check the model and the picture."


@dataclass(slots=True)
class Work:
    """An image and those of its ``count`` texts that are to be written; a vector is None until it is encoded."""

    item: Item
    picture: StoredImage | None
    vector: Vectors | None
    texts: list[Item]
    count: int
    local: Local | None = None


@dataclass(slots=True)
class Read:
    """One image as a thread found it; ``refused`` or ``unread`` say why it cannot be indexed."""

    row: int
    id: str
    metadata: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)
    content: str = ""
    texts: list[Item] = field(default_factory=list)
    same: bool = False  # the picture, whose vector stays
    like: str = ""  # the known image of the same content whose vector this one takes
    lacking: bool = False  # local features of it are to be stored
    picture: StoredImage | None = None
    refused: str = ""
    unread: str = ""


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


def has_vector(work: Work) -> bool:
    """Whether the model made numbers of an image."""
    return work.vector is not None and bool(np.isfinite(work.vector).all())


def reason_of(error: Exception) -> str:
    """Why an image cannot be indexed."""
    if isinstance(error, UnicodeError):
        return "its name, texts or metadata are not valid Unicode: rename the file, or mend them."
    return str(error)
