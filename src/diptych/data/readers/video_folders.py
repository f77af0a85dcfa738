"""Features of videos in the folders of two published programs, HGR and dual_encoding.

::

    annotation/RET/ref_captions.json           {"video0": ["a man sings", ...], ...}                        (HGR)
    public_split/{trn,val,tst}_names.npy       names of the videos of a split, in the order of the MP features
    ordered_feature/SA/FT/{trn,val,tst}_ft.hdf5   a data set (frames, D) per video (extra 'hdf5')
    ordered_feature/MP/FT/{trn,val,tst}_ft.npy    (videos, D), the mean over the frames

    TextData/msrvtt10ktrain.caption.txt        one text per line: "video0#0 a man sings"          (dual_encoding)
    FeatureData/FT/feature.bin                 float32 (frames, D), shape in shape.txt ("frames D")
    FeatureData/FT/id.txt                      the names of the rows, "video0_0 video0_1 ..."
    FeatureData/FT/video2frames.txt            {'video0': ['video0_0', ...], ...}; without it by the names of the rows
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import NO_ARRAY, ArrayStore
from diptych.data.captions import SPLIT_NAMES, UNSPLIT, ImageStore, StoreChain, StoreRows
from diptych.data.files import read_json, read_lines
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Reader
from diptych.data.readers.frame_features import (
    FRAMES,
    FrameRows,
    HDF5Frames,
    features_folder,
    held_in_hdf5,
)
from diptych.errors import DataError

TEXTS = Path("annotation") / "RET" / "ref_captions.json"
SPLITS = {"trn": "train", "val": "val", "tst": "test"}
_SPLIT = re.compile(r"(train|val|test)[^a-z]*$")


def is_hgr(path: Path) -> bool:
    """Whether ``path`` is a folder with reference texts and split names."""
    return (path / TEXTS).is_file() and (path / "public_split").is_dir()


def fill_hgr(
    draft: Draft, path: Path, features: str | None = None, mean: bool = False, frames: int = FRAMES
) -> StoreChain:
    """Videos with their texts; ``features`` names the features where there are several, ``frames`` are kept at most."""
    problems = draft.problems
    root = path / "ordered_feature" / ("MP" if mean else "SA")
    folders = sorted(child.name for child in root.iterdir() if child.is_dir()) if root.is_dir() else []
    folder = features_folder(root, folders, features, "features: put each kind into a folder of its own.")
    texts = read_json(path / TEXTS, problems)
    texts = texts if isinstance(texts, dict) else {}
    stores: list[ImageStore] = []
    for short, split in SPLITS.items():
        where = path / "public_split" / f"{short}_names.npy"
        if not where.exists():
            continue
        names, store = _store(folder, short, _names(where), mean, frames, problems)
        for name in names:
            row = draft.image(name, split, where)
            if name not in texts:
                problems.error("missing text", path / TEXTS, f"no text of '{name}'", "a list of texts")
            for text in texts.get(name, ()):
                draft.text(row, text, f"{path / TEXTS}, '{name}'")
        stores.append(store)
    return StoreChain(stores)


def _names(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            names: Any = np.lib.format.read_array(file, allow_pickle=False)
    except NO_ARRAY as error:
        raise DataError(f"{path} is no array of names ({error}): save one of dtype=str.") from error
    return [one.decode() if isinstance(one, bytes) else str(one) for one in names.reshape(-1).tolist()]


def _store(
    folder: Path, short: str, names: list[str], mean: bool, frames: int, problems: Problems
) -> tuple[list[str], ImageStore]:
    if mean:
        store = ArrayStore(folder / f"{short}_ft.npy")
        if len(store) != len(names):
            message = f"{len(store)} rows for {len(names)} names"
            problems.error("counts", folder / f"{short}_ft.npy", message, "one row per video, in their order")
        count = min(len(store), len(names))
        return names[:count], StoreRows(store, np.arange(count))
    path = folder / f"{short}_ft.hdf5"
    forms = [(name, key) for name in names for key in (name, name.replace("/", "_"))]
    keys = held_in_hdf5(path, [key for _, key in forms])
    key_of = {name: key for name, key in forms if key in keys}
    missing = [name for name in names if name not in key_of]
    problems.missing(missing, len(names), str(path), "one data set (frames, D) per video")
    return list(key_of), HDF5Frames(path, list(key_of.values()), frames)


def fill_dual_encoding(
    draft: Draft, path: Path, features: str | None = None, frames: int = FRAMES
) -> StoreChain:
    """Videos with their texts; ``features`` names the features where there are several, ``frames`` are kept at most."""
    problems = draft.problems
    stores: list[ImageStore] = []
    arrays: dict[Path, tuple[ArrayStore, dict[str, NDArray[np.int64]]]] = {}
    for file in _texts(path):
        root = file.parent.parent / "FeatureData"
        folders = sorted(str(one.parent.relative_to(root)) for one in root.rglob("feature.bin"))
        folder = features_folder(
            root, folders, features, "feature.bin: put the features of the videos there."
        )
        if folder not in arrays:
            store = _array(folder)
            arrays[folder] = store, _rows_of(folder, len(store), problems)
        store, rows_of = arrays[folder]
        name = _SPLIT.search(file.name.removesuffix(".caption.txt").lower())
        split = SPLIT_NAMES[name[1]] if name else UNSPLIT
        texts = _texts_of(file, problems)
        missing = [video for video in texts if video not in rows_of]
        problems.missing(missing, len(texts), str(folder), "rows of every video that has a text")
        videos = [video for video in texts if video in rows_of]
        for video in videos:
            row = draft.image(video, split, file)
            for where, text in texts[video]:
                draft.text(row, text, where)
        stores.append(FrameRows(store, [rows_of[video] for video in videos], frames))
    return StoreChain(stores)


def _texts(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(path.glob("TextData/*.caption.txt")) or sorted(path.glob("*/TextData/*.caption.txt"))


def _texts_of(file: Path, problems: Problems) -> dict[str, list[tuple[str, str]]]:
    out: dict[str, list[tuple[str, str]]] = {}
    for number, line in enumerate(read_lines(file, problems), 1):
        if line is None or not line.strip():
            continue
        head, _, text = line.strip().partition(" ")
        name, mark, _ = head.rpartition("#")
        if not mark or not name:
            problems.error("list", f"{file}:{number}", f"'{head[:40]}' is no name", "VIDEO#NUMBER and a text")
            continue
        out.setdefault(name, []).append((f"{file}:{number}", text))
    return out


def _array(folder: Path) -> ArrayStore:
    try:
        count, dim = (int(number) for number in (folder / "shape.txt").read_text().split())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'shape.txt'} is no shape ({error}): write 'ROWS DIMENSIONS'.") from error
    if count < 1 or dim < 1:
        raise DataError(f"{folder / 'shape.txt'} says {count} rows of {dim} numbers: give at least one.")
    return ArrayStore(folder / "feature.bin", raw=((count, dim), "<f4"))


def _rows_of(folder: Path, count: int, problems: Problems) -> dict[str, NDArray[np.int64]]:
    names = (folder / "id.txt").read_text("utf-8").split()
    if len(names) != count:
        problems.error("counts", folder / "id.txt", f"{len(names)} names for {count} rows", "one per row")
    place = {name: row for row, name in enumerate(names[:count])}
    frames_file = folder / "video2frames.txt"
    if frames_file.exists():
        frames = _literal(frames_file)
        rows = {str(video): [place[n] for n in map(str, own) if n in place] for video, own in frames.items()}
    else:
        rows = {}
        for name, row in place.items():
            rows.setdefault(re.sub(r"_\d+$", "", name), []).append(row)
    return {video: np.asarray(own, np.int64) for video, own in rows.items() if own}


def _literal(path: Path) -> Mapping[str, list[str]]:
    """A file that holds a Python dict of lists, read as a literal."""
    try:
        found = ast.literal_eval(path.read_text("utf-8"))
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(f"{path} is not a dict of lists of frames ({error}): copy it again.") from error
    if not isinstance(found, dict) or not all(isinstance(own, list) for own in found.values()):
        raise DataError(f"{path} is not a dict of lists: expected {{'video0': ['video0_0', ...]}}.")
    return found


HGR = Reader(is_hgr, fill_hgr, files=False)
DUAL_ENCODING = Reader(_texts, fill_dual_encoding, files=False)
