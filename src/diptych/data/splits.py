"""Names of splits, and a split that depends on a name alone.

The names used everywhere are ``train``, ``val`` and ``test`` (and ``testall``, the 5,000 COCO images of
which the published ``test`` holds the first 1,000). Files and columns may say ``dev``, ``valid`` or
``validation`` for ``val``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from diptych.errors import DataError

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "trn": "train",
    "val": "val",
    "dev": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "tst": "test",
    "testing": "test",
    "testall": "testall",
}
UNSPLIT = "train"  # split of data without splits, as in the datasets library


def canonical_split(name: str) -> str:
    """``dev``, ``valid``, ``validation`` become ``val``; any other name stays as it is."""
    return SPLIT_NAMES.get(name.strip().lower(), name.strip())


def split_in_name(name: str) -> str | None:
    """The split a file or folder is named after: ``flickr30k_train.json`` and ``val-0001.tar`` name one."""
    words = [SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_NAMES]
    return words[0] if words else None


def split_of_each(path: Path, files: Sequence[Path], what: str) -> list[str | None]:
    """The split that each of several files is named after; two files that cannot be told apart are refused."""
    splits = [split_in_name(file.stem) for file in files]
    if len(files) > 1 and (None in splits or len(set(splits)) < len(files)):
        names = ", ".join(file.name for file in files)
        raise DataError(
            f"{path} holds several {what} ({names}): keep one per split, or pass the path of the one to read."
        )
    return splits


def split_by_hash(key: str, val: float, test: float) -> str:
    """A split that depends on ``key`` alone: the same on every machine, whatever else the data holds."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "val" if place < val else "test" if place < val + test else "train"
