"""The files behind a collection: where each lies, and a key that tells when one has changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from diptych.data.captions import Captions, StoreRows


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
        return Path(self.store.path(row if self.rows is None else int(self.rows[row])))

    def relative(self, row: int) -> str:
        """The path of an image below the root, empty when it has no file there."""
        path = self.path(row)
        if path is None or not path.resolve().is_relative_to(self.root):
            return ""
        return os.path.relpath(path.resolve(), self.root).replace(os.sep, "/")

    def content(self, key: str) -> str:
        """The part of a key that depends on the content alone."""
        return key.rsplit(":", 1)[-1] if self.root else key

    def key(self, row: int, before: str) -> str:
        """size:time:hash of a file (hashed again only when size or time differ), else the store's key."""
        path = self.path(row)
        if path is None:
            return self.captions.images.content_key(row)
        stat = path.stat()
        start = f"{stat.st_size}:{stat.st_mtime_ns}:"
        return before if before.startswith(start) else start + self.captions.images.content_key(row)
