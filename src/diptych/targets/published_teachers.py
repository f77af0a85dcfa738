"""Teacher vectors that exist already: a matrix with a row per image, or CUSA's pickled dict {image id: vector}."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.cache.contents import content_name
from diptych.cache.rows import RowFile
from diptych.data.arrays import ArrayStore, LazyArray, ranges
from diptych.data.decode.pickles import NPY, open_pickle
from diptych.errors import DataError
from diptych.progress import track
from diptych.storage import cache_folder
from diptych.targets.teachers import Projection

MOST_STEPS = 100_000_000  # instructions of a dict of a few million vectors
CHUNK = 512  # vectors between two writes


def read_vectors(
    path: str | Path,
    ids: Sequence[str],
    folder: str | Path | None = None,
    *,
    project: int = 0,
    show_progress: bool = True,
) -> ArrayStore:
    """Vectors (N, dim) of the images called ``ids``, in this order, out of a file of either kind.

    A plain ``.npy`` matrix must have one row per image, in the order of the data. A pickled dict
    (``train_unicom.npy``: {image id: (1, D)}) is converted once to a float16 matrix in the cache folder; no code in it
    is run, ids it has beyond these are left out, and a missing id is an error before anything is written.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"the teacher file {path} does not exist: check the path, or name a teacher.")
    if not _is_pickle(path):
        return _matrix(ArrayStore(path, mapped=True), path, len(ids), project)
    contents = hashlib.sha256("\0".join(ids).encode()).hexdigest()
    stamp = path.stat()
    projection = Projection(project)
    key = content_name(
        "published", str(stamp.st_size), str(stamp.st_mtime_ns), contents, projection.identity()
    )
    target = cache_folder(folder) / f"teacher-images-{key}.npy"
    with RowFile(target, key, overwrite=True) as file:
        if not file.finished:
            try:
                _convert(file, path, ids, projection, show_progress)
            except DataError:
                file.discard()
                raise
    return ArrayStore(target, mapped=True)


def _convert(
    file: RowFile, path: Path, ids: Sequence[str], projection: Projection, show_progress: bool
) -> None:
    rows = list(zip(ids, _rows(path, ids), strict=True))
    left = ranges(file.progress.done, len(rows), CHUNK)
    for some in track(left, "convert teacher vectors", show=show_progress):
        file.append(projection(np.stack([_vector(path, *rows[n]) for n in some])), len(some))
    file.finish()


def _is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, or an ``.npy`` file that holds one."""
    with path.open("rb") as file:
        start = file.read(200)
    return not start.startswith(NPY) or b"'|O" in start


def _matrix(store: ArrayStore, path: Path, count: int, project: int) -> ArrayStore:
    if len(store.shape) != 2 or store.dtype.kind != "f":
        raise DataError(
            f"{path} holds {store.dtype} of shape {store.shape}: teacher vectors are floats (images, dim)."
        )
    if len(store) != count:
        raise DataError(
            f"{path} has {len(store):,} teacher vectors, the data {count:,} images: it belongs to other data or "
            "another split, or pictures that cannot be read were left out."
        )
    if project:
        raise DataError(f"{path} is a matrix already: leave the projection out, or project it beforehand.")
    for rows in ranges(0, count, CHUNK):
        finite = np.isfinite(store.rows(rows)).all(axis=1)
        if not finite.all():
            row = rows.start + int(finite.argmin())
            raise DataError(f"{path}: row {row:,} holds numbers that are not finite: extract it again.")
    return store


def _rows(path: Path, ids: Sequence[str]) -> list[LazyArray]:
    """The stored vectors of ``ids``, checked to be there and of one length."""
    found = open_pickle(path, MOST_STEPS)
    if not isinstance(found, dict):
        raise DataError(f"{path} holds a {type(found).__name__}, not vectors {{image id: array (1, D)}}.")
    by_id = {_name(key): value for key, value in found.items()}
    missing = [name for name in ids if name not in by_id]
    if missing:
        known = next(iter(by_id), "none")
        raise DataError(
            f"{path} has no teacher vector for {len(missing):,} of the {len(ids):,} images (first: '{missing[0]}'; "
            f"its own ids look like '{known}'): it belongs to other data, or to another split."
        )
    rows = [by_id[name] for name in ids]
    for name, row in zip(ids, rows, strict=True):
        if not _width(row) or row.dtype.kind != "f" or _width(row) != _width(rows[0]):
            raise DataError(f"{path}: the entry of '{name}' is no vector of the same length as the others.")
    return rows


def _width(row: Any) -> int:
    """The length of a vector (D,) or (1, D); 0 for anything else."""
    shape = row.shape if isinstance(row, LazyArray) else ()
    return int(shape[-1]) if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1) else 0


def _vector(path: Path, name: str, row: LazyArray) -> NDArray[np.float32]:
    vector: NDArray[np.float32] = row.load().reshape(-1).astype(np.float32)
    if not np.isfinite(vector).all():
        raise DataError(f"{path}: the vector of '{name}' has numbers that are not finite: extract it again.")
    return vector


def _name(key: str | bytes | int) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)
