"""A ``Captions`` in the making: what every reader fills, with the rules all formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from diptych.data.captions import Captions, ImageStore
from diptych.data.problems import Problems
from diptych.errors import SettingsError
from diptych.progress import counted

Empty = Literal["error", "drop"]
"""What to do with an empty text: refuse the data, or leave the text out."""


class Draft:
    """Images by key, each in one split, with their texts; what breaks a rule goes to ``problems``.

    ``key`` is what makes an image the same image (its path, its row); ``image_id`` what the data calls it.
    The ids of the result are the given ones when every image has one, else the keys. Two images of one id
    are an error. ``strict_ids=False`` leaves that to the reader: JSON lists may number their images from 0 in each
    split, and the keys then serve as ids; precomputed folders compare the ids of all splits themselves.
    """

    def __init__(
        self, name: str, problems: Problems, empty: Empty = "error", strict_ids: bool = True
    ) -> None:
        if empty not in ("error", "drop"):
            raise SettingsError(
                f"empty='{empty}' is unknown: say 'error' to refuse empty texts or 'drop' to skip them."
            )
        self.name, self.problems, self.empty, self.strict_ids = name, problems, empty, strict_ids
        self.keys: list[str] = []
        self.splits: list[str] = []
        self.labels: list[Mapping[str, Any]] = []
        self.texts: list[str] = []
        self.image_of: list[int] = []
        self.notes: list[str] = []  # sentences about what was left out
        self.dropped = 0  # empty texts
        self._given: list[str | None] = []
        self._text_ids: list[str | None] = []
        self._rows: dict[str, int] = {}  # by key
        self._named: dict[str, int] = {}  # by given id

    def image(
        self,
        key: str,
        split: str,
        where: object,
        image_id: object = None,
        labels: Mapping[str, Any] | None = None,
    ) -> int:
        """The row of an image, new or seen before; one seen in another split is reported and stays there."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self.keys)
            self.keys.append(key)
            self.splits.append(split)
            self.labels.append(labels or {})
            given = None if image_id in (None, "") else str(image_id)
            self._given.append(given)
            if given is not None:
                self._check_id(given, row, where)
        elif self.splits[row] != split:
            message = f"image '{key}' is in two splits, {self.splits[row]} and {split}"
            self.problems.error("in two splits", where, message, "leave it in one of them")
        return row

    def find(self, key: str) -> int | None:
        """The row of an image seen before, else None."""
        return self._rows.get(key)

    def _check_id(self, given: str, row: int, where: object) -> None:
        other = self._named.setdefault(given, row)
        if other == row or not self.strict_ids:
            return
        if self.splits[other] != self.splits[row]:
            message = f"image id '{given}' is in two splits, {self.splits[other]} and {self.splits[row]}"
            self.problems.error("in two splits", where, message, "leave it in one of them")
        else:
            message = f"image id '{given}' names two images, {self.keys[other]} and {self.keys[row]}"
            self.problems.error("image id", where, message, "give each image its own id")

    def text(self, row: int, text: object, where: object, text_id: object = None) -> None:
        """One text of an image, stripped; empty or not a string at all, it is reported."""
        if not isinstance(text, str):
            self.problems.error(
                "text", where, f"the text is {type(text).__name__} {text!r}", "a text is a string"
            )
            return
        clean = text.strip()
        if not clean:
            if self.empty == "error":
                expected = "write a text or remove the line, or leave such texts out with PATH?empty=drop"
                self.problems.error(
                    "empty text", where, f"the text of image '{self.keys[row]}' is empty", expected
                )
            else:
                self.dropped += 1
                self.problems.warn(
                    "empty text", where, f"image '{self.keys[row]}' has an empty text: left out"
                )
            return
        self.texts.append(clean)
        self.image_of.append(row)
        self._text_ids.append(None if text_id is None else str(text_id))

    def captions(self, store: Callable[[Sequence[str]], ImageStore]) -> Captions:
        """The finished data set; ``store`` makes the images from their keys."""
        notes = [
            *self.notes,
            *([f"left out {counted(self.dropped, 'text')} without a word."] if self.dropped else []),
        ]
        columns = dict.fromkeys(column for labels in self.labels for column in labels)
        return Captions(
            images=store(self.keys),
            texts=self.texts,
            image_of=np.asarray(self.image_of, dtype=np.int64),
            image_ids=self.image_ids(),
            splits=self.splits,
            labels={column: [labels.get(column) for labels in self.labels] for column in columns},
            text_ids=self._whole(self._text_ids),
            name=self.name,
            notes=notes,
        )

    def image_ids(self) -> list[str]:
        """The data's own ids where they are complete and unique, else the keys."""
        return self._whole(self._given) or self.keys

    @staticmethod
    def _whole(ids: Sequence[str | None]) -> list[str] | None:
        given = [i for i in ids if i is not None]
        return given if given and len(set(given)) == len(ids) else None
