"""A ``Captions`` in the making: what every reader fills, with the rules all formats share.

Rows of a table (a manifest, a JSON list, a Hugging Face data set) become a draft by the names of its columns. Rows of
one image are gathered, in the order of the rows. Any further column is a label of the images; one that differs between
the rows of an image becomes, for every image, the tuple of its values. A row that leaves it empty says nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from diptych.data.captions import Captions, ImageStore, canonical_split
from diptych.data.files import FileImages, OnDisk, image_root
from diptych.data.problems import STOP, Problems
from diptych.errors import SettingsError
from diptych.progress import counted

Empty = Literal["error", "drop"]
"""What to do with an empty text: refuse the data, or leave the text out."""


class Draft:
    """Images by key, each in one split, with their texts; what breaks a rule goes to ``problems``.

    ``key`` is what makes an image the same image (its path, its row); ``image_id`` what the data calls it: the ids of
    the result where every image has one. Two images of one id are an error, unless ``strict_ids`` leaves that to the
    reader (lists that number their images from 0 in each split). ``folder`` is that of the images, where the user says
    it.
    """

    def __init__(
        self, name: str, problems: Problems, empty: Empty = "error", folder: str | Path | None = None
    ) -> None:
        if empty not in ("error", "drop"):
            raise SettingsError(f"empty='{empty}' is unknown: say 'error' to refuse or 'drop' to skip them.")
        self.name, self.problems, self.empty, self.folder = name, problems, empty, folder
        self.strict_ids = True
        self.classes: Sequence[str] = ()
        self.keys: list[str] = []
        self.splits: list[str] = []
        self.labels: list[Mapping[str, Any]] = []
        self.texts: list[str] = []
        self.image_of: list[int] = []
        self.notes: list[str] = []  # sentences about what was left out
        self.dropped = 0  # empty texts
        self._own_ids: list[str | None] = []
        self._text_ids: list[str | None] = []
        self._rows: dict[str, int] = {}  # by key
        self._row_of_id: dict[str, int] = {}  # by given id

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
            own_id = None if image_id in (None, "") else str(image_id)
            self._own_ids.append(own_id)
            if own_id is not None:
                self._check_id(own_id, row, where)
        elif self.splits[row] != split:
            message = f"image '{key}' is in two splits, {self.splits[row]} and {split}"
            self.problems.error("in two splits", where, message, "leave it in one of them")
        return row

    def find(self, key: str) -> int | None:
        return self._rows.get(key)

    def _check_id(self, own_id: str, row: int, where: object) -> None:
        other = self._row_of_id.setdefault(own_id, row)
        if other == row or not self.strict_ids:
            return
        if self.splits[other] != self.splits[row]:
            message = f"image id '{own_id}' is in two splits, {self.splits[other]} and {self.splits[row]}"
            self.problems.error("in two splits", where, message, "leave it in one of them")
        else:
            message = f"image id '{own_id}' names two images, {self.keys[other]} and {self.keys[row]}"
            self.problems.error("image id", where, message, "give each image its own id")

    def text(self, row: int, text: object, where: object, text_id: object = None) -> None:
        """One text of an image, stripped; empty or not a string at all, it is reported."""
        if not isinstance(text, str):
            self.problems.error("text", where, f"the text is {type(text).__name__} {text!r}", "a string")
            return
        clean = text.strip()
        if not clean:
            if self.empty == "error":
                expected = "write a text or remove the line, or leave such texts out with PATH?empty=drop"
                self.problems.error("empty text", where, f"a text of '{self.keys[row]}' is empty", expected)
            else:
                self.dropped += 1
                self.problems.warn(
                    "empty text", where, f"image '{self.keys[row]}' has an empty text", "left out"
                )
            return
        self.texts.append(clean)
        self.image_of.append(row)
        self._text_ids.append(None if text_id is None else str(text_id))

    def captions(self, images: ImageStore) -> Captions:
        """The finished data set, with the images of the keys."""
        notes = [
            *self.notes,
            *([f"left out {counted(self.dropped, 'text')} without a word."] if self.dropped else []),
        ]
        columns = dict.fromkeys(column for labels in self.labels for column in labels)
        return Captions(
            images=images,
            texts=self.texts,
            image_of=np.asarray(self.image_of, dtype=np.int64),
            image_ids=self.image_ids(),
            splits=self.splits,
            labels={column: [labels.get(column) for labels in self.labels] for column in columns},
            text_ids=self._whole(self._text_ids),
            name=self.name,
            notes=notes,
            classes=self.classes,
        )

    def image_ids(self) -> list[str]:
        """The data's own ids where they are complete and unique, else the keys."""
        return self._whole(self._own_ids) or self.keys

    @staticmethod
    def _whole(ids: Sequence[str | None]) -> list[str] | None:
        complete = [i for i in ids if i is not None]
        return complete if complete and len(set(complete)) == len(ids) else None


IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "image_path", "image_name", "image_file")
WEAK_IMAGE_COLUMNS = ("file", "path", "photo", "picture", "img")  # that mean images only beside a text column
TEXT_COLUMNS = (
    "text", "caption", "captions", "description", "title", "comment", "sentence", "alt", "alt_text",
)  # fmt: skip
MOST_COLUMNS = 12  # columns that a message names
OWN_COLUMNS = {"image_id", "text_id", "split"}
KNOWN_COLUMNS = {*IMAGE_COLUMNS, *WEAK_IMAGE_COLUMNS, *TEXT_COLUMNS, *OWN_COLUMNS}


@dataclass(frozen=True)
class Columns:
    """Which column of a table means what."""

    image: str
    text: str | None
    further: tuple[str, ...]

    @staticmethod
    def among(names: Iterable[str], image: str | None = None, text: str | None = None) -> Columns | None:
        """The meaning of columns by their names, or by those that the user gives; None without an image column."""
        known = list(dict.fromkeys(names))
        if (image is not None and image not in known) or (text is not None and text not in known):
            return None
        text = text or next((c for c in TEXT_COLUMNS if c in known and c != image), None)
        images = (*IMAGE_COLUMNS, *(WEAK_IMAGE_COLUMNS if text is not None else ()))
        image = image or next((c for c in images if c in known and c != text), None)
        if image is None:
            return None
        return Columns(image, text, tuple(c for c in known if c not in {image, text} | OWN_COLUMNS))


def in_words(columns: Iterable[str], image: str | None = None, text: str | None = None) -> str:
    """What is wrong with the columns of a table that is not understood, and how to name the right ones."""
    known = list(dict.fromkeys(str(column) for column in columns))
    names = ", ".join(f"'{column}'" for column in known[:MOST_COLUMNS]) + (
        ", …" if len(known) > MOST_COLUMNS else ""
    )
    for column in (image, text):
        if column is not None and column not in known:
            return f"it has no column '{column}', but {names}"
    return (
        f"its columns are {names}: say which holds the image and which the text, with --image_column and "
        "--text_column or behind the path, ?image=COLUMN&text=COLUMN"
    )


@dataclass(frozen=True)
class Row:
    """One row with the place it came from (``file:line``) and the split its file is named after."""

    where: str
    values: Mapping[str, Any]
    split: str


def add_rows(draft: Draft, rows: Iterable[Row], columns: Columns) -> None:
    """Put rows into a draft: images by their path, texts, ids, splits and labels."""
    labels: list[dict[str, list[Any]]] = []
    for row in rows:
        name = row.values.get(columns.image)
        if not isinstance(name, str) or not name.strip():
            expected = "name a file, relative to the image folder"
            draft.problems.error("image", row.where, f"column '{columns.image}' is {name!r}", expected)
            continue
        if "://" in name:
            draft.problems.error("image", row.where, f"'{name}' is an address", "download the images first")
            continue
        split = row.values.get("split")
        split = canonical_split(split) if isinstance(split, str) and split.strip() else row.split
        key = name.strip().replace("\\", "/").removeprefix("./")
        at = draft.image(key, split, row.where, row.values.get("image_id"))
        if at == len(labels):
            labels.append({column: [] for column in columns.further})
        for column in columns.further:
            labels[at][column].append(row.values.get(column))
        if columns.text is not None:
            add_texts(draft, at, row.values.get(columns.text), row.where, row.values.get("text_id"))
    draft.labels = gather_labels(labels, columns.further)


def add_texts(draft: Draft, row: int, texts: Any, where: str, text_ids: Any = None) -> None:
    """The texts of one cell: a string or a list of strings, with ids in the same form."""
    many = list(texts) if isinstance(texts, list | tuple) else ["" if texts is None else texts]
    ids = list(text_ids) if isinstance(text_ids, list | tuple) else [text_ids]
    if len(ids) != len(many):
        ids = [None] * len(many)
    for text, text_id in zip(many, ids, strict=True):
        draft.text(row, text, where, text_id)


def gather_labels(
    values: Sequence[Mapping[str, list[Any]]], columns: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Labels per image from the values of its rows: one where all that have a value agree, else tuples.

    The lists of an image's rows are one list.
    """
    own_values = [{c: [v for v in row[c] if v is not None] for c in columns} for row in values]
    constant = {c: all(all(v == row[c][0] for v in row[c]) for row in own_values) for c in columns}
    return [
        {c: next(iter(row[c]), None) if constant[c] else _joined(row[c]) for c in columns}
        for row in own_values
    ]


def _joined(values: Sequence[Any]) -> tuple[Any, ...]:
    """Values, with the elements of those that are lists in their place."""
    return tuple(one for value in values for one in (value if isinstance(value, list | tuple) else [value]))


def with_files(draft: Draft, beside: Path) -> Captions:
    """Finish a draft whose keys are image files; absent ones are reported, and dropped unless the sink keeps them."""
    root = image_root(draft.keys, beside, draft.folder)
    on_disk = OnDisk()
    there = [row for row, name in enumerate(draft.keys) if root / name in on_disk]
    captions = draft.captions(FileImages(root, draft.keys))
    if len(there) == len(draft.keys):
        return captions
    present = set(there)
    missing = [str(root / name) for row, name in enumerate(draft.keys) if row not in present]
    hint = f"put the images under {root}, or name their folder with PATH?images=FOLDER"
    draft.problems.missing(missing, len(draft.keys), draft.name, hint)
    return captions if draft.problems.keeps_missing else captions.subset(there)


@dataclass(frozen=True)
class Reader:
    """A format that fills a draft: how it is recognised, and how it is read.

    ``fill(draft, path, …)`` returns the store of the draft's images, or the folder beside which files of these names
    lie. Its options are those of ``fill``, ``empty`` (default: that of the format) and, where the images are ``files``,
    ``images``, their folder. ``parts`` finds the splits of which ``fill`` can read one alone.
    """

    matches: Callable[[Path], object]
    fill: Callable[..., ImageStore | Path]
    empty: Empty = "error"
    files: bool = True
    parts: Callable[[Path], Iterable[str]] | None = None

    @property
    def options(self) -> list[str]:
        own = [
            name for name in inspect.signature(self.fill).parameters if name not in ("draft", "path", "split")
        ]
        return [*(["images"] if self.files else []), "empty", *own]

    def read(
        self,
        path: Path,
        *,
        images: str | Path | None = None,
        empty: Empty | None = None,
        problems: Problems = STOP,
        **options: Any,
    ) -> Captions:
        draft = Draft(str(path), problems, empty or self.empty, images)
        store = self.fill(draft, path, **options)
        return with_files(draft, store) if isinstance(store, Path) else draft.captions(store)
