"""Frame features of videos: (frames, D) arrays in ``.npy`` files, in one HDF5 file or in rows of one array.

They are read on access, at most ``frames`` of a video, at equal distances over it; 0 keeps all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import KEY_BYTES, ArrayStore
from diptych.errors import DataError, at_least, import_extra

FRAMES = 20  # frames per video, as in published code


def evenly(count: int, frames: int) -> NDArray[np.int64]:
    """Which of ``count`` frames are kept when at most ``frames`` are: the first, the last and those between."""
    if frames <= 0 or count <= frames:
        return np.arange(count, dtype=np.int64)
    return np.round(np.linspace(0, count - 1, frames)).astype(np.int64)


class FrameStore:
    """Features of the frames of ``items``, one per video; at most ``frames`` of each are kept."""

    features = True

    def __init__(self, items: Sequence[Any], frames: int = FRAMES) -> None:
        self.items, self.frames = items, at_least(frames, "frames", 0)

    def __len__(self) -> int:
        return len(self.items)


class FrameFiles(FrameStore):
    """One ``.npy`` file per video."""

    def __getitem__(self, index: int) -> NDArray[Any]:
        store = ArrayStore(self.items[index])
        rows = _as_rows(store.rows(np.arange(len(store))), str(self.items[index]))
        return rows[evenly(len(rows), self.frames)]

    def content_key(self, index: int) -> str:
        path = self.items[index]
        with path.open("rb") as handle:
            digest = hashlib.blake2b(str(os.fstat(handle.fileno()).st_size).encode(), digest_size=16)
            digest.update(handle.read(KEY_BYTES))
        return f"{digest.hexdigest()}/{self.frames}"


class HDF5Frames(FrameStore):
    """Data sets of one HDF5 file, one per video."""

    def __init__(self, path: Path, names: Sequence[str], frames: int = FRAMES) -> None:
        super().__init__(names, frames)
        self.path = path
        self._file: Any = None

    def __getitem__(self, index: int) -> NDArray[Any]:
        if self._file is None:  # any thread may read it: the library has a lock of its own
            self._file = open_hdf5(self.path)
        label = f"{self.path}, '{self.items[index]}'"
        try:
            rows = self._file[self.items[index]]
            values = rows[evenly(len(rows), self.frames)] if rows.ndim == 2 else rows[()]
        except (OSError, KeyError, AttributeError, RuntimeError, ValueError, TypeError) as error:
            raise DataError(f"{label} cannot be read ({error}): copy the file again.") from error
        rows = _as_rows(np.asarray(values), label)
        return rows[evenly(len(rows), self.frames)]

    def content_key(self, index: int) -> str:
        rows = np.ascontiguousarray(self[index])
        digest = hashlib.blake2b(f"{self.items[index]}{rows.shape}{rows.dtype}".encode(), digest_size=16)
        digest.update(rows.tobytes()[:KEY_BYTES])
        return f"{digest.hexdigest()}/{self.frames}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # an open file means nothing elsewhere


class FrameRows(FrameStore):
    """Rows of one array, some for each video."""

    def __init__(self, store: ArrayStore, rows: Sequence[NDArray[np.int64]], frames: int = FRAMES) -> None:
        super().__init__(rows, frames)
        self.store = store

    def __getitem__(self, index: int) -> NDArray[Any]:
        own = self.items[index]
        return self.store.rows(own[evenly(len(own), self.frames)])

    def content_key(self, index: int) -> str:
        own = self.items[index]
        return f"{self.store.content_key(int(own[0]))}/{len(own)}/{self.frames}"


def features_folder(folder: Path, found: Sequence[str], name: str | None, missing: str) -> Path:
    """The folder of the features asked for, or of the only ones ``found``; ``missing`` says what to do without any."""
    if name is None and len(found) == 1:
        return folder / found[0]
    if name in found:
        return folder / str(name)
    if not found:
        raise DataError(f"{folder} holds no {missing}")
    what = f"no features '{name}'" if name else "several kinds of features"
    raise DataError(f"{folder} holds {what}: choose with PATH?features=NAME, one of {', '.join(found)}.")


def held_in_hdf5(path: Path, names: Iterable[str]) -> set[str]:
    """Those of ``names`` that an HDF5 file has a data set of."""
    with open_hdf5(path) as file:
        try:
            return {name for name in names if name in file}
        except (RuntimeError, ValueError, OSError, KeyError) as error:
            raise DataError(f"{path} is damaged ({error}): copy it again.") from error


def open_hdf5(path: Path) -> Any:
    """An HDF5 file, open for reading."""
    h5py = import_extra("h5py", "hdf5", f"reading {path.name}")
    try:
        return h5py.File(path, "r")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: check the path.") from error
    except OSError as error:
        raise DataError(f"{path} is not an HDF5 file ({error}): copy it again.") from error


def _as_rows(values: NDArray[Any], label: str) -> NDArray[Any]:
    """Features (frames, D) from (frames, D), (1, frames, D) or (D,)."""
    array = values[None] if values.ndim == 1 else values
    array = array[0] if array.ndim == 3 and len(array) == 1 else array
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind != "f":
        raise DataError(f"{label} holds {values.dtype} {values.shape}: features are floats (frames, D).")
    return array
