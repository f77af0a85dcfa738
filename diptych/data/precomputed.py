"""Precomputed features as SCAN, VSE∞ and CVSE share them: ``f30k_precomp``, ``coco_precomp``.

``{train,dev,test,testall}_ims.npy`` (M, 36, 2048) regions, or (M, D) one vector per image (vsepp: 4096 or
2048); ``*_caps.txt`` one text per line, UTF-8; ``*_ids.txt`` one id per line, optional. The arrays are
memory-mapped.

* With k texts per image (five), M·k == texts means each image is stored once, M == texts that each is
  repeated k times; anything else is refused. Either way each image is one image of the result.
* ``dev`` is called ``val`` here. Published code cuts it to the first 5,000 texts (Flickr30K has 5,070): so
  does this, unless ``cut_val=False``.
* ``testall`` is COCO's 5,000 test images and ``test`` their first 1,000. Read together they would hold
  images twice, so where ``testall`` exists ``test`` is read only when asked for (``split="test"``).
* With ``id_mapping.json`` and the pictures beside the folder (VSE∞'s layout for training from raw images) and
  ``pictures=True``, the items are the pictures instead of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions, ImageStore, Joined, Rows
from diptych.data.draft import Draft, Empty
from diptych.data.duplicates import groups
from diptych.data.files import read_json, read_lines
from diptych.data.problems import Problems
from diptych.data.rows import with_files
from diptych.data.splits import canonical_split
from diptych.errors import DataError, SettingsError

FILES = {"train": "train", "val": "val", "dev": "val", "test": "test", "testall": "testall"}
MAPPING = "id_mapping.json"
VAL_TEXTS = 5000
SHAPE = "a float array (images, 36, 2048) or (images, D)"


def matches(path: Path) -> bool:
    """Whether ``path`` or ``path/precomp`` holds ``*_ims.npy`` or ``*_caps.txt`` of a split."""
    return bool(parts(path))


def parts(path: Path) -> dict[str, str]:
    """The splits that have a file, as ``{"val": "dev", ...}``: split name to file name."""
    root = folder(path)
    if not root.is_dir():
        return {}
    names = {name for name in FILES for end in ("ims.npy", "caps.txt") if (root / f"{name}_{end}").exists()}
    return {FILES[name]: name for name in FILES if name in names}


def folder(path: Path) -> Path:
    """The folder of the arrays: ``path``, or ``path/precomp`` in VSE∞'s layout."""
    return path / "precomp" if (path / "precomp").is_dir() else path


def read(
    path: Path,
    *,
    split: str | None = None,
    texts_per_image: int = 5,
    cut_val: bool = True,
    pictures: bool = False,
    images: str | Path | None = None,
    empty: Empty = "error",
    problems: Problems | None = None,
) -> Captions:
    """Read a precomputed folder, or one split of it without needing the arrays of the others."""
    if texts_per_image < 1:
        raise SettingsError(
            f"texts_per_image is {texts_per_image}: it must be 1 or more (five in published folders)."
        )
    problems = problems or Problems()
    root, there = folder(path), parts(path)
    wanted = None if split is None else canonical_split(split)
    if wanted is not None and wanted not in there:
        raise DataError(f"{root} has no split '{wanted}': its splits are {', '.join(there)}.")
    # ids are compared over every split, also those not wanted: an image in two splits must not pass
    ids = {name: _ids(root / f"{file}_ids.txt", problems) for name, file in there.items()}
    _compare_ids(ids, root, problems)
    names = _picture_names(root, problems) if pictures else None
    draft = Draft(str(path), problems, empty, strict_ids=False)
    stores: list[ImageStore] = []
    for name, file in there.items():
        if name == wanted or (wanted is None and not (name == "test" and "testall" in there)):
            limit = VAL_TEXTS // texts_per_image if name == "val" and cut_val else None
            stores += Part(root, file, name, texts_per_image, limit).add(draft, ids[name], names)
    if names is not None:
        return with_files(draft, root, images, problems)
    return draft.captions(lambda _: Joined(stores))


@dataclass(frozen=True)
class Part:
    """The files of one split, and how many texts and images of it to take."""

    root: Path
    file: str
    split: str
    texts_per_image: int
    limit: int | None  # images

    def add(self, draft: Draft, ids: list[str] | None, names: Mapping[str, str] | None) -> list[ImageStore]:
        """Put images and texts into the draft; returns the array of the images (none after an error)."""
        k, problems = self.texts_per_image, draft.problems
        caps = self.root / f"{self.file}_caps.txt"
        if not caps.exists():
            problems.error(
                "missing file", caps, "the file does not exist", f"one text per line, {k} per image"
            )
            return []
        lines = read_lines(caps, problems)
        if names is None:
            store = self._array(len(lines), problems)
            if store is None:
                return []
        elif len(lines) % k:
            problems.error("counts", caps, f"{len(lines)} texts do not divide by {k}", f"{k} texts per image")
            return []
        count = len(lines) // k
        ids = self._one_per_image(ids, count, problems)
        keys = [f"{self.split}/{row}" for row in range(count)]
        if names is not None:
            keys = self._pictures(ids, names, problems)
        count = min(len(keys), count if self.limit is None else self.limit)
        for row in range(count):
            first = row * k
            at = draft.image(keys[row], self.split, f"{caps}:{first + 1}", ids[row] if ids else None)
            for line in range(first, first + k):
                if lines[line] is not None:
                    draft.text(at, lines[line], f"{caps}:{line + 1}")
        return [] if names is not None or store is None else [Rows(store, np.arange(count))]

    def _array(self, texts: int, problems: Problems) -> Rows | None:
        """One row per image of the split's array, whichever of the two layouts it has."""
        path, k = self.root / f"{self.file}_ims.npy", self.texts_per_image
        if not path.exists():
            problems.error(
                "missing file", path, "the file does not exist", f"{SHAPE} for {texts // k} images"
            )
            return None
        try:
            store = ArrayStore(path)
        except DataError as error:
            problems.raised("array", path, error)
            return None
        if len(store.shape) not in (2, 3) or store.dtype.kind != "f" or not len(store):
            problems.error("array", path, f"an array {store.shape} of {store.dtype}", SHAPE)
            return None
        if len(store) * k == texts:
            return Rows(store, np.arange(len(store)))
        if len(store) != texts or texts % k:
            expected = (
                f"{k} texts per image need one row per image (texts = {k} × rows) or every image {k} times "
                f"(texts = rows, a multiple of {k}); pass texts_per_image for another number"
            )
            problems.error(
                "counts", path, f"{len(store)} rows but {texts} texts in {self.file}_caps.txt", expected
            )
            return None
        for image in {0, texts // k // 2, texts // k - 1}:  # a sample: reading all would read the whole file
            rows = [np.asarray(store[image * k + copy]) for copy in range(k)]
            if not all(np.array_equal(rows[0], row) for row in rows[1:]):
                message = (
                    f"as many rows as texts ({texts}), but rows {image * k} to {image * k + k - 1} differ"
                )
                expected = f"{k} copies of each image; pass texts_per_image=1 if every image has one text"
                problems.error("counts", path, message, expected)
                return None
        return Rows(store, np.arange(0, texts, k))

    def _one_per_image(self, ids: list[str] | None, count: int, problems: Problems) -> list[str] | None:
        k, path = self.texts_per_image, self.root / f"{self.file}_ids.txt"
        if ids is None:
            return None
        if len(ids) == count:
            return self._unique(ids, path, problems)
        if len(ids) != count * k:
            expected = f"one per image or one per text ({count * k})"
            problems.error("counts", path, f"{len(ids)} ids for {count} images", expected)
            return None
        for row in range(count):
            if len(set(ids[row * k : row * k + k])) > 1:
                message = (
                    f"the {k} texts of one image have different ids ({', '.join(ids[row * k : row * k + k])})"
                )
                problems.error("counts", f"{path}:{row * k + 1}", message, f"each id {k} times in a row")
                return None
        return self._unique(ids[::k], path, problems)

    @staticmethod
    def _unique(ids: list[str], path: Path, problems: Problems) -> list[str] | None:
        for places in groups(ids):
            expected = "give each image its own id"
            problems.error("image id", path, f"{len(places)} images have the id '{ids[places[0]]}'", expected)
        return ids

    def _pictures(self, ids: list[str] | None, names: Mapping[str, str], problems: Problems) -> list[str]:
        path = self.root / f"{self.file}_ids.txt"
        if ids is None:
            problems.error("missing file", path, "pictures are found by their ids", "one id per line")
            return []
        for line, image_id in enumerate(ids, 1):
            if image_id not in names:
                where = f"{path}:{line}"
                problems.error(
                    "missing image", where, f"id '{image_id}' is not in {MAPPING}", "an entry for every id"
                )
        return [names.get(image_id, image_id) for image_id in ids]


def _ids(path: Path, problems: Problems) -> list[str] | None:
    if not path.exists():
        return None
    return [line.strip() for line in read_lines(path, problems) if line is not None and line.strip()]


def _compare_ids(ids: Mapping[str, list[str] | None], root: Path, problems: Problems) -> None:
    """Refuse an id in two splits; ``test`` lies within ``testall`` by design."""
    seen: dict[str, str] = {}
    for split, found in ids.items():
        for image_id in dict.fromkeys(found or ()):
            other = seen.setdefault(image_id, split)
            if other != split and {other, split} != {"test", "testall"}:
                message = f"image id '{image_id}' is in two splits, {other} and {split}"
                problems.error("in two splits", root, message, "leave it in one of them")


def _picture_names(root: Path, problems: Problems) -> dict[str, str]:
    for place in (root, root.parent):
        if (place / MAPPING).exists():
            names = read_json(place / MAPPING, problems)
            if isinstance(names, dict):
                return {str(image_id): str(name) for image_id, name in names.items()}
            problems.error("json", place / MAPPING, "not an object", '{"id": "relative/file.jpg", ...}')
            return {}
    problems.error(
        "missing file", root.parent / MAPPING, "the file does not exist", '{"id": "relative/file.jpg", ...}'
    )
    return {}
