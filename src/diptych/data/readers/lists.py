"""JSON lists as ALBEF, X-VLM and CUSA use them: one file per split, one object per text or per image.

``[{"image": "a.jpg", "caption": "..." or ["...", ...], "image_id": ...}]`` in ``flickr30k_train.json``,
``coco_val.json`` or ``new_test.json`` (CUSA says ``image_path``). The path is the folder of these files or
one of them; image names are relative to ``images``. Ids that are missing in some file or numbered from 0 in
each split do not identify images: the image names then serve as ids. ``{"a.jpg": "..." or ["...", ...]}`` is read too.
"""

from __future__ import annotations

import re
from pathlib import Path

from diptych.data.captions import UNSPLIT, Captions, split_of_each
from diptych.data.decode.extra_formats import is_image
from diptych.data.files import head, json_files, read_json
from diptych.data.problems import Problems
from diptych.data.readers.draft import IMAGE_COLUMNS, Columns, Draft, Empty, Row, add_rows, with_files

_OPENING = re.compile(r"\s*\[\s*\{.*?\"(?:" + "|".join(IMAGE_COLUMNS) + r")\"\s*:", re.DOTALL)
_BY_NAME = re.compile(r"\s*\{\s*\"(?P<name>(?:[^\"\\]|\\.)+)\"\s*:\s*[\"\[]")


def matches(path: Path) -> bool:
    """Whether ``path`` is such a list or a folder that holds some."""
    return bool(lists(path))


def lists(path: Path) -> list[Path]:
    """The JSON lists at a path: the file itself, or those in the folder."""
    return json_files(path, lambda file: _is_list(head(file)))


def _is_list(start: str) -> bool:
    """Whether a file that begins so holds objects with an image, or texts by the names of images."""
    by_name = _BY_NAME.match(start)
    return _OPENING.match(start) is not None or (by_name is not None and is_image(by_name["name"]))


def read(
    path: Path,
    *,
    images: str | Path | None = None,
    empty: Empty = "drop",
    problems: Problems | None = None,
) -> Captions:
    """Read JSON lists; ``images`` is the folder of their images, found beside them if not given."""
    problems = problems or Problems()
    files = lists(path)
    splits = split_of_each(path, files, "lists")
    rows: list[Row] = []
    for file, split in zip(files, splits, strict=True):
        entries = read_json(file, problems)
        if isinstance(entries, dict):
            entries = [{"image": name, "caption": texts} for name, texts in entries.items()]
        for number, entry in enumerate(entries or []):
            where = f"{file}, entry {number}"
            if isinstance(entry, dict):
                rows.append(Row(where, entry, split or UNSPLIT))
            else:
                problems.error("json", where, f"the entry is a {type(entry).__name__}", "a list of objects")
    draft = Draft(str(path), problems, empty, strict_ids=False)
    columns = Columns.among(column for row in rows for column in row.values)
    if columns is not None:
        add_rows(draft, rows, columns)
    return with_files(draft, files[0].parent, images, problems)
