"""MIRFlickr25K and NUS-WIDE as they are published: pictures with tags and labels.

The text of a picture is its tags, in the order of the tag list, each once. A picture without a tag of the list, or
without a label, is left out (the convention of DCMH: 20,015 pairs of MIRFlickr25K, 186,577 of NUS-WIDE with 10 labels).
MIRFlickr's 24 potential labels are read, the 14 relevant ones (``<label>_r1.txt``) are not.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych.data.files import read_lines
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Reader
from diptych.errors import DataError, SettingsError, at_least

COMMON = "common_tags.txt"
ANNOTATIONS = "mirflickr25k_annotations*"
LEAST_USES = 20  # smallest number of pictures with a tag, if no list of tags is given
MIR_TEST, MIR_VAL = 2000, 1000  # the queries of DCMH, and pictures held out to choose epoch and threshold
_NUMBER = re.compile(r"(\d+)$")
LIST = Path("ImageList") / "Imagelist.txt"
LABELS = Path("Groundtruth") / "AllLabels"
TABLES = ("NUS_WID_Tags", "Tags", ".")
CONCEPTS = 10
NUS_TEST, NUS_VAL = 1866, 1866  # queries: 1 % of the 186,577 pairs of 10 concepts, and as many to validate on


@dataclass(frozen=True)
class TaggedPicture:
    """One picture: its file below the image folder, its tags, its labels."""

    file: str
    tags: Sequence[str]
    labels: Sequence[str]


def add_tagged(draft: Draft, pictures: Sequence[TaggedPicture], path: Path, test: int, val: int) -> None:
    """Put the pictures that have a tag and a label into a draft; ``test`` and ``val`` count pictures."""
    at_least(test, "test", 0)
    at_least(val, "val", 0)
    usable = [one for one in pictures if one.tags and one.labels]
    if not usable:
        raise DataError(f"{path}: none of {len(pictures)} pictures has a tag and a label: check the files.")
    if test + val >= len(usable):
        raise SettingsError(
            f"{path} has {len(usable)} pictures: test={test}, val={val} leave none to train on."
        )
    order = sorted((one.file for one in usable), key=lambda file: hashlib.sha256(file.encode()).digest())
    split_of = dict.fromkeys(order, "train") | dict.fromkeys(order[: test + val], "val")
    split_of |= dict.fromkeys(order[:test], "test")
    for one in usable:
        row = draft.image(one.file, split_of[one.file], path, labels={"labels": tuple(one.labels)})
        draft.text(row, " ".join(one.tags), path)


def in_list_order(tags: Sequence[str], places: Mapping[str, int]) -> list[str]:
    """The tags that are in a list, each once, in its order."""
    return sorted({tag for tag in tags if tag in places}, key=places.__getitem__)


def tag_places(lines: Sequence[str | None]) -> dict[str, int]:
    """Tag → place in a tag list: one tag per line, a count behind it where there is one."""
    tags = (line.split()[0] for line in lines if line is not None and line.split())
    return {tag: place for place, tag in enumerate(dict.fromkeys(tags))}


def is_mirflickr(path: Path) -> bool:
    """Whether ``path`` is a folder with MIRFlickr's annotations and tags."""
    return bool(path.is_dir() and _annotations(path) and _tags(path))


def fill_mirflickr(
    draft: Draft, path: Path, test: int = MIR_TEST, val: int = MIR_VAL, least_uses: int = LEAST_USES
) -> Path:
    """Read the folder; ``test`` and ``val`` are the numbers of pictures held out."""
    problems = draft.problems
    at_least(least_uses, "least_uses", 1)
    annotations, tags = _annotations(path)[0], _tags(path)[0]
    labels: dict[int, list[str]] = {}
    for file in sorted(annotations.glob("*.txt")):
        if file.stem.endswith("_r1") or file.stem.lower().startswith("readme"):
            continue
        for number, line in enumerate(read_lines(file, problems), 1):
            if line is None or not line.strip():
                continue
            if not line.strip().isdecimal():
                problems.error("label", f"{file}:{number}", f"'{line.strip()}' is no number", "a number")
                continue
            labels.setdefault(int(line), []).append(file.stem)
    own: dict[int, list[str]] = {}
    for file in tags.glob("tags*.txt"):
        found = _NUMBER.search(file.stem)
        if found is not None:
            own[int(found[1])] = [
                line.strip() for line in read_lines(file, problems) if line and line.strip()
            ]
    places = _places(path, own, least_uses, problems)
    numbers = sorted(own.keys() | labels.keys())
    pictures = [
        TaggedPicture(f"im{n}.jpg", in_list_order(own.get(n, ()), places), labels.get(n, ())) for n in numbers
    ]
    add_tagged(draft, pictures, path, test, val)
    return path / "mirflickr" if (path / "mirflickr").is_dir() else path


def _places(path: Path, own: dict[int, list[str]], least_uses: int, problems: Problems) -> dict[str, int]:
    for place in (path, path / "mirflickr", path / "mirflickr" / "meta", path / "meta"):
        if (place / COMMON).is_file():
            return tag_places(read_lines(place / COMMON, problems))
    uses = Counter(tag for tags in own.values() for tag in set(tags))
    frequent = sorted((-count, tag) for tag, count in uses.items() if count >= least_uses)
    return {tag: place for place, (_, tag) in enumerate(frequent)}


def _annotations(path: Path) -> list[Path]:
    places = [*path.glob(ANNOTATIONS), *path.glob(f"mirflickr/{ANNOTATIONS}")]
    return [place for place in places if place.is_dir()]


def _tags(path: Path) -> list[Path]:
    return [place for place in (path / "meta/tags", path / "mirflickr/meta/tags") if place.is_dir()]


def is_nus_wide(path: Path) -> bool:
    """Whether ``path`` is a folder with NUS-WIDE's list and ground truth."""
    return (path / LIST).is_file() and (path / LABELS).is_dir()


def fill_nus_wide(
    draft: Draft, path: Path, concepts: int = CONCEPTS, test: int = NUS_TEST, val: int = NUS_VAL
) -> Path:
    """Read the folder, whose pictures are below ``Flickr``."""
    at_least(concepts, "concepts", 1)
    names = [line.strip().replace("\\", "/") for line in read_lines(path / LIST, draft.problems) if line]
    files = sorted((path / LABELS).glob("Labels_*.txt"))
    if not files:
        raise DataError(f"{path / LABELS} holds no Labels_<concept>.txt: put the ground truth there.")
    columns = {file.stem.removeprefix("Labels_"): _flags(file, len(names)) for file in files}
    frequent = sorted(columns, key=lambda name: (-int(columns[name].sum()), name))[:concepts]
    table = _file(path, "AllTags1k.txt")
    tags = list(tag_places(read_lines(_file(path, "TagList1k.txt"), draft.problems)))
    pictures = [
        TaggedPicture(name, [tags[tag] for tag in own], [label for label in frequent if columns[label][row]])
        for row, (name, own) in enumerate(zip(names, _tag_rows(table, len(names), len(tags)), strict=True))
    ]
    add_tagged(draft, pictures, path, test, val)
    return path / "Flickr"


def _flags(file: Path, pictures: int) -> NDArray[np.bool_]:
    words = file.read_bytes().split()
    if len(words) != pictures:
        raise DataError(f"{file} has {len(words)} labels for {pictures} pictures of {LIST}: copy it again.")
    flags = np.array(words)
    if not np.isin(flags, [b"0", b"1"]).all():
        raise DataError(f"{file} holds other values than 0 and 1: copy it again.")
    return np.asarray(flags == b"1")


def _file(path: Path, name: str) -> Path:
    for folder in TABLES:
        if (path / folder / name).is_file():
            return path / folder / name
    raise DataError(f"{name} is missing: put it into {path / TABLES[0]}.")


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
        raise DataError(f"{file} has {rows} rows for the {pictures} pictures of {LIST}: download it again.")


MIRFLICKR, NUS_WIDE = Reader(is_mirflickr, fill_mirflickr), Reader(is_nus_wide, fill_nus_wide)
