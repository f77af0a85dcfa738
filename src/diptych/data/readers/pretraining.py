"""Corpora of pre-training as they are published: questions of VQA 2.0 and GQA, tables of Conceptual Captions and SBU.

==================  ================================================  =============================================
data set            files                                             pictures
==================  ================================================  =============================================
VQA 2.0             ``v2_OpenEnded_mscoco_train2014_questions.json``  ``train2014/COCO_train2014_000000000009.jpg``
GQA                 ``train_balanced_questions.json``                 ``images/2354786.jpg``
Conceptual          ``Train_GCC-training.tsv``, ``Validation_…tsv``:  ``training/ROW_CRC`` or ``training/CRC``,
Captions            a text and an address in each line                where CRC is the CRC-32 of the address
SBU                 ``sbu-captions-all.json``, or                     ``images/NAME``, the last part of the address, or
                    ``SBU_captioned_photo_dataset_{urls,captions}``   ``sbu_images/m_3326_NAME``, as ``download.m`` says
                    ``.txt``
==================  ================================================  =============================================

The split is in the name of a file. A folder as published also holds parts of other files and files without a split
(``SECONDARY``), which are left out beside the others. The label ``text_kind`` of an image with questions is
``question``. Many addresses of the tables are dead: rows without a picture on disk are left out, and counted.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diptych.data.captions import UNSPLIT, split_in_name, split_of_each
from diptych.data.files import IMAGE_FOLDERS, FileImages, OnDisk, head, json_files, read_json, read_lines
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Reader
from diptych.errors import DataError
from diptych.progress import counted
from diptych.storage import expanded

KIND, QUESTION = "text_kind", "question"  # the label that says what the texts of an image are
SBU_JSON, SBU_URLS = "sbu-captions-all.json", "SBU_captioned_photo_dataset_urls.txt"
FOLDERS = (*IMAGE_FOLDERS, "training", "validation", "train", "val", "SBU", "sbu_images")
SBU_HOST = len("http://static.flickr.co")  # what SBU's own download.m cuts off an address
SECONDARY = re.compile(r"_all_|test-?dev|challenge|submission")  # names of question files that repeat others
MOST_TRIES = 10_000  # rows that are looked for until one has a picture
_GQA = re.compile(r'\s*\{\s*"\w+"\s*:\s*\{')


def fill_questions(draft: Draft, path: Path) -> Path:
    """Read questions as the texts of their images, whose folder is the one above ``train2014``, or of GQA's images."""
    every = _question_files(path)
    files = [file for file in every if not SECONDARY.search(file.name)] or every
    if len(files) < len(every):
        draft.notes.append(f"left out {', '.join(file.name for file in every if file not in files)}.")
    for file, split in zip(files, split_of_each(path, files, "files of questions"), strict=True):
        content = read_json(file, draft.problems)
        for where, name, question in _questions(file, content, draft.problems):
            row = draft.image(name, split or UNSPLIT, where, Path(name).stem, {KIND: QUESTION})
            draft.text(row, question, where)
    draft.notes.append(f"the {counted(len(draft.texts), 'text')} of {path} are questions.")
    return files[0].parent


def _question_files(path: Path) -> list[Path]:
    return json_files(path, _has_questions, "*questions*.json")


def _has_questions(file: Path) -> bool:
    start = head(file)
    if '"task_type"' in start or '"question_id"' in start:
        return '"questions"' in start
    return '"imageId"' in start and _GQA.match(start) is not None


def _questions(file: Path, content: Any, problems: Problems) -> Iterator[tuple[str, str, Any]]:
    """Where each question stands, the name of its image, and the question."""
    if not isinstance(content, dict):
        return
    subset = content.get("data_subtype")
    if isinstance(subset, str):
        entries = content.get("questions")
        rows = list(enumerate(entries)) if isinstance(entries, list) else []
        subset = subset.replace("test-dev", "test")  # the pictures of both
    else:
        rows = list(content.items())
    for number, entry in rows:
        where = f"{file}, question {number}"
        image = entry.get("image_id" if subset else "imageId") if isinstance(entry, dict) else None
        if image is None or not str(image).isalnum():
            problems.error("json", where, "it names no image", "a question with its image, as published")
            continue
        name = f"{subset}/COCO_{subset}_{int(image):012d}.jpg" if subset else f"{image}.jpg"
        yield where, name, entry.get("question")


def fill_web_table(draft: Draft, path: Path) -> FileImages:
    """Read texts whose pictures were downloaded."""
    files, on_disk = _tables(path), OnDisk()
    splits = split_of_each(path, files, "tables")
    rows = 0
    for file, split in zip(files, splits, strict=True):
        entries = _entries(file, draft.problems)
        rows += len(entries)
        place, form = _place(entries, file.parent, draft.folder, split, on_disk)
        for number, (text, url) in enumerate(entries):
            name, where = _names(number, url)[form], f"{file}:{number + 1}"
            if name and place / name in on_disk:
                row = draft.image(str(place / name), split or UNSPLIT, where, f"{place.name}/{name}")
                draft.text(row, text, where)
    if rows and not draft.keys:
        raise DataError(
            f"{path}: none of the {rows:,} pictures is on disk: download them, and name their folder with "
            "PATH?images=FOLDER."
        )
    if len(draft.texts) < rows:
        draft.notes.append(f"{path}: {rows - len(draft.texts):,} of {rows:,} rows lack a picture or a text.")
    return FileImages(Path(), draft.keys)


def _tables(path: Path) -> list[Path]:
    if path.is_dir():
        inside = sorted((*path.glob("*.tsv"), *path.glob("*.json"), *path.glob("SBU_*.txt")))
        found = [file for file in inside if _tables(file)]
        return found or (_tables(path / "dataset") if (path / "dataset").is_dir() else [])
    if not path.is_file():
        return []
    if path.suffix.lower() == ".tsv":
        cells = head(path).split("\n", 1)[0].rstrip("\r").split("\t")
        return [path] if len(cells) == 2 and cells[1].startswith(("http://", "https://")) else []
    return [path] if path.name in (SBU_JSON, SBU_URLS) else []


def _entries(file: Path, problems: Problems) -> list[tuple[str, str]]:
    if file.suffix.lower() == ".tsv":
        cells = [(line or "").split("\t") for line in read_lines(file, problems)]
        return [(row[0], row[1] if len(row) > 1 else "") for row in cells]
    if file.name == SBU_JSON:
        content = read_json(file, problems)
        content = content if isinstance(content, dict) else {}
        texts, urls = content.get("captions", ()), content.get("image_urls", ())
    else:
        other = file.with_name(file.name.replace("urls", "captions"))
        texts, urls = read_lines(other, problems) if other.is_file() else (), read_lines(file, problems)
    if len(texts) != len(urls):
        message = f"{len(texts):,} texts for {len(urls):,} addresses"
        problems.error("counts", file, message, "one text per address")
    return [(str(text or ""), str(url or "").strip()) for text, url in zip(texts, urls, strict=False)]


def _names(row: int, url: str) -> tuple[str, str, str, str]:
    """What programs that download tables call the picture of a row."""
    crc = zlib.crc32(url.encode("utf-8"))
    last = url.rsplit("/", 1)[-1].partition("?")[0]
    return f"{row}_{crc}", str(crc), last, url[SBU_HOST:].replace("/", "_")


def _place(
    entries: Sequence[tuple[str, str]],
    beside: Path,
    image_folder: str | Path | None,
    split: str | None,
    on_disk: OnDisk,
) -> tuple[Path, int]:
    """The folder of a table's pictures, none of another split, and which of ``_names`` they have."""
    bases = [expanded(image_folder)] if image_folder is not None else [beside, beside.parent]
    folders = [folder for folder in FOLDERS if split_in_name(folder) in (None, split)]
    places = [base / folder for base in bases for folder in folders]
    for number, (_, url) in enumerate(entries[:MOST_TRIES]):
        for form, name in enumerate(_names(number, url)):
            for place in places:
                if name and place / name in on_disk:
                    return place, form
    return beside, 0


QUESTIONS = Reader(_question_files, fill_questions, empty="drop")
WEB_TABLES = Reader(_tables, fill_web_table, empty="drop")
