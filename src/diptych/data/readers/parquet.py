"""Parquet tables with an image column of paths: one file, a folder of files, or a pattern that names some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diptych.data.captions import UNSPLIT, split_in_name
from diptych.data.files import image_root, named_files
from diptych.data.problems import Problems
from diptych.data.readers.draft import Columns, Draft, Reader, Row, add_rows
from diptych.errors import DataError, MissingExtra, import_extra, reason_of

SUFFIX = ".parquet"
TEXTS = ("string", "large_string", "dictionary<values=string")  # types of columns
ROWS = 10_000  # read at a time


def matches(path: Path) -> bool:
    """Whether ``path`` is a Parquet file, a pattern that names some, or a folder of them with an image column."""
    files = tables(path)
    if not path.is_dir():
        return bool(files)
    return any(_may_name_images(file) for file in files)  # a folder of photos may hold any table


def _may_name_images(file: Path) -> bool:
    try:
        return Columns.among(_columns(file, Problems())) is not None
    except (DataError, MissingExtra):  # for the reader to say
        return True


def tables(path: Path) -> list[Path]:
    """The Parquet files at a path, sorted; a pattern also names those that are missing, for the reader to report."""
    return named_files(path, (SUFFIX,))


def fill(draft: Draft, path: Path) -> Path:
    """Read Parquet tables."""
    files = tables(path)
    names = [name for file in files for name in _columns(file, draft.problems)]
    columns = Columns.among(names)
    if files and names and columns is None:
        known = ", ".join(dict.fromkeys(names))
        raise DataError(f"{path} has no image column: call one of its columns ({known}) 'image'.")
    if columns is not None:
        add_rows(draft, (row for file in files for row in _rows(file)), columns)
    if not draft.keys:
        draft.problems.error("empty", path, "the table has no rows", "write one row per image or text")
    return files[0].parent


def image_folder(files: Sequence[Path]) -> Path:
    """The folder that image names are relative to, found with the names in the first table that is there."""
    for file in files:
        columns = Columns.among(_columns(file, Problems())) if file.exists() else None
        if columns is not None:
            names = [str(row.values[columns.image]) for row, _ in zip(_rows(file), range(5), strict=False)]
            return image_root(names, file.parent, None)
    return files[0].parent


def _columns(file: Path, problems: Problems) -> list[str]:
    """The names of the columns; what is wrong with the file is reported."""
    if not file.exists():
        problems.error("missing file", file, "the table does not exist", "copy it, or shorten the pattern")
        return []
    try:
        with _open(file) as table:
            schema = table.schema_arrow
    except DataError as error:
        problems.raised("parquet", file, error)
        return []
    columns = Columns.among(schema.names)
    if columns is not None and not str(schema.field(columns.image).type).startswith(TEXTS):
        raise DataError(
            f"{file}: column '{columns.image}' holds {schema.field(columns.image).type}, not paths: name the files "
            "there, or pack the pictures into tars."
        )
    return list(schema.names)


def _rows(file: Path) -> Iterator[Row]:
    split = split_in_name(file.stem) or UNSPLIT
    number = 0
    with _open(file) as table:
        try:
            for batch in table.iter_batches(batch_size=ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{file}, row {number}", values, split)
        except (OSError, ValueError) as error:  # of pyarrow: its own errors are one of the two
            raise DataError(
                f"{file} is damaged after row {number} ({reason_of(error, 200)}): copy it."
            ) from error


def _open(file: Path) -> Any:
    pyarrow = import_extra("pyarrow", "parquet", f"reading {file}")
    parquet = import_extra("pyarrow.parquet", "parquet", f"reading {file}")
    try:
        return parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # the last: a column name not UTF-8
        raise DataError(
            f"{file} is not a whole Parquet file ({reason_of(error, 200)}): copy it again."
        ) from error


READER = Reader(matches, fill)
