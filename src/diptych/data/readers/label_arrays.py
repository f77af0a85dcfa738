"""MIRFlickr25K and NUS-WIDE as the authors of label-wise retrieval process them: region features beside tag tables.

For each split: ``<split>_preim.npy`` (N, 36, D) regions, ``<split>_tag.mat`` and ``<split>_label.mat`` with the key
``feat``, (N, tags) and (N, C) of zeros and ones, and where there is one ``<split>_cls.npy`` (N, R, 1000), the class
scores of R regions, of which the 36 best are used. Regions above 0.5, or the best whatever their scores where fewer are
(supplement, section 2), are the 36 best either way.

scipy's reader of ``.mat`` files believes what a file says of itself, and a damaged one ends the process that reads it:
it runs in a process with limits.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import ArrayStore
from diptych.data.captions import ImageStore, StoreChain, canonical_split
from diptych.data.decode.processes import limit_memory
from diptych.data.files import column_names, read_lines
from diptych.data.labels import COLUMN
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Reader
from diptych.data.readers.tag_sets import tag_places
from diptych.errors import DataError, MissingExtra, at_least

KEY = "feat"
SECONDS = 600.0  # that a file may take on a machine with other work
BYTES = 16_000_000_000  # that the process may take
FAULT, MISSING = 3, 4  # how the process ends with a sentence, or without scipy


def read_mat(path: Path) -> NDArray[np.bool_]:
    """The table ``feat`` of a MATLAB file as (N, columns) bool; dense or sparse, format 4 to 7.2."""
    if not path.is_file():
        raise DataError(f"{path} is missing: the folder needs the tags and the labels of every split.")
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work(sys.argv[1])"
    try:
        run = subprocess.run([sys.executable, "-c", start, str(path)], capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise DataError(f"{path} takes more than {SECONDS:g} s to read: copy it again.") from None
    if run.returncode == MISSING:
        raise MissingExtra("scipy", "mat", "reading .mat files")
    if run.returncode == FAULT:
        raise DataError(run.stdout.decode("utf-8", "replace"))
    if run.returncode != 0:
        raise DataError(f"{path} is damaged (reading it ended with status {run.returncode}): copy it again.")
    table: NDArray[np.bool_] = np.load(io.BytesIO(run.stdout), allow_pickle=False)
    return table


def work(path: str) -> None:
    """Write the table to standard output, or what is wrong with it; the main function of the process."""
    limit_memory(BYTES)
    try:
        table = _table(path)
    except ImportError:
        sys.exit(MISSING)
    except (DataError, MemoryError) as error:
        sentence = str(error) or f"{path} needs more memory than there is: copy it again."
        sys.stdout.buffer.write(sentence.encode("utf-8", "replace"))
        sys.stdout.flush()
        sys.exit(FAULT)
    np.save(sys.stdout.buffer, table)


def _table(path: str) -> NDArray[np.bool_]:
    from scipy.io import loadmat

    try:
        content = loadmat(path)
    except NotImplementedError as error:
        raise DataError(f"{path} is a MATLAB 7.3 file: save it again with -v7.") from error
    except Exception as error:  # a damaged file raises nearly anything
        raise DataError(f"{path} is not a MATLAB file ({error}): copy it again.") from error
    if KEY not in content:
        known = ", ".join(name for name in content if not name.startswith("__")) or "none"
        raise DataError(f"{path} has no variable '{KEY}' (its variables: {known}): copy it again.")
    found = content[KEY]
    try:
        dense = np.asarray(found.todense() if hasattr(found, "todense") else found)
        sound = dense.ndim == 2 and bool(np.isin(np.unique(dense), (0, 1)).all())
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise DataError(f"{path}: '{KEY}' is damaged ({error}): copy it again.") from error
    if not sound:
        raise DataError(f"{path}: '{KEY}' has shape {dense.shape} or other values than 0 and 1.")
    return dense.astype(np.bool_)


TAG_LISTS = ("common_tags.txt", "TagList1k.txt")
REGION_CLASSES = "region_classes"
REGIONS = 36  # regions per image, as in the supplement
NO_TAG = "untagged"  # the text of an image without any tag: a text is never empty


def parts(path: Path) -> dict[str, str]:
    """The splits that are there, as ``{"val": "dev", ...}``: split name to file name."""
    if not path.is_dir():
        return {}
    names = sorted(file.name.removesuffix("_tag.mat") for file in path.glob("*_tag.mat"))
    return {canonical_split(name): name for name in names}


def fill(draft: Draft, path: Path, split: str | None = None, regions: int = REGIONS) -> StoreChain:
    """Read every split, or one of them alone, with at most ``regions`` regions of each image."""
    at_least(regions, "regions", 1)
    there = parts(path)
    if split is not None:
        if split not in there:
            raise DataError(f"{path} has no split '{split}': its splits are {', '.join(there)}.")
        there = {split: there[split]}
    tags = _tags(path, draft.problems)
    return StoreChain([_add(draft, path, name, file, tags, regions) for name, file in there.items()])


def _add(draft: Draft, path: Path, split: str, file: str, tags: Sequence[str], most: int) -> ImageStore:
    regions = path / f"{file}_preim.npy"
    if not regions.is_file():
        raise DataError(f"{regions} is missing: it holds the region features (N, 36, D) of the split.")
    store = ArrayStore(regions)
    images: ImageStore = store
    tables, scores = [path / f"{file}_{name}.mat" for name in ("tag", "label")], path / f"{file}_cls.npy"
    table, labels = map(read_mat, tables)
    classes = RegionClasses(scores, most) if scores.is_file() else None
    for rows, place in ((table, tables[0]), (labels, tables[1]), (classes, scores)):
        if rows is not None and len(rows) != len(store):
            raise DataError(
                f"{place} has {len(rows)} rows, {regions.name} {len(store)}: use files of one split."
            )
    if table.shape[1] != len(tags):
        raise DataError(f"{path} has {table.shape[1]} tag columns for {len(tags)} tags: use its own list.")
    names = column_names(path / "labels.txt", "label", labels.shape[1], draft.problems)
    if classes is not None and classes.scores.shape[1] > most:
        if classes.scores.shape[:2] != store.shape[:2]:
            raise DataError(
                f"{scores} has {classes.scores.shape[1]} regions an image and {regions.name} {store.shape[1]}: use "
                "files of one detector."
            )
        images = BestRegions(store, classes)
    for row in range(len(store)):
        columns: dict[str, Any] = {COLUMN: tuple(names[c] for c in np.flatnonzero(labels[row]).tolist())}
        if classes is not None:
            columns[REGION_CLASSES] = LazyRow(classes, row)
        at = draft.image(f"{split}/{row}", split, path, labels=columns)
        draft.text(at, " ".join(tags[t] for t in np.flatnonzero(table[row]).tolist()) or NO_TAG, path)
    return images


def best_regions(scores: NDArray[Any], most: int = REGIONS) -> NDArray[np.intp]:
    """The numbers of the ``most`` best regions in their own order; its score (R, classes) is its best class's."""
    return np.sort(np.argsort(-scores.max(axis=-1), kind="stable")[:most])


class BestRegions:
    """The regions (N, R, D) that the detector is surest of, chosen on access."""

    features = True

    def __init__(self, store: ArrayStore, classes: RegionClasses) -> None:
        self.store, self.classes = store, classes

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> NDArray[Any]:
        best = best_regions(np.asarray(self.classes.scores[index]), self.classes.most)
        return np.asarray(self.store[index])[best]

    def content_key(self, index: int) -> str:
        """That of all regions, and how many are used."""
        return f"{self.store.content_key(index)} best {self.classes.most}"


class RegionClasses:
    """The detector's class of each region, (regions,) per image, read from scores (N, regions, classes) on access."""

    def __init__(self, path: Path, most: int = REGIONS) -> None:
        self.scores, self.most = ArrayStore(path), most
        if len(self.scores.shape) != 3:
            raise DataError(f"{path} has shape {self.scores.shape}: expected (images, regions, classes).")

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        scores = np.asarray(self.scores[row])
        classes: NDArray[np.int64] = scores[best_regions(scores, self.most)].argmax(axis=-1)
        return classes


class LazyRow(Sequence[int]):
    """One row of ``RegionClasses``, read when it is looked at."""

    def __init__(self, classes: RegionClasses, row: int) -> None:
        self.classes, self.row = classes, row

    def __len__(self) -> int:
        return min(self.classes.most, int(self.classes.scores.shape[1]))

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def tolist(self) -> list[int]:
        return [int(number) for number in self.classes[self.row]]


def _tags(path: Path, problems: Problems) -> list[str]:
    for name in TAG_LISTS:
        if (path / name).is_file():
            return list(tag_places(read_lines(path / name, problems)))
    raise DataError(f"{path} has no list of tags: put {' or '.join(TAG_LISTS)} there.")


READER = Reader(parts, fill, files=False, parts=parts)
