"""NUS-WIDE as it is published: a list of pictures, one file of zeros and ones per concept, and a tag table.

``ImageList/Imagelist.txt`` one picture per line; ``Groundtruth/AllLabels/Labels_<concept>.txt`` one 0 or 1 per
picture; ``NUS_WID_Tags/AllTags1k.txt`` one row of 1,000 zeros and ones per picture and ``TagList1k.txt`` the tags.
Pictures lie under ``Flickr/``. The ``concepts`` most frequent concepts are the labels (10 or 21 in papers). Every file
must have as many lines as the list has pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych.data.captions import Captions
from diptych.data.files import read_lines
from diptych.data.problems import Problems
from diptych.data.readers.tag_sets import Tagged, tag_places, tagged_captions
from diptych.errors import DataError, SettingsError

LIST = Path("ImageList") / "Imagelist.txt"
LABELS = Path("Groundtruth") / "AllLabels"
TABLES = ("NUS_WID_Tags", "Tags", ".")
CONCEPTS = 10
TEST, VAL = 1866, 1866  # queries: 1 % of the 186,577 pairs of 10 concepts, and as many to validate on


def matches(path: Path) -> bool:
    """Whether ``path`` is a folder with NUS-WIDE's list and ground truth."""
    return (path / LIST).is_file() and (path / LABELS).is_dir()


def read(
    path: Path,
    *,
    concepts: int = CONCEPTS,
    test: int = TEST,
    val: int = VAL,
    images: str | Path | None = None,
    problems: Problems | None = None,
) -> Captions:
    """Read the folder; ``images`` is the folder of the pictures, ``Flickr`` if not given."""
    if concepts < 1:
        raise SettingsError(f"concepts={concepts} leaves no label: give 1 or more (10 or 21 in papers).")
    problems = problems or Problems()
    names = [line.strip().replace("\\", "/") for line in read_lines(path / LIST, problems) if line]
    columns = {file.stem.removeprefix("Labels_"): _flags(file, len(names)) for file in _label_files(path)}
    chosen = sorted(columns, key=lambda name: (-int(columns[name].sum()), name))[:concepts]
    table, tags = _table(path), list(tag_places(read_lines(_file(path, "TagList1k.txt"), problems)))
    pictures = [
        Tagged(name, [tags[tag] for tag in own], [label for label in chosen if columns[label][row]])
        for row, (name, own) in enumerate(zip(names, _tag_rows(table, len(names), len(tags)), strict=True))
    ]
    place = path / "Flickr" if images is None else Path(images).expanduser()
    return tagged_captions(pictures, path, place, test=test, val=val, problems=problems)


def _label_files(path: Path) -> list[Path]:
    files = sorted((path / LABELS).glob("Labels_*.txt"))
    if not files:
        raise DataError(
            f"{path / LABELS} holds no Labels_<concept>.txt: extract NUS-WIDE's ground truth there."
        )
    return files


def _flags(file: Path, pictures: int) -> NDArray[np.bool_]:
    words = file.read_bytes().split()
    if len(words) != pictures:
        raise DataError(
            f"{file} has {len(words)} labels for the {pictures} pictures of {LIST}: use files of one download."
        )
    flags = np.array(words)
    if not np.isin(flags, [b"0", b"1"]).all():
        raise DataError(f"{file} holds other values than 0 and 1: copy it again.")
    return np.asarray(flags == b"1")


def _file(path: Path, name: str) -> Path:
    for folder in TABLES:
        if (path / folder / name).is_file():
            return path / folder / name
    raise DataError(f"{name} is missing: put it into {path / TABLES[0]}.")


def _table(path: Path) -> Path:
    return _file(path, "AllTags1k.txt")


def _tag_rows(file: Path, pictures: int, tags: int) -> Iterator[NDArray[np.int64]]:
    """The tags of each picture, row by row: the table has half a gigabyte."""
    rows = 0
    with file.open("rb") as lines:
        for line in lines:
            words = line.split()
            if not words:
                continue
            if len(words) != tags:
                raise DataError(f"{file}:{rows + 1} has {len(words)} columns for {tags} tags: copy it again.")
            rows += 1
            if rows <= pictures:
                yield np.flatnonzero(np.array(words) == b"1")
    if rows != pictures:
        raise DataError(
            f"{file} has {rows} rows for the {pictures} pictures of {LIST}: use files of one download."
        )
