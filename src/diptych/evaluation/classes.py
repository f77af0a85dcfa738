"""Class-based retrieval: does an item find others of its class? R@K, and the test lists of four data sets.

===============  ==========================================================  =====================================
``cub``          ``CUB_200_2011/images/<class folder>/*.jpg``                 the 101st to 200th folder, sorted
``sop``          ``Stanford_Online_Products/Ebay_test.txt``                   image_id class_id super_class_id path
``in-shop``      ``Eval/list_eval_partition.txt``, images under ``Img/``      image_name item_id status
``inaturalist``  ``Inat_dataset_splits/Inaturalist_test_set1.txt``            paths; the class is the parent folder
===============  ==========================================================  =====================================

A model of stored features reads arrays in the place of the pictures: ``*_ims.npy`` (N, R, D) with ``*_ids.txt``, the
name of the picture of each row, in the folder or one inside it. ``diptych extract`` writes such files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych import ops
from diptych.data.arrays import ArrayStore
from diptych.data.captions import ImageStore, StoreChain, StoreRows
from diptych.data.decode.extra_formats import is_image
from diptych.data.files import OnDisk, read_lines
from diptych.data.problems import Problems
from diptych.errors import DataError
from diptych.evaluation.senteval import text_lines

CUB_TEST = slice(100, 200)  # test classes among the class folders in order
_TRAILING_NUMBER = re.compile(r"(\d{1,18})$")


@dataclass(frozen=True)
class ClassList:
    """Images with a class each. Without a gallery, every image is asked for among all others (leave one out)."""

    name: str
    paths: Sequence[Path]
    classes: NDArray[np.int64]
    gallery: ClassList | None = None

    @property
    def sides(self) -> list[ClassList]:
        """The queries, and the gallery where there is one."""
        return [self] if self.gallery is None else [self, self.gallery]

    @property
    def every(self) -> list[Path]:
        return [path for side in self.sides for path in side.paths]


def is_class_list(folder: str | Path) -> bool:
    """Whether a folder is one of the four."""
    return Path(folder).is_dir() and _find_reader(Path(folder)) is not None


def open_class_list(folder: str | Path, *, pictures: bool = True) -> ClassList:
    """The test list in ``folder``, whichever of the four it is; a picture that is not there is an error, if needed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give the folder of CUB, SOP, In-Shop or iNaturalist.")
    found = _find_reader(folder)
    if found is None:
        names = ", ".join(_READERS)
        raise DataError(f"{folder} is not a known list of classes (none of {names}): give its own folder.")
    read, root = found
    return _present(read(root)) if pictures else read(root)


def stored_features(folder: str | Path, paths: Sequence[Path]) -> ImageStore:
    """The stored features of these pictures of a list."""
    folder = Path(folder)
    files = [file for pattern in ("*_ims.npy", "*/*_ims.npy") for file in sorted(folder.glob(pattern))]
    if not files:
        raise DataError(
            f"{folder} holds no features, and this model reads no pictures: put *_ims.npy and *_ids.txt there."
        )
    names: list[str] = []
    stores: list[ImageStore] = []
    for file in files:
        ids = file.with_name(file.name.replace("_ims.npy", "_ids.txt"))
        lines = read_lines(ids, Problems()) if ids.is_file() else []
        stores.append(ArrayStore(file))
        if len(lines) != len(stores[-1]):
            raise DataError(
                f"{ids} has {len(lines):,} names for the {len(stores[-1]):,} rows of {file.name}: write one per row."
            )
        names += [(line or "").strip() for line in lines]
    row_of = {name: row for row, name in enumerate(names)}
    rows = [_row(row_of, folder, path) for path in paths]
    absent = [path for path, row in zip(paths, rows, strict=True) if row is None]
    if absent:
        raise DataError(
            f"{len(absent):,} of the {len(paths):,} pictures in {folder} have no features (first: {absent[0]}): "
            "extract them all."
        )
    return StoreRows(StoreChain(stores), np.array(rows, dtype=np.int64))


def _row(row_of: Mapping[str, int], folder: Path, path: Path) -> int | None:
    """The row of a picture, whose name may begin below the folder or at any folder inside it."""
    parts = path.relative_to(folder).parts
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((row_of[end] for end in ends if end in row_of), None)


def _find_reader(folder: Path) -> tuple[Callable[[Path], ClassList], Path] | None:
    """The reader, and the folder that its marker lies in: this one or one inside it."""
    roots = (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
    for marker, read in _READERS.items():
        for root in roots:
            if (root / marker).exists():
                return read, root
    return None


def _cub(root: Path) -> ClassList:
    folders = sorted(path for path in (root / "images").iterdir() if path.is_dir())
    if len(folders) < CUB_TEST.stop:
        raise DataError(f"{root / 'images'} has {len(folders)} class folders, CUB has 200: extract it again.")
    pairs = [
        (path, number)
        for number, folder in list(enumerate(folders, 1))[CUB_TEST]
        for path in sorted(folder.iterdir())
        if is_image(path.name)
    ]
    return _list("cub", pairs)


def _sop(root: Path) -> ClassList:
    path = root / "Ebay_test.txt"
    rows = _rows(path, 4, skip=1)
    return _list("sop", [(root / cells[3], _number(path, number, cells[1])) for number, cells in rows])


def _in_shop(root: Path) -> ClassList:
    path = root / "Eval" / "list_eval_partition.txt"
    sides: dict[str, list[tuple[Path, int]]] = {"query": [], "gallery": [], "train": []}
    for number, cells in _rows(path, 3, skip=2):
        if cells[2] not in sides:
            raise DataError(f"{path}:{number} has the status '{cells[2]}': use train, query or gallery.")
        # names begin with img/ and lie in a folder Img
        sides[cells[2]].append((root / "Img" / cells[0], _number(path, number, cells[1])))
    if not sides["query"] or not sides["gallery"]:
        raise DataError(f"{path} names no query or no gallery image: copy it again.")
    return replace(_list("in-shop", sides["query"]), gallery=_list("in-shop", sides["gallery"]))


def _inaturalist(root: Path) -> ClassList:
    path = root / "Inat_dataset_splits" / "Inaturalist_test_set1.txt"
    images = [(number, root / cells[0]) for number, cells in _rows(path, 1, skip=0)]
    return _list("inaturalist", [(image, _number(path, n, image.parent.name)) for n, image in images])


_READERS: dict[str, Callable[[Path], ClassList]] = {
    "Ebay_test.txt": _sop,
    "Eval/list_eval_partition.txt": _in_shop,
    "Inat_dataset_splits/Inaturalist_test_set1.txt": _inaturalist,
    "images/001.Black_footed_Albatross": _cub,
}
"""A file or folder that only this data set has, and its reader."""


def _list(name: str, pairs: Sequence[tuple[Path, int]]) -> ClassList:
    if not pairs:
        raise DataError(f"the list of {name} names no image: copy it again.")
    return ClassList(
        name, [path for path, _ in pairs], np.array([number for _, number in pairs], dtype=np.int64)
    )


def _rows(path: Path, least: int, skip: int) -> list[tuple[int, list[str]]]:
    """(line number, cells) of a list separated by white space, behind its header."""
    rows = []
    for number, line in enumerate(text_lines(path)[skip:], skip + 1):
        cells = line.split()
        if not cells:
            continue
        if len(cells) < least:
            raise DataError(f"{path}:{number} has {len(cells)} columns, {least} are needed: copy it again.")
        rows.append((number, cells))
    return rows


def _number(path: Path, line: int, text: str) -> int:
    match = _TRAILING_NUMBER.search(text)
    if match is None:
        raise DataError(f"{path}:{line} has the class '{text}', which ends in no number: copy it again.")
    return int(match[1])


def _present(found: ClassList) -> ClassList:
    """The list, once every image it names is there."""
    there = OnDisk()
    absent = [path for path in found.every if path not in there]
    if absent:
        raise DataError(
            f"{len(absent):,} of the {len(found.every):,} images of {found.name} are missing (first: {absent[0]}): "
            "extract the images beside their list."
        )
    return found


BLOCK = 1 << 25  # scores held at a time


def class_ranks(
    vectors: Tensor,
    classes: NDArray[np.int64],
    gallery: Tensor | None = None,
    gallery_classes: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """For each query (N, D), how many items of other classes stand before the first of its own, by cosine.

    Without a gallery each item is asked for among all others: its own row is left out, not "the first hit", which may
    be a duplicate of it. Equal scores rank by gallery index. Infinite where no other item has the class: such a query
    is never right, and stays in the average.
    """
    own = gallery is None
    if gallery is None or gallery_classes is None:
        gallery, gallery_classes = vectors, classes
    _check(vectors, classes, "queries")
    _check(gallery, gallery_classes, "gallery items")
    if len(gallery) <= int(own):
        raise DataError(f"{len(gallery)} items are too few to look for neighbours: give at least {1 + own}.")
    queries, items = ops.unit(vectors.float()), ops.unit(gallery.float())
    labels = torch.from_numpy(gallery_classes).to(items.device)
    numbers = torch.arange(len(items), device=items.device)
    asked = torch.from_numpy(classes).to(items.device)
    ranks = np.zeros(len(queries))
    step = max(1, BLOCK // len(items))
    for start in range(0, len(queries), step):
        rows = slice(start, start + step)
        scores = queries[rows] @ items.T  # (block, N)
        same = labels == asked[rows, None]
        if own:
            itself = numbers == numbers[rows, None]
            scores.masked_fill_(itself, -torch.inf)
            same &= ~itself
        best = scores.masked_fill(~same, -torch.inf).amax(dim=1, keepdim=True)
        level = scores == best
        first = torch.where(level & same, numbers, len(items)).amin(dim=1, keepdim=True)
        before = (scores > best).sum(1) + (level & ~same & (numbers < first)).sum(1)
        ranks[rows] = torch.where(same.any(1), before.double(), torch.inf).cpu().numpy()
    return ranks


def class_recall(
    vectors: Tensor,
    classes: NDArray[np.int64],
    gallery: Tensor | None = None,
    gallery_classes: NDArray[np.int64] | None = None,
    ks: Sequence[int] = (1,),
) -> dict[int, float]:
    """R@K in percent for each K: the share of queries with an item of their class among the first K."""
    ranks = class_ranks(vectors, classes, gallery, gallery_classes)
    return {k: 100.0 * float((ranks < k).mean()) for k in ks}


def _check(vectors: Tensor, classes: NDArray[np.int64], what: str) -> None:
    if vectors.dim() != 2 or len(vectors) != len(classes):
        raise DataError(f"{tuple(vectors.shape)} vectors, {len(classes)} classes of {what}: give one each.")
    if not bool(torch.isfinite(vectors).all()):
        raise DataError(f"a vector of the {what} is not finite: the model is broken, or its input.")
