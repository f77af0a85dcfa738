"""What lies in the cache folder: the packs of picture cells by content, what is in it, clearing. No torch."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.cache.feature_pack import MISSING, FeaturePack
from diptych.cache.rows import to_half
from diptych.data.captions import StoredImage
from diptych.entries import CACHE
from diptych.errors import DataError, SettingsError
from diptych.storage import RUNTIMES, cache_folder, storing

PACKS = "images"
"""The folder of the packs of picture features, in the cache folder."""

KINDS = {
    "texts-": "text states",
    "teacher-images-": "image teacher",
    "teacher-texts-": "text teacher",
    "shard-": "lists of tars",
}
"""What the names of other files begin with, and what the files hold."""

OLD = "images-"
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0, "m": 30.0, "y": 365.0}


@dataclass(frozen=True)
class CacheEntry:
    """One thing that can be cleared by itself: some records of a pack, or a file.

    ``name`` is that of the backbone's pack, or of the file; ``items`` how many pictures it holds (0: not counted).
    """

    kind: str
    name: str
    title: str
    bytes: int
    items: int
    used: float
    remove: Callable[[], bool]


def contents(place: str | Path | None = None) -> list[CacheEntry]:
    """Everything in the cache folder."""
    place, found = cache_folder(place), []
    for pack_folder in _folders(place / PACKS):
        found += _of_pack(pack_folder)
    for folder in _folders(place / RUNTIMES):
        files = [] if folder.is_symlink() else [path.stat() for path in folder.rglob("*") if path.is_file()]
        size, used = sum(one.st_size for one in files), max((one.st_atime for one in files), default=0.0)
        title = "a model's ONNX encoders"
        found.append(CacheEntry("runtime", folder.name, title, size, 0, used, partial(_remove, folder)))
    for path in sorted(place.glob("*.np[yz]")) if place.is_dir() else ():
        prefix = next((start for start in (*KINDS, OLD) if path.name.startswith(start)), None)
        if prefix is not None:
            kind = "old" if prefix == OLD else KINDS[prefix]
            title = "of an earlier version, nothing reads it" if prefix == OLD else ""
            status = path.lstat()
            used = max(status.st_atime, status.st_mtime)
            found.append(CacheEntry(kind, path.name, title, status.st_size, 0, used, partial(_remove, path)))
    return found


def select(
    entries: Sequence[CacheEntry],
    *,
    backbone: str | None = None,
    old: bool = False,
    older_than: str | None = None,
    keep: str | None = None,
    now: float | None = None,
) -> list[CacheEntry]:
    """Those of the entries that these wishes are about; all of them without any.

    ``backbone`` is the beginning of a pack's name, or a part of its title; ``old`` are files of earlier versions;
    ``older_than`` ("30d", "12h") those that nothing has used for so long; ``keep`` ("10GB") leaves what was used last.
    """
    left = [entry for entry in entries if not old or entry.kind == "old"]
    if backbone is not None:
        left = [entry for entry in left if entry.name.startswith(backbone) or backbone in entry.title]
        if not left:
            known = sorted({f"{entry.name} ({entry.title})" for entry in entries if entry.kind == PACKS})
            raise SettingsError(f"no cached backbone is called '{backbone}': {', '.join(known) or 'none'}.")
    if older_than is not None:
        what = "an age: write hours, days or weeks, such as 12h, 30d or 8w"
        days = _parse_count(older_than, DAYS, "([hdwmy])[a-z]*", what)
        before = (time.time() if now is None else now) - 86_400 * days
        left = [entry for entry in left if entry.used < before]
    if keep is not None:
        room = _parse_count(keep, UNITS, "([kmgt]?)b?", "a size: write it such as 500MB or 10GB")
        leaving = []
        for entry in sorted(left, key=lambda entry: entry.used, reverse=True):
            room -= entry.bytes
            if room < 0:
                leaving.append(entry)
        left = leaving
    return left


def _folders(place: Path) -> list[Path]:
    """The folders in one of the cache's own, and links to folders."""
    return [] if place.is_symlink() else sorted(path for path in place.glob("*") if path.is_dir())


def _of_pack(folder: Path) -> list[CacheEntry]:
    if folder.is_symlink():  # it may lead to the pack of another cache
        return [
            CacheEntry(PACKS, folder.name, "a link", 0, 0, folder.lstat().st_mtime, partial(_remove, folder))
        ]
    try:
        pack = FeaturePack(folder)
        files = pack.files()
        title = f"{pack.title}, {'×'.join(map(str, pack.shape))}" if files else "empty"
    except DataError as error:
        files, title = [], f"unreadable ({error})"
    if not files:
        size = sum(path.lstat().st_size for path in folder.iterdir())
        return [
            CacheEntry(PACKS, folder.name, title, size, 0, folder.stat().st_mtime, partial(_remove, folder))
        ]
    return [
        CacheEntry(PACKS, folder.name, title, size, pictures, used, partial(_remove_rows, folder, number))
        for number, size, pictures, used in files
    ]


def _remove_rows(folder: Path, number: int) -> bool:
    done = FeaturePack(folder).remove([number])
    if done and not any(folder.glob("rows-*.f16")):
        _remove(folder)
    return done


def _remove(path: Path) -> bool:
    with storing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            for other in path.parent.glob(f".{path.name}.*"):  # its log and lock
                other.unlink(missing_ok=True)
            path.with_suffix(".unreadable.json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    return True


def _parse_count(text: str, units: Mapping[str, float], unit: str, what: str) -> float:
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text.strip().lower())
    if found is None:
        raise SettingsError(f"'{text}' is not {what}.")
    return float(found[1]) * units[found[2]]


def in_words(size: float) -> str:
    """Bytes as people say them."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} bytes"


Cells = NDArray[np.float32]


class PackedCells:
    """What ``index`` reads and adds: the cells of pictures by their content keys.

    ``cells`` computes those of some pictures, (n, R, C).
    """

    def __init__(self, pack: FeaturePack, cells: Callable[[Sequence[StoredImage]], Cells]) -> None:
        self.pack, self.cells = pack, cells
        self.pack.hold()

    def find(self, key: str) -> NDArray[Any] | None:
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
    return FeaturePack(CACHE.path(cache_folder(folder), PACKS, folders=True) / key, title)


def content_name(*parts: str) -> str:
    """24 hex digits that name the content the parts stand for."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
