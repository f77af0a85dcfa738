"""A Hugging Face data set saved on disk (``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``).

Columns are those of ``Columns``; ``image`` is an ``Image`` feature, decoded on access, or a path. A row is one image
with its texts, or, where there is an ``image_id`` column, one text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diptych.data.captions import UNSPLIT, StoredImage
from diptych.data.decode.opening import open_image
from diptych.data.readers.draft import Columns, Draft, Reader, Row, add_rows, in_words
from diptych.errors import DataError, ImageError, import_extra, reason_of

Table = Any
"""A ``datasets.Dataset``; the library is imported only when one is read."""


class TableImages:
    """Images in the rows of tables: encoded bytes or paths, opened on access."""

    features = False

    def __init__(
        self, tables: Sequence[Table], column: str, places: Sequence[tuple[int, int]], name: str
    ) -> None:
        self.tables, self.column, self.places, self.name = tables, column, places, name

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> StoredImage:
        data, path = self._value(index)
        return open_image(path) if data is None else open_image(data, name=path)

    def content_key(self, index: int) -> str:
        data, path = self._value(index)
        data = Path(path).read_bytes() if data is None else data
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    def _value(self, index: int) -> tuple[bytes | None, str]:
        """Encoded bytes and what to call them, or None and the path of a file."""
        table, row = self.places[index]
        value = self.tables[table][row][self.column]
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (None, value)
        where = f"{self.name}, table {table}, row {row}"
        if data is None and not isinstance(path, str):
            raise ImageError(f"{where}: the image is empty: fill column '{self.column}'.")
        return data, where if data is not None else str(path)


def matches(path: Path) -> bool:
    """Whether ``path`` was written by ``save_to_disk``."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def fill(draft: Draft, path: Path, image: str | None = None, text: str | None = None) -> TableImages:
    """Read a data set saved on disk; needs the extra ``hf-datasets``. ``image`` and ``text`` name its columns."""
    splits, tables = _open(path)
    names = [column for table in tables for column in table.column_names]
    columns = Columns.among(names, image, text)
    if columns is None:
        raise DataError(f"{path} has no image column that is known: {in_words(names, image, text)}.")
    places: dict[str, tuple[int, int]] = {}  # of each image by its key, the first row of it

    def rows() -> Iterator[Row]:
        for number, (split, table) in enumerate(zip(splits, tables, strict=True)):
            values = table.remove_columns([columns.image]).to_dict()
            for row in range(len(table)):
                cell = {column: found[row] for column, found in values.items()}
                image_id = cell.get("image_id")
                key = f"{number}/{row}" if image_id is None else str(image_id)
                places.setdefault(key, (number, row))
                cell |= {columns.image: key} | ({} if split is None else {"split": split})
                yield Row(f"{path}, {split} row {row}", cell, UNSPLIT)

    add_rows(draft, rows(), columns)
    return TableImages(tables, columns.image, [places[key] for key in draft.keys], str(path))


def _check_tables(path: Path) -> None:
    """Raise where a table is damaged: the libraries map it, believe it, and end the process."""
    import pyarrow

    for file in sorted(path.rglob("*.arrow")):
        try:
            with pyarrow.memory_map(str(file)) as source:
                for batch in pyarrow.ipc.open_stream(source):
                    batch.validate(full=True)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            raise DataError(
                f"{file} is damaged ({reason_of(error, 200)}): copy the data set again."
            ) from error


def _open(path: Path) -> tuple[list[str | None], list[Table]]:
    datasets = import_extra("datasets", "hf-datasets", f"reading {path}")
    _check_tables(path)
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged state.json makes the library raise anything at all
        raise DataError(f"{path} cannot be opened ({error}): save it again with save_to_disk.") from error
    by_split: dict[str | None, Table] = dict(data) if isinstance(data, datasets.DatasetDict) else {None: data}
    tables = []
    for table in by_split.values():
        for column, feature in table.features.items():
            if isinstance(feature, datasets.Image):
                table = table.cast_column(column, datasets.Image(decode=False))
        tables.append(table)
    return list(by_split), tables


READER = Reader(matches, fill, empty="drop", files=False)
