"""Videos as HGR stores them (MSR-VTT, VATEX, TGIF): reference texts, split names and ordered features.

::

    annotation/RET/ref_captions.json           {"video0": ["a man sings", ...], ...}
    public_split/{trn,val,tst}_names.npy       names of the videos of a split, in the order of the MP features
    ordered_feature/SA/FT/{trn,val,tst}_ft.hdf5   a data set (frames, D) per video (extra 'hdf5')
    ordered_feature/MP/FT/{trn,val,tst}_ft.npy    (videos, D), the mean over the frames

FT is the name of the features (``resnet152.pth``). The frames are read where they exist; ``mean=true`` takes the means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions, ImageStore, Joined, StoreRows
from diptych.data.files import read_json
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Empty
from diptych.data.readers.frame_features import (
    FRAMES,
    HDF5Frames,
    checked_frames,
    chosen_features,
    held_in_hdf5,
)
from diptych.errors import DataError

TEXTS = Path("annotation") / "RET" / "ref_captions.json"
SPLITS = {"trn": "train", "val": "val", "tst": "test"}


def matches(path: Path) -> bool:
    """Whether ``path`` is a folder with reference texts and split names."""
    return (path / TEXTS).is_file() and (path / "public_split").is_dir()


def read(
    path: Path,
    *,
    features: str | None = None,
    mean: bool = False,
    frames: int = FRAMES,
    empty: Empty = "error",
    problems: Problems | None = None,
) -> Captions:
    """Videos with their texts; ``features`` names the features where there are several, ``frames`` are kept at most."""
    problems = problems or Problems()
    checked_frames(frames)
    folder = _features(path / "ordered_feature" / ("MP" if mean else "SA"), features)
    texts = read_json(path / TEXTS, problems)
    texts = texts if isinstance(texts, dict) else {}
    draft = Draft(str(path), problems, empty)
    stores: list[ImageStore] = []
    for short, split in SPLITS.items():
        if not (path / "public_split" / f"{short}_names.npy").exists():
            continue
        names = _names(path / "public_split" / f"{short}_names.npy")
        kept, store = _store(folder, short, names, mean, frames, problems)
        where = path / "public_split" / f"{short}_names.npy"
        for name in kept:
            row = draft.image(name, split, where)
            if name not in texts:
                problems.error(
                    "missing text", path / TEXTS, f"no text of '{name}'", "a list of texts per video"
                )
            for text in texts.get(name, ()):
                draft.text(row, text, f"{path / TEXTS}, '{name}'")
        stores.append(store)
    return draft.captions(lambda _: Joined(stores))


def _features(folder: Path, name: str | None) -> Path:
    """The folder of the features asked for, or of the only ones there are."""
    found = sorted(child.name for child in folder.iterdir() if child.is_dir()) if folder.is_dir() else []
    return chosen_features(
        folder, found, name, "features: put each kind of them into a folder of its own there."
    )


def _names(path: Path) -> list[str]:
    """The names of a split."""
    try:
        found: Any = np.load(path, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path} is not an array of names ({error}): write it with numpy.save(path, numpy.array(names, dtype=str))."
        ) from error
    return [one.decode() if isinstance(one, bytes) else str(one) for one in found.reshape(-1).tolist()]


def _store(
    folder: Path, short: str, names: list[str], mean: bool, frames: int, problems: Problems
) -> tuple[list[str], ImageStore]:
    """The videos of a split that have features, and the features."""
    if mean:
        store = ArrayStore(folder / f"{short}_ft.npy")
        if len(store) != len(names):
            message = f"{len(store)} rows for {len(names)} names"
            problems.error("counts", folder / f"{short}_ft.npy", message, "one row per video, in their order")
        kept = min(len(store), len(names))
        return names[:kept], StoreRows(store, np.arange(kept))
    path = folder / f"{short}_ft.hdf5"
    keys = held_in_hdf5(path, [key for name in names for key in (name, name.replace("/", "_"))])
    held = {name: key for name in names for key in (name, name.replace("/", "_")) if key in keys}
    missing = [name for name in names if name not in held]
    problems.missing(missing, len(names), str(path), "one data set (frames, D) per video")
    return list(held), HDF5Frames(path, list(held.values()), frames)
