"""Pictures with tags and labels: what MIRFlickr25K and NUS-WIDE have in common.

The text of a picture is its tags, in the order of the tag list, each once. A picture without a tag of the list, or
without a label, cannot be used and is left out (the convention of DCMH: 20,015 pairs of MIRFlickr25K, 186,577 of
NUS-WIDE with 10 labels). Splits follow a hash of the picture's name: ``test`` first, then ``val``, the rest ``train``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.data.captions import Captions
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft
from diptych.data.readers.rows import with_files
from diptych.errors import DataError, SettingsError


@dataclass(frozen=True)
class Tagged:
    """One picture: its file below the image folder, its tags, its labels."""

    file: str
    tags: Sequence[str]
    labels: Sequence[str]


def tagged_captions(
    pictures: Sequence[Tagged],
    path: Path,
    images: Path,
    *,
    test: int,
    val: int,
    problems: Problems,
) -> Captions:
    """``Captions`` of the pictures that have a tag and a label; ``test`` and ``val`` count pictures."""
    if test < 0 or val < 0:
        raise SettingsError(f"test={test} and val={val} count pictures: give 0 or more.")
    usable = [one for one in pictures if one.tags and one.labels]
    if not usable:
        raise DataError(
            f"{path}: none of {len(pictures)} pictures has both a tag and a label: check the files."
        )
    if test + val >= len(usable):
        raise SettingsError(
            f"{path} has {len(usable)} pictures with tags and labels: test={test} and val={val} leave none to train on."
        )
    order = sorted(one.file for one in usable)
    order.sort(key=lambda file: hashlib.sha256(file.encode()).digest())
    split_of = {
        file: "test" if at < test else "val" if at < test + val else "train" for at, file in enumerate(order)
    }
    draft = Draft(str(path), problems)
    for one in usable:
        row = draft.image(one.file, split_of[one.file], path, labels={"labels": tuple(one.labels)})
        draft.text(row, " ".join(one.tags), path)
    return with_files(draft, images, images, problems)


def in_list_order(tags: Sequence[str], places: Mapping[str, int]) -> list[str]:
    """The tags that are in a list, each once, in its order."""
    return sorted({tag for tag in tags if tag in places}, key=places.__getitem__)


def tag_places(lines: Sequence[str | None]) -> dict[str, int]:
    """Tag → place in a tag list: one tag per line, a count behind it where there is one."""
    tags = (line.split()[0] for line in lines if line is not None and line.split())
    return {tag: place for place, tag in enumerate(dict.fromkeys(tags))}
