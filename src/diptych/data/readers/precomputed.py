"""Precomputed features as SCAN, VSE∞ and CVSE share them: ``f30k_precomp``, ``coco_precomp``.

``{train,dev,test,testall}_ims.npy`` (M, 36, 2048) or (M, D); ``*_caps.txt`` one text per line; ``*_ids.txt`` one id per
line, optional. With k texts per image, M·k == texts means that each image is stored once, M == texts that each is
repeated k times. ``*_image_of.txt``, which ``diptych extract`` writes, gives the row of each text's image instead.
docs/data.md has the further rules.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import ArrayStore
from diptych.data.captions import ImageStore, StoreChain, StoreRows, canonical_split
from diptych.data.duplicates import groups
from diptych.data.files import read_json, read_lines
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Reader
from diptych.errors import DataError, at_least

PUBLISHED = ("train", "val", "dev", "test", "testall")
MAPPING = "id_mapping.json"
TEXTS = 5  # of an image, in published folders
VAL_TEXTS = 5000
SHAPE = "a float array (images, 36, 2048) or (images, D)"


def parts(path: Path) -> dict[str, str]:
    """The splits that have a file, as ``{"val": "dev", ...}``: split name to file name."""
    root = folder(path)
    if not root.is_dir():
        return {}
    arrays = {file.name.removesuffix("_ims.npy") for file in root.glob("*_ims.npy") if file.name[0] != "."}
    names = [name for name in PUBLISHED if name in arrays or _caps(root, name).exists()]
    return {canonical_split(name): name for name in (*names, *sorted(arrays - set(names)))}


def folder(path: Path) -> Path:
    """The folder of the arrays: ``path``, or ``path/precomp`` in VSE∞'s layout."""
    return path / "precomp" if (path / "precomp").is_dir() else path


def _caps(root: Path, name: str) -> Path:
    table = root / f"{name}_caps.tsv"
    return table if table.exists() else root / f"{name}_caps.txt"


def fill(
    draft: Draft,
    path: Path,
    split: str | None = None,
    texts_per_image: int | None = None,
    cut_val: bool = True,
    pictures: bool | None = None,
) -> StoreChain | Path:
    """Read a precomputed folder, or one split of it without needing the arrays of the others.

    ``texts_per_image`` is 5, of a table of texts 1; ``pictures`` is whether there are pictures and no array.
    """
    if texts_per_image is not None:
        at_least(texts_per_image, "texts_per_image", 1)
    draft.strict_ids = False
    root, there, problems = folder(path), parts(path), draft.problems
    one_split = None if split is None else canonical_split(split)
    if one_split is not None and one_split not in there:
        raise DataError(f"{root} has no split '{one_split}': its splits are {', '.join(there)}.")
    # ids are compared over every split, also those not wanted: an image in two splits must not pass
    ids = {name: _ids(root / f"{file}_ids.txt", problems) for name, file in there.items()}
    _compare_ids(ids, root, problems)
    if pictures is None:
        pictures = not any(root.glob("*_ims.npy")) and _mapping(root).exists()
    names = _picture_names(root, problems) if pictures else None
    stores: list[ImageStore] = []
    for name, file in there.items():
        if name == one_split or (one_split is None and not (name == "test" and "testall" in there)):
            k = texts_per_image or (1 if _caps(root, file).suffix == ".tsv" else TEXTS)
            limit = VAL_TEXTS // k if name == "val" and cut_val else None
            stores += SplitFiles(root, file, name, k, limit).add(draft, ids[name], names)
    if names is not None:
        return root
    _compare_widths(stores, root, problems)
    return StoreChain(stores)


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split, and how many texts and images of it to take."""

    root: Path
    file: str
    split: str
    texts_per_image: int
    limit: int | None  # images

    def add(self, draft: Draft, ids: list[str] | None, names: Mapping[str, str] | None) -> list[ImageStore]:
        """Put images and texts into the draft; returns the array of the images (none after an error)."""
        k, problems = self.texts_per_image, draft.problems
        caps = _caps(self.root, self.file)
        if not caps.exists():
            expected = f"one text per line, {k} per image"
            problems.error("missing file", caps, "the file does not exist", expected)
            return []
        lines = _second_cells(caps, problems) if caps.suffix == ".tsv" else read_lines(caps, problems)
        pairs = self._listed_pairs(len(lines), problems)
        if names is None:
            store = self._array(len(lines), pairs is None, problems)
            if store is None:
                return []
            count = len(store)
        else:
            store, count = None, len(lines) // k if pairs is None else len(ids or ())
            if pairs is None and len(lines) % k:
                expected = f"{k} texts per image"
                problems.error("counts", caps, f"{len(lines)} texts do not divide by {k}", expected)
                return []
        ids = self._one_per_image(ids, count, problems)
        if pairs is None:
            count = count if self.limit is None else min(count, self.limit)
            pairs = np.repeat(np.arange(count), k)
        elif len(pairs) and not 0 <= pairs.min() <= pairs.max() < count:
            message = f"it names image {pairs.max() if pairs.max() >= count else pairs.min()}"
            problems.error("counts", self._pairs_file, message, f"numbers from 0 to {count - 1}")
            return []
        keys = [f"{self.split}/{row}" for row in range(count)]
        if names is not None:
            keys = self._pictures(ids, names, problems)[:count]
        rows = [
            draft.image(key, self.split, f"{self.root / self.file}, image {row}", ids[row] if ids else None)
            for row, key in enumerate(keys)
        ]
        for number, (image, line) in enumerate(zip(pairs.tolist(), lines, strict=False), 1):
            if line is not None and image < len(rows):
                draft.text(rows[image], line, f"{caps}:{number}")
        return [] if store is None else [StoreRows(store, np.arange(count))]

    @property
    def _pairs_file(self) -> Path:
        return self.root / f"{self.file}_image_of.txt"

    def _listed_pairs(self, texts: int, problems: Problems) -> NDArray[np.int64] | None:
        """The image of each text where a file lists them; None in the published layouts."""
        path = self._pairs_file
        if not path.exists():
            return None
        lines = read_lines(path, problems)
        if len(lines) != texts:
            expected = f"one image number per line of {self.file}_caps.txt"
            problems.error("counts", path, f"{len(lines)} lines for {texts} texts", expected)
            return None
        for number, line in enumerate(lines, 1):
            if line is None or not line.strip().isdecimal() or len(line.strip()) > 18:
                problems.error("counts", f"{path}:{number}", f"'{line}' is not a number", "an image's row")
                return None
        return np.asarray([int(line or 0) for line in lines], dtype=np.int64)

    def _array(self, texts: int, published: bool, problems: Problems) -> StoreRows | None:
        """One row per image of the split's array, whichever of the published layouts it has."""
        path, k = self.root / f"{self.file}_ims.npy", self.texts_per_image
        if not path.exists():
            problems.error("missing file", path, "it does not exist", f"{SHAPE} for {texts // k} images")
            return None
        try:
            store = ArrayStore(path)
        except DataError as error:
            problems.raised("array", path, error)
            return None
        if len(store.shape) not in (2, 3) or store.dtype.kind != "f" or not len(store):
            problems.error("array", path, f"an array {store.shape} of {store.dtype}", SHAPE)
            return None
        if not published or len(store) * k == texts:
            return StoreRows(store, np.arange(len(store)))
        if len(store) != texts or texts % k:
            expected = (
                f"{k} texts per image need one row per image (texts = {k} × rows) or every image {k} times "
                f"(texts = rows, a multiple of {k}); for other numbers write {self.file}_image_of.txt, the row of "
                "each text's image"
            )
            problems.error(
                "counts", path, f"{len(store)} rows but {texts} texts in {self.file}_caps.txt", expected
            )
            return None
        for image in {0, texts // k // 2, texts // k - 1}:  # a sample: reading all would read the whole file
            first = image * k
            rows = [np.asarray(store[first + copy]) for copy in range(k)]
            if not all(np.array_equal(rows[0], row) for row in rows[1:]):
                message = f"{texts} rows for as many texts, but rows {first} to {first + k - 1} differ"
                expected = f"{k} copies of each image; give PATH?texts_per_image=1 if each has one text"
                problems.error("counts", path, message, expected)
                return None
        return StoreRows(store, np.arange(0, texts, k))

    def _one_per_image(self, ids: list[str] | None, count: int, problems: Problems) -> list[str] | None:
        k, path = self.texts_per_image, self.root / f"{self.file}_ids.txt"
        if ids is None:
            return None
        if len(ids) not in (count, count * k):
            expected = f"one per image or one per text ({count * k})"
            problems.error("counts", path, f"{len(ids)} ids for {count} images", expected)
            return None
        for row in range(count if len(ids) != count else 0):
            own = ids[row * k : row * k + k]
            if len(set(own)) > 1:
                message = f"{k} texts of one image have several ids ({', '.join(own)})"
                problems.error("counts", f"{path}:{row * k + 1}", message, f"each id {k} times in a row")
                return None
        ids = ids if len(ids) == count else ids[::k]
        for places in groups(ids):
            message = f"{len(places)} images have the id '{ids[places[0]]}'"
            problems.error("image id", path, message, "give each image its own id")
        return ids

    def _pictures(self, ids: list[str] | None, names: Mapping[str, str], problems: Problems) -> list[str]:
        path = self.root / f"{self.file}_ids.txt"
        if ids is None:
            problems.error("missing file", path, "pictures are found by their ids", "one id per line")
            return []
        for line, image_id in enumerate(ids, 1):
            if image_id not in names:
                where = f"{path}:{line}"
                problems.error("missing image", where, f"id '{image_id}' is not in {MAPPING}", "an entry")
        return [names.get(image_id, image_id) for image_id in ids]


def _second_cells(path: Path, problems: Problems) -> list[str | None]:
    lines = read_lines(path, problems)
    texts: list[str | None] = []
    for number, cells in enumerate(csv.reader((line or "" for line in lines), delimiter="\t"), 1):
        if len(cells) < 2:
            problems.error("csv", f"{path}:{number}", f"the row has {len(cells)} fields", "two fields")
        texts.append(cells[1] if len(cells) > 1 else None)
    return texts


def _ids(path: Path, problems: Problems) -> list[str] | None:
    if not path.exists():
        return None
    return [line.strip() for line in read_lines(path, problems) if line is not None and line.strip()]


def _compare_widths(stores: Sequence[ImageStore], root: Path, problems: Problems) -> None:
    """Refuse splits whose features have different dimensions: no model reads both."""
    rows = [np.asarray(store[0]) for store in stores]
    for row in rows[1:]:
        if row.shape[-1] != rows[0].shape[-1] or row.ndim != rows[0].ndim:
            message = f"features of shape {rows[0].shape} in one split and {row.shape} in another"
            problems.error("array", root, message, "extract all splits with the same backbone")
            return


def _compare_ids(ids: Mapping[str, list[str] | None], root: Path, problems: Problems) -> None:
    """Refuse an id in two splits; ``test`` lies within ``testall`` by design."""
    split_of: dict[str, str] = {}
    for split, names in ids.items():
        for image_id in dict.fromkeys(names or ()):
            other = split_of.setdefault(image_id, split)
            if other != split and {other, split} != {"test", "testall"}:
                message = f"image id '{image_id}' is in two splits, {other} and {split}"
                problems.error("in two splits", root, message, "leave it in one of them")


def _mapping(root: Path) -> Path:
    return root / MAPPING if (root / MAPPING).exists() else root.parent / MAPPING


def _picture_names(root: Path, problems: Problems) -> dict[str, str]:
    path, expected = _mapping(root), '{"id": "relative/file.jpg", ...}'
    if not path.exists():
        problems.error("missing file", path, "the file does not exist", expected)
        return {}
    names = read_json(path, problems)
    if isinstance(names, dict):
        return {str(image_id): str(name) for image_id, name in names.items()}
    problems.error("json", path, "not an object", expected)
    return {}


READER = Reader(parts, fill, parts=parts)
