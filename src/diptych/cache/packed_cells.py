"""Cells of pictures that come a few at a time, kept on disk by content; nothing here needs torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.cache.contents import PACKS
from diptych.cache.feature_pack import MISSING, FeaturePack
from diptych.cache.rows import to_half
from diptych.data.captions import StoredImage
from diptych.storage import cache_folder

Cells = NDArray[np.float32]


class PackedCells:
    """What ``index`` reads and adds: the cells of pictures by their content keys.

    ``cells`` computes those of some pictures, (n, R, C).
    """

    def __init__(self, pack: FeaturePack, cells: Callable[[Sequence[StoredImage]], Cells]) -> None:
        self.pack, self.cells = pack, cells
        self.pack.hold()

    def known(self, key: str) -> NDArray[Any] | None:
        """The cells (R, C) float16 of the picture of this key, None where they were never computed."""
        places = self.pack.find([key])
        if places[0] == MISSING:
            return None
        self.pack.note_use(places)
        out = np.empty((1, *self.pack.shape), dtype=np.float16)
        self.pack.read(places, out)
        return np.asarray(out[0])

    def compute(
        self, keys: Sequence[str], pictures: Sequence[StoredImage], *, store: bool = True
    ) -> NDArray[np.float16]:
        """The cells (n, R, C) of pictures, computed now and, unless told not to, added to the pack."""
        cells = self.cells(pictures)
        if store:
            self.pack.append(keys, cells)
        return to_half(cells)


def cell_pack(
    backbone: str, identity: str, precision: str, title: str, folder: str | Path | None = None
) -> FeaturePack:
    """The pack of a backbone, by its fingerprint, how pictures are prepared, and the precision.

    torch and ONNX Runtime share it: a runtime is refused where their cells differ by more than 1e-5.
    """
    key = content_name(backbone, identity, precision)
    return FeaturePack(cache_folder(folder) / PACKS / key, title)


def content_name(*parts: str) -> str:
    """24 hex digits that name the content the parts stand for."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
