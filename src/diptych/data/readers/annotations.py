"""Annotations in JSON beside the images: Karpathy's files, and lists of images and texts (ALBEF, X-VLM, CUSA).

COCO's images and texts keep their COCO ids, which ECCV Caption and CxC refer to. Ids of lists that are missing in some
file, or numbered from 0 in each split, do not identify images: the image names then serve as ids.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from diptych.data.captions import UNSPLIT, canonical_split, split_of_each
from diptych.data.decode.extra_formats import is_image
from diptych.data.files import head, json_files, read_json
from diptych.data.readers.draft import IMAGE_COLUMNS, Columns, Draft, Reader, Row, add_rows
from diptych.errors import DataError, one_of

PROTOCOL_TEXTS = 5
RestVal = Literal["train", "drop"]
_KARPATHY = re.compile(
    r"\s*\{.{0,200}?\"images\"\s*:\s*\[\s*\{.*?\"(?:sentids|sentences|filename)\"", re.DOTALL
)
_DATASET = re.compile(r"\s*\{\s*\"dataset\"\s*:\s*\"\w+\"\s*,\s*\"images\"", re.DOTALL)
_ROWS = re.compile(r"\s*\[\s*\{.*?\"(?:" + "|".join(IMAGE_COLUMNS) + r")\"\s*:", re.DOTALL)
_BY_NAME = re.compile(r"\s*\{\s*\"(?P<name>(?:[^\"\\]|\\.)+)\"\s*:\s*[\"\[]")


def karpathy_files(path: Path) -> list[Path]:
    """Karpathy files at a path: the file itself, or those in the folder."""
    return json_files(path, lambda file: bool(_KARPATHY.match(head(file)) or _DATASET.match(head(file))))


def fill_karpathy(draft: Draft, path: Path, restval: RestVal = "train", first_five: bool = True) -> Path:
    """Read a Karpathy file; the folder of COCO's images is the one above ``val2014``."""
    one_of(restval, "restval", RestVal)
    files = karpathy_files(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"{path} holds several Karpathy files ({names}): pass the path of the one to read.")
    problems = draft.problems
    data = read_json(files[0], problems)
    entries = data.get("images") if isinstance(data, dict) else None
    if entries is not None and not isinstance(entries, list):
        problems.error("json", files[0], f"'images' is a {type(entries).__name__}", "a list of images")
        entries = None
    for number, entry in enumerate(entries or []):
        where = f"{files[0]}, image {number}"
        if isinstance(entry, dict):
            _add(draft, entry, where, restval, first_five)
        else:
            problems.error("json", where, f"the image is a {type(entry).__name__}", "an object")
    return files[0].parent


def _add(draft: Draft, entry: dict[str, Any], where: str, restval: str, first_five: bool) -> None:
    absent = [field for field in ("filename", "split", "sentences") if not entry.get(field)]
    if absent:
        expected = "every image has filename, split and sentences"
        draft.problems.error("json", where, f"no {' and no '.join(absent)}", expected)
        return
    wrong = [field for field in ("filename", "filepath") if not isinstance(entry.get(field, ""), str)]
    if wrong or not isinstance(entry["sentences"], list):
        what = f"{wrong[0]} is a {type(entry[wrong[0]]).__name__}" if wrong else "sentences is not a list"
        draft.problems.error("json", where, what, "names are strings, sentences a list")
        return
    split = canonical_split(str(entry["split"]))
    if split == "restval":
        if restval == "drop":
            return
        split = "train"
    name = "/".join(filter(None, (entry.get("filepath"), entry["filename"])))
    row = draft.image(name, split, where, entry.get("cocoid", entry["filename"]))
    sentences = entry["sentences"][:PROTOCOL_TEXTS] if first_five else entry["sentences"]
    for place, sentence in enumerate(sentences):
        said = sentence if isinstance(sentence, dict) else {"raw": sentence}
        draft.text(row, said.get("raw"), f"{where}, sentence {place}", said.get("sentid"))


def lists(path: Path) -> list[Path]:
    """The JSON lists at a path: the file itself, or those in the folder."""
    return json_files(path, lambda file: _is_list(head(file)))


def _is_list(start: str) -> bool:
    """Whether a file that begins so holds objects with an image, or texts by the names of images."""
    by_name = _BY_NAME.match(start)
    return _ROWS.match(start) is not None or (by_name is not None and is_image(by_name["name"]))


def fill_lists(draft: Draft, path: Path) -> Path:
    """Read JSON lists."""
    draft.strict_ids = False
    files = lists(path)
    splits = split_of_each(path, files, "lists")
    rows: list[Row] = []
    for file, split in zip(files, splits, strict=True):
        entries = read_json(file, draft.problems)
        if isinstance(entries, dict):
            entries = [{"image": name, "caption": texts} for name, texts in entries.items()]
        for number, entry in enumerate(entries or []):
            where = f"{file}, entry {number}"
            if isinstance(entry, dict):
                rows.append(Row(where, entry, split or UNSPLIT))
            else:
                message = f"the entry is a {type(entry).__name__}"
                draft.problems.error("json", where, message, "a list of objects")
    columns = Columns.among(column for row in rows for column in row.values)
    if columns is not None:
        add_rows(draft, rows, columns)
    return files[0].parent


KARPATHY, LISTS = Reader(karpathy_files, fill_karpathy), Reader(lists, fill_lists, empty="drop")
