"""The classes of images for hashing: which label column, which classes, and a row of zeros and ones for each image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.captions import Captions
from diptych.errors import DataError

COLUMN = "labels"


def class_sets(captions: Captions, column: str = COLUMN) -> list[tuple[str, ...]]:
    """The classes of each image: the values of a label column, one or several each; an image may have none."""
    if column not in captions.labels:
        known = ", ".join(captions.labels) or "none"
        raise DataError(
            f"{captions.name} has no label column '{column}' (its columns: {known}): hashing needs the classes of the "
            "images; name the column that holds them with --label_column."
        )
    return [_names(value) for value in captions.labels[column]]


def class_names(sets: Sequence[Sequence[str]]) -> list[str]:
    """The classes that occur, numbers in their order: class 2 before class 10."""
    return sorted({name for one in sets for name in one}, key=_natural)


def class_rows(sets: Sequence[Sequence[str]], names: Sequence[str]) -> NDArray[np.bool_]:
    """(images, classes): True where an image has a class; classes outside ``names`` have no column."""
    column = {name: number for number, name in enumerate(names)}
    rows = np.zeros((len(sets), len(names)), np.bool_)
    for row, one in enumerate(sets):
        for name in one:
            if name in column:
                rows[row, column[name]] = True
    return rows


def _names(value: Any) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(str(one) for one in value)
    return (str(value),)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key by which numbers inside a name count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
