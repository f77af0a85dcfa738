"""COCO's instance annotations as labels: the categories of the objects in each picture.

``instances_train2014.json``, ``instances_val2014.json`` or their 2017 names, in a folder (or one of these files):
``{"categories": [{"id", "name"}], "annotations": [{"image_id", "category_id"}]}``. An image is found by the number at
the end of its id or file name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from diptych.data.captions import Captions
from diptych.data.files import read_json
from diptych.data.labels.vocabulary import COLUMN
from diptych.data.problems import Problems
from diptych.errors import DataError

_NUMBER = re.compile(r"(\d+)(?:\.\w+)?$")


def with_instances(captions: Captions, place: str | Path, problems: Problems | None = None) -> Captions:
    """The same data with the column ``labels``: the names of the categories, each once; none where COCO marks none."""
    found = read_instances(Path(place).expanduser(), problems or Problems())
    labels = []
    for image_id in captions.image_ids:
        number = _NUMBER.search(image_id)
        if number is None:
            raise DataError(
                f"{captions.name}: '{image_id}' has no COCO number: instance labels need COCO's images."
            )
        labels.append(found.get(int(number[1]), ()))
    if not any(labels):
        raise DataError(
            f"{place} labels none of the {len(labels)} images of {captions.name}: use files of one release."
        )
    return replace(captions, labels={**captions.labels, COLUMN: labels})


def read_instances(place: Path, problems: Problems) -> dict[int, tuple[str, ...]]:
    """COCO image id → names of its categories, in the order of the categories."""
    files = [place] if place.is_file() else sorted(place.glob("instances_*.json"))
    if not files:
        raise DataError(f"{place} holds no instances_*.json: give the folder of COCO's annotations.")
    order: dict[str, int] = {}
    categories: dict[int, set[str]] = {}
    for file in files:
        data = read_json(file, problems)
        try:
            names = {int(one["id"]): str(one["name"]) for one in data["categories"]}
            for one in data["annotations"]:
                categories.setdefault(int(one["image_id"]), set()).add(names[int(one["category_id"])])
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise DataError(
                f"{file} is not COCO's instance annotations ({error!r}): copy it again."
            ) from error
        for name in names.values():
            order.setdefault(name, len(order))
    return {image: tuple(sorted(own, key=order.__getitem__)) for image, own in categories.items()}
