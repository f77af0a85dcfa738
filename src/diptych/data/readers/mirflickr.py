"""MIRFlickr25K as it is published: pictures, tags, and one file per label.

``mirflickr/im1.jpg`` … (or the pictures in the folder itself), ``mirflickr/meta/tags/tags1.txt`` … one tag per line,
``mirflickr25k_annotations_v080/<label>.txt`` the numbers of the pictures with that label, one per line. The 24
potential labels are read and the 14 relevant ones (``<label>_r1.txt``) are not. Tags are those of ``common_tags.txt``
("tag count" per line, 1,386 tags) where it exists, else those of at least 20 pictures.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from diptych.data.captions import Captions
from diptych.data.files import read_lines
from diptych.data.problems import Problems
from diptych.data.readers.tag_sets import Tagged, in_list_order, tag_places, tagged_captions
from diptych.errors import SettingsError

COMMON = "common_tags.txt"
ANNOTATIONS = "mirflickr25k_annotations*"
LEAST_USES = 20  # smallest number of pictures with a tag, if no list of tags is given
TEST, VAL = 2000, 1000  # the queries of DCMH, and pictures held out to choose epoch and threshold
_NUMBER = re.compile(r"(\d+)$")


def matches(path: Path) -> bool:
    """Whether ``path`` is a folder with MIRFlickr's annotations and tags."""
    return path.is_dir() and _annotations(path) is not None and _tags(path) is not None


def read(
    path: Path,
    *,
    test: int = TEST,
    val: int = VAL,
    least_uses: int = LEAST_USES,
    problems: Problems | None = None,
) -> Captions:
    """Read the folder; ``test`` and ``val`` are the numbers of pictures held out."""
    if least_uses < 1:
        raise SettingsError(f"least_uses={least_uses} is out of range: give 1 or more.")
    problems = problems or Problems()
    annotations, tags = _annotations(path), _tags(path)
    assert annotations is not None
    assert tags is not None
    labels: dict[int, list[str]] = {}
    for file in sorted(annotations.glob("*.txt")):
        if file.stem.endswith("_r1") or file.stem.lower().startswith("readme"):
            continue
        for number, line in enumerate(read_lines(file, problems), 1):
            if line is None or not line.strip():
                continue
            if not line.strip().isdecimal():
                problems.error(
                    "label",
                    f"{file}:{number}",
                    f"'{line.strip()}' is not a number",
                    "one picture number per line",
                )
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
    images = _images(path)
    numbers = sorted(own.keys() | labels.keys())
    pictures = [
        Tagged(f"im{n}.jpg", in_list_order(own.get(n, ()), places), labels.get(n, ())) for n in numbers
    ]
    return tagged_captions(pictures, path, images, test=test, val=val, problems=problems)


def _places(path: Path, own: dict[int, list[str]], least_uses: int, problems: Problems) -> dict[str, int]:
    for place in (path, path / "mirflickr", path / "mirflickr" / "meta", path / "meta"):
        if (place / COMMON).is_file():
            return tag_places(read_lines(place / COMMON, problems))
    uses = Counter(tag for tags in own.values() for tag in set(tags))
    frequent = [tag for tag, count in uses.items() if count >= least_uses]
    frequent.sort(key=lambda tag: (-uses[tag], tag))
    return {tag: place for place, tag in enumerate(frequent)}


def _annotations(path: Path) -> Path | None:
    places = [*path.glob(ANNOTATIONS), *path.glob(f"mirflickr/{ANNOTATIONS}")]
    return next((place for place in places if place.is_dir()), None)


def _tags(path: Path) -> Path | None:
    places = (path / "meta" / "tags", path / "mirflickr" / "meta" / "tags")
    return next((place for place in places if place.is_dir()), None)


def _images(path: Path) -> Path:
    return path / "mirflickr" if (path / "mirflickr").is_dir() else path
