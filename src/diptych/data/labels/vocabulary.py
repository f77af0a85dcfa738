"""The labels of a data set: names ↔ columns, kept with the model, and the labels of each image by column name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.captions import Captions
from diptych.errors import DataError, SettingsError
from diptych.parts import part
from diptych.storage import parse_json

COLUMN = "labels"  # the column of a manifest that holds the labels of an image
SEPARATORS = ";|"  # between the labels of one cell
NAMED = 5  # labels or items a message names before it counts the rest


@part
class Labels:
    """The vocabulary of labels: ``names[c]`` is column c of every label matrix.

    ``columns`` are the columns of a data set that hold the labels.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[str] = (COLUMN,)) -> None:
        self.names, self.columns = list(names), list(columns)
        self._columns = {name: column for column, name in enumerate(self.names)}
        if len(self._columns) < len(self.names):
            raise DataError("a label vocabulary names a label twice: give each label once.")

    @staticmethod
    def of(captions: Captions, columns: Sequence[str] = (COLUMN,)) -> Labels:
        """The labels of a data set, in alphabetical order."""
        return Labels(sorted({name for item in item_labels(captions, columns) for name in item}), columns)

    def rows_of(self, captions: Captions) -> NDArray[np.float32]:
        """The labels of every image, (N, C)."""
        return self.matrix(item_labels(captions, self.columns), captions.image_ids)

    def __len__(self) -> int:
        return len(self.names)

    def matrix(self, items: Sequence[Sequence[str]], ids: Sequence[str] | None = None) -> NDArray[np.float32]:
        """(items, C) of zeros and ones; a label that is not in the vocabulary is an error that names its item."""
        rows = np.zeros((len(items), len(self.names)), dtype=np.float32)
        for row, item in enumerate(items):
            for name in item:
                if name not in self._columns:
                    whose = f"item {row}" if ids is None else f"'{ids[row]}'"
                    raise DataError(
                        f"the label '{name}' of {whose} was not seen in training: the model knows "
                        f"{_listed(self.names)}; remove the label, or train on data that have it."
                    )
                rows[row, self._columns[name]] = 1
        return rows

    def save_assets(self, folder: Path) -> dict[str, Any]:
        """Write the names, in their order."""
        (folder / "labels.json").write_text(json.dumps(self.names, ensure_ascii=False, indent=1), "utf-8")
        return {"names": "labels.json"}

    def content_arguments(self) -> dict[str, Any]:
        """A digest in the place of the names."""
        return {"names": hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:16]}


def item_labels(captions: Captions, columns: Sequence[str] = (COLUMN,)) -> list[tuple[str, ...]]:
    """The labels of each image: the values of some columns, together; an image without any is an error.

    A value may be a list, a number, or a text of several labels between ``;`` or ``|``.
    """
    for column in columns:
        if column not in captions.labels:
            known = ", ".join(captions.labels) or "none"
            raise DataError(
                f"{captions.name} has no column '{column}' of labels (its columns: {known}): add a column 'labels' to "
                "the manifest, or name the columns to use."
            )
    items = [
        tuple(dict.fromkeys(name for column in columns for name in _names(captions.labels[column][row])))
        for row in range(len(captions.images))
    ]
    without = [captions.image_ids[row] for row, item in enumerate(items) if not item]
    if without:
        raise DataError(
            f"{captions.name}: {len(without)} of {len(items)} images have no label ({_listed(without)}): give each at "
            "least one, or leave them out with '?unlabelled=drop' behind the path of the data."
        )
    return items


def labelled(captions: Captions, unlabelled: str) -> Captions:
    """The data without the images that have no label in the column ``labels`` (``unlabelled="drop"``)."""
    if unlabelled not in ("error", "drop"):
        raise SettingsError(
            f"unlabelled='{unlabelled}' is unknown: say 'error' to refuse images without labels or 'drop'."
        )
    if unlabelled == "error" or COLUMN not in captions.labels:
        item_labels(captions)
        return captions
    kept = [row for row, value in enumerate(captions.labels[COLUMN]) if any(_names(value))]
    if not kept:
        raise DataError(f"{captions.name}: no image has a label: check its column '{COLUMN}'.")
    return captions.subset(kept)


def _names(value: Any) -> Iterator[str]:
    if value is None:
        return
    if isinstance(value, list | tuple | set):
        for one in value:
            yield from _names(one)
        return
    text = str(value)
    if isinstance(value, str) and text.strip().startswith("["):
        try:
            yield from _names(parse_json(text))
            return
        except ValueError:
            pass  # a name that begins with a bracket
    for separator in SEPARATORS[1:]:
        text = text.replace(separator, SEPARATORS[0])
    yield from filter(None, (name.strip() for name in text.split(SEPARATORS[0])))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:NAMED]) + more
