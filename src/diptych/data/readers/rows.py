"""Rows of a table (a manifest, a JSON list, a Hugging Face data set) into a draft of ``Captions``.

==========  ============================================================================
meaning     columns read as it, the first that is there
==========  ============================================================================
image       ``image``, ``filepath``, ``file_name``, ``filename``, ``image_path``, ``image_name``, ``image_file``; where
            there is a text column too: ``file``, ``path``, ``photo``, ``picture``, ``img``
text        ``text``, ``caption``, ``captions``, ``description``, ``title``, ``comment``, ``sentence``, ``alt``,
            ``alt_text``: a string or a list of them
image id    ``image_id``
text id     ``text_id``
split       ``split``
==========  ============================================================================

Rows of one image are gathered, in the order of the rows. Any further column is a label of the images; one
that differs between the rows of an image becomes, for every image, the tuple of its values. A row that leaves it
empty says nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.data.captions import Captions
from diptych.data.files import FileImages, OnDisk, image_root
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft
from diptych.data.splits import canonical_split

IMAGE_COLUMNS = (
    "image",
    "filepath",
    "file_name",
    "filename",
    "image_path",
    "image_name",
    "image_file",
)
WEAK_IMAGE_COLUMNS = (
    "file",
    "path",
    "photo",
    "picture",
    "img",
)  # names that mean images only beside a text column
TEXT_COLUMNS = (
    "text", "caption", "captions", "description", "title", "comment", "sentence", "alt", "alt_text",
)  # fmt: skip
LISTED = 12  # columns that a message names
READ = {"image_id", "text_id", "split"}
KNOWN_COLUMNS = {*IMAGE_COLUMNS, *WEAK_IMAGE_COLUMNS, *TEXT_COLUMNS, *READ}


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
        return Columns(image, text, tuple(c for c in known if c not in {image, text} | READ))


def in_words(columns: Iterable[str], image: str | None = None, text: str | None = None) -> str:
    """What is wrong with the columns of a table that is not understood, and how to name the right ones."""
    known = list(dict.fromkeys(str(column) for column in columns))
    listed = ", ".join(f"'{column}'" for column in known[:LISTED]) + (", …" if len(known) > LISTED else "")
    for wanted in (image, text):
        if wanted is not None and wanted not in known:
            return f"it has no column '{wanted}', but {listed}"
    return (
        f"its columns are {listed}: say which holds the image and which the text, with --image_column and "
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
    """Labels per image from the values of its rows: one where all that have a value agree, else tuples."""
    filled = [{c: [v for v in row[c] if v is not None] for c in columns} for row in values]
    constant = {c: all(all(v == row[c][0] for v in row[c]) for row in filled) for c in columns}
    return [
        {c: next(iter(row[c]), None) if constant[c] else tuple(row[c]) for c in columns} for row in filled
    ]


def with_files(draft: Draft, beside: Path, images: str | Path | None, problems: Problems) -> Captions:
    """Finish a draft whose keys are image files; absent ones are reported, and dropped unless the sink keeps them."""
    root = image_root(draft.keys, beside, images)
    on_disk = OnDisk()
    there = [row for row, name in enumerate(draft.keys) if root / name in on_disk]
    captions = draft.captions(lambda names: FileImages(root, names))
    if len(there) == len(draft.keys):
        return captions
    present = set(there)
    missing = [str(root / name) for row, name in enumerate(draft.keys) if row not in present]
    hint = f"put the images under {root}, or name their folder with PATH?images=FOLDER"
    problems.missing(missing, len(draft.keys), draft.name, hint)
    return captions if problems.keeps_missing else captions.subset(there)
