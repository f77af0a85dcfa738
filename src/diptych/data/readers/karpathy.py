"""Karpathy's ``dataset_coco.json``, ``dataset_flickr30k.json`` or ``dataset_flickr8k.json`` and the images.

``{"images": [{"filename", "filepath" (COCO), "split", "sentences": [{"raw", "sentid"}], "cocoid" (COCO)}],
"dataset"}``. The path is the JSON file or the folder it lies in. COCO's ``restval`` images count as
``train``. The protocol keeps the first five sentences of an image (some COCO images have six or seven).
COCO images and texts keep their COCO ids, which ECCV Caption and CxC refer to; others are called by their
file name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from diptych.data.captions import Captions, canonical_split
from diptych.data.files import head, json_files, read_json
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Empty, with_files
from diptych.errors import DataError, SettingsError

PROTOCOL_TEXTS = 5
_OPENING = re.compile(
    r"\s*\{.{0,200}?\"images\"\s*:\s*\[\s*\{.*?\"(?:sentids|sentences|filename)\"", re.DOTALL
)
_DATASET = re.compile(r"\s*\{\s*\"dataset\"\s*:\s*\"\w+\"\s*,\s*\"images\"", re.DOTALL)


def matches(path: Path) -> bool:
    """Whether ``path`` is such a JSON file or a folder that holds one."""
    return bool(karpathy_files(path))


def karpathy_files(path: Path) -> list[Path]:
    """Karpathy files at a path: the file itself, or those in the folder."""
    return json_files(path, _is_karpathy)


def _is_karpathy(path: Path) -> bool:
    beginning = head(path)
    return bool(_OPENING.match(beginning) or _DATASET.match(beginning))


def read(
    path: Path,
    *,
    images: str | Path | None = None,
    restval: Literal["train", "drop"] = "train",
    first_five: bool = True,
    empty: Empty = "error",
    problems: Problems | None = None,
) -> Captions:
    """Read a Karpathy file; ``images`` is the folder of the images (for COCO, the one above ``val2014``)."""
    if restval not in ("train", "drop"):
        raise SettingsError(
            f"restval='{restval}' is unknown: say 'train' to train on these images or 'drop'."
        )
    problems = problems or Problems()
    files = karpathy_files(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"{path} holds several Karpathy files ({names}): pass the path of the one to read.")
    draft = Draft(str(path), problems, empty)
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
            problems.error(
                "json", where, f"the image is a {type(entry).__name__}", "an object with a filename"
            )
    return with_files(draft, files[0].parent, images, problems)


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
        raw, sentid = (
            (sentence.get("raw"), sentence.get("sentid")) if isinstance(sentence, dict) else (sentence, None)
        )
        draft.text(row, raw, f"{where}, sentence {place}", sentid)
