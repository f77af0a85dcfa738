"""An image folder with a CSV, TSV or JSON-lines manifest beside it, whose columns ``Columns`` understands."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diptych.data.captions import UNSPLIT, split_of_each
from diptych.data.files import head, read_lines, read_object
from diptych.data.problems import Problems
from diptych.data.readers.draft import KNOWN_COLUMNS, Columns, Draft, Reader, Row, add_rows, in_words
from diptych.errors import DataError
from diptych.storage import parse_json

DELIMITERS = ("\t", ",", ";", "|")
TABLES = (".csv", ".tsv", ".txt")
LONGEST_FIELD = 1 << 24  # characters; a longer one means a quote was never closed


def fill(draft: Draft, path: Path, image: str | None = None, text: str | None = None) -> Path:
    """Read a manifest; ``image`` and ``text`` name columns that are called otherwise than ``Columns`` knows."""
    files = manifests(path, image, text)
    if not files:
        raise DataError(not_understood(path, image, text))
    splits = split_of_each(path, files, "manifests")
    problems = draft.problems
    rows = [
        row
        for file, split in zip(files, splits, strict=True)
        for row in (
            json_rows(file, split or UNSPLIT, problems)
            if file.suffix.lower() == ".jsonl"
            else table_rows(file, split or UNSPLIT, problems, image, text)
        )
    ]
    columns = Columns.among((column for row in rows for column in row.values), image, text)
    if columns is not None:
        add_rows(draft, rows, columns)
        if columns.text is None:
            known = in_words(column for row in rows[:1] for column in row.values)
            draft.notes.append(f"{path} has no column of texts: {known}.")
            problems.warn("table", path, "it has no column of texts", known)
    if not draft.keys:
        problems.error("empty", path, "it has a header but no rows", "write one row per image or text")
    return files[0].parent


def manifests(path: Path, image: str | None = None, text: str | None = None) -> list[Path]:
    """The manifests at a path: the file itself, or those in the folder; with the columns that are given, if any."""
    return [file for file in tables(path) if _is_manifest(file, image, text)]


def tables(path: Path) -> list[Path]:
    """The tables at a path, understood or not."""
    if path.is_file():
        return [path] if path.suffix.lower() in (*TABLES, ".jsonl") else []
    if not path.is_dir():
        return []
    files = [f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")]
    # a folder may hold one .txt per image, so only a file of that name is looked into
    tables = [f for f in files if f.suffix.lower() != ".txt" or "caption" in f.name.lower()]
    return sorted(f for f in tables if f.suffix.lower() in (*TABLES, ".jsonl"))


def not_understood(path: Path, image: str | None = None, text: str | None = None) -> str:
    """One sentence about a table, or the first of a folder, whose columns are not understood; empty without one."""
    for file in tables(path):
        first = head(file).split("\n", 1)[0]
        if file.suffix.lower() == ".jsonl":
            try:
                row = parse_json(first)
            except json.JSONDecodeError:
                continue
            names = list(row) if isinstance(row, dict) else []
        else:
            names = _split(first, max(DELIMITERS, key=first.count))
        if names and Columns.among(names, image, text) is None:
            return f"{file} is a table that is not understood: {in_words(names, image, text)}."
    return ""


def _is_manifest(path: Path, image: str | None, text: str | None) -> bool:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        first = head(path).split("\n", 1)[0]
        try:
            row = parse_json(first)
        except json.JSONDecodeError:
            # a malformed file is still a manifest if it speaks of images: reading it says what is wrong
            return first.lstrip().startswith("{") and f'"{image or "image"}' in first
        return isinstance(row, dict) and Columns.among(row, image, text) is not None
    return sniff(head(path).split("\n", 1)[0], image, text) is not None


def sniff(header: str, image: str | None = None, text: str | None = None) -> str | None:
    """The delimiter that gives a header an image column, or None."""
    for delimiter in DELIMITERS:
        names = _split(header, delimiter)
        if len(names) > 1 and Columns.among(names, image, text) is not None:
            return delimiter
    return DELIMITERS[0] if Columns.among(_names([header]), image, text) is not None else None


def _split(header: str, delimiter: str) -> list[str]:
    try:
        return _names(next(csv.reader([header.rstrip("\r\n")], delimiter=delimiter), []))
    except csv.Error:
        return []


def _names(cells: list[str]) -> list[str]:
    """Column names; those with a meaning are found in any case (``Image``, ``CAPTION``)."""
    names = [cell.strip() for cell in cells]
    return [name.lower() if name.lower() in KNOWN_COLUMNS else name for name in names]


def table_rows(
    path: Path, split: str, problems: Problems, image: str | None = None, text: str | None = None
) -> Iterator[Row]:
    """Rows of a CSV or TSV file, with the line each begins on; columns of numbers become numbers, empty labels None."""
    lines = read_lines(path, problems)
    if not lines or lines[0] is None:
        return
    delimiter = sniff(lines[0], image, text) or ","
    names: list[str] = []
    rows: list[tuple[int, list[Any]]] = []
    for line, cells in _records(path, lines, delimiter, problems):
        if not names:
            names = _names(cells)
        elif len(cells) != len(names):
            expected = f"the header names {len(names)}; quote a field that holds the delimiter"
            problems.error("csv", f"{path}:{line}", f"the row has {len(cells)} fields", expected)
        else:
            rows.append((line, cells))
    columns = Columns.among(names, image, text)
    for column in columns.further if columns else ():
        place = names.index(column)
        _to_numbers([cells for _, cells in rows], place)
        for _, values in rows:
            values[place] = None if values[place] == "" else values[place]
    for line, cells in rows:
        yield Row(f"{path}:{line}", dict(zip(names, cells, strict=True)), split)


def _records(
    path: Path, lines: list[str | None], delimiter: str, problems: Problems
) -> Iterator[tuple[int, list[str]]]:
    """Records with the line each begins on; after a fault, the next line begins again."""
    csv.field_size_limit(LONGEST_FIELD)
    begin = 0
    while begin < len(lines):
        rest = (f"{line or ''}\n" for line in itertools.islice(lines, begin, None))
        reader = csv.reader(rest, delimiter=delimiter, skipinitialspace=True, strict=True)
        start = begin
        try:
            for cells in reader:
                if cells and lines[begin] is not None:
                    yield begin + 1, cells
                begin = start + reader.line_num
        except csv.Error as error:
            expected = "close the quotes, and double those inside a quoted field"
            problems.error("csv", f"{path}:{begin + 1}", f"not CSV ({error})", expected)
            begin += 1


def _to_numbers(rows: list[list[Any]], place: int) -> None:
    """Turn one column into int or float, in place, if every filled cell is one; ``007`` stays a string."""
    for kind in (int, float):
        try:
            values = [kind(cells[place]) if cells[place].strip() else None for cells in rows]
        except ValueError:
            continue
        if kind is float or all(
            v is None or str(v) == c[place].strip() for v, c in zip(values, rows, strict=True)
        ):
            for cells, value in zip(rows, values, strict=True):
                cells[place] = value
        return


def json_rows(path: Path, split: str, problems: Problems) -> Iterator[Row]:
    """Rows of a JSON-lines file."""
    for number, line in enumerate(read_lines(path, problems), 1):
        if line is None or not line.strip():
            continue
        where = f"{path}:{number}"
        values = read_object(line, where, problems, "an object")
        if values is not None:
            yield Row(where, values, split)


READER = Reader(manifests, fill, empty="drop")
