"""Vectors in Parquet: one row per image or text, an index ``Item`` with its vector.

=============  =======================================================================================
column         what it holds (never null)
=============  =======================================================================================
``id``         the id of the item in an index; texts are called ``IMAGE#text0``, ``IMAGE#text1``, ...
``kind``       ``image`` or ``text``; all images come first
``image_id``   of a text, the id of its image; empty for an image
``path``       the file below the root of the collection, empty where an image has none
``text``       the text, or the texts of an image, one a line
``metadata``   the columns that filters read, a JSON object
``content``    a string that changes when the picture, its texts or its columns do
``vector``     ``fixed_size_list<float32>[dim]``
``thumbnail``  a small JPEG of an image that has no file of its own, else empty
=============  =======================================================================================
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from diptych.errors import DataError, import_extra, reason_of
from diptych.index.protocol import KINDS, Item, Vectors, record
from diptych.storage import expanded, new_file, parse_json
from diptych.vectors.manifest import FILES, Manifest, Receipt, read_manifest, read_receipt, shard_file

GROUP = 4096  # rows of a row group
COLUMNS = ("id", "kind", "image_id", "path", "text", "metadata", "content", "thumbnail", "vector")


def parquet() -> tuple[Any, Any]:
    """The modules ``pyarrow`` and ``pyarrow.parquet``."""
    why = "reading and writing Parquet files"
    return import_extra("pyarrow", "parquet", why), import_extra("pyarrow.parquet", "parquet", why)


@contextmanager
def shard_writer(target: Path, dim: int) -> Iterator[ShardWriter]:
    """A writer of a file that gets its name when the ``with`` block ends without an error."""
    with new_file(target) as handle:
        writer = ShardWriter(handle, dim)
        try:
            yield writer
            writer.close()
        except BaseException:
            writer.abandon()
            raise


def _types(dim: int) -> dict[str, Any]:
    """The Arrow type of each column, in their order."""
    arrow, _ = parquet()
    vector = arrow.list_(arrow.field("element", arrow.float32(), nullable=False), dim)
    return dict.fromkeys(COLUMNS, arrow.string()) | {"thumbnail": arrow.binary(), "vector": vector}


class ShardWriter:
    """Writes the rows of one shard into an open file, a row group at a time."""

    def __init__(self, handle: BinaryIO, dim: int) -> None:
        arrow, module = parquet()
        self._arrow, self._sink, self._waiting = arrow, _Hashing(handle), list[Any]()
        self.schema = arrow.schema([arrow.field(n, kind, nullable=False) for n, kind in _types(dim).items()])
        squeezed = {name: "zstd" for name in COLUMNS if name not in ("vector", "thumbnail")}
        self._writer = module.ParquetWriter(
            self._sink,
            self.schema,
            compression={**squeezed, "vector.list.element": "none", "thumbnail": "none"},
            use_dictionary=["kind", "metadata"],
            write_page_checksum=True,
            write_statistics=False,
        )

    @property
    def bytes(self) -> int:
        return self._sink.bytes

    @property
    def sha256(self) -> str:
        """The checksum of what was written."""
        return self._sink.digest.hexdigest()

    def write(self, items: Sequence[Item], vectors: Vectors) -> None:
        if not items:
            return
        names = ("id", "kind", "path", "text", "image_id", "metadata", "content")  # as ``record`` orders them
        columns = dict(zip(names, zip(*(record(item)[:-1] for item in items), strict=True), strict=True))
        thumbnails = [item.thumbnail or b"" for item in items]
        flat = self._arrow.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
        rows = self._arrow.FixedSizeListArray.from_arrays(flat, type=self.schema.field("vector").type)
        self._waiting.append(
            self._arrow.table(
                [*(columns[name] for name in COLUMNS[:-2]), thumbnails, rows], schema=self.schema
            )
        )
        if sum(table.num_rows for table in self._waiting) >= GROUP:
            self._flush(whole=False)

    def close(self) -> None:
        """Write what waits, and the end of the file."""
        self._flush(whole=True)
        self._writer.close()

    def abandon(self) -> None:
        """Close the writer without its file: pyarrow writes the end of a file even when it forgets one."""
        self._sink.handle = None
        with suppress(Exception):  # the one that counts is on its way already
            self._writer.close()

    def _flush(self, whole: bool) -> None:
        """Write full row groups, and with ``whole`` the rest."""
        if not self._waiting:
            return
        table = self._arrow.concat_tables(self._waiting)
        keep = 0 if whole else table.num_rows % GROUP
        if table.num_rows > keep:
            self._writer.write_table(
                table.slice(0, table.num_rows - keep).combine_chunks(), row_group_size=GROUP
            )
        self._waiting = [table.slice(table.num_rows - keep)] if keep else []


class _Hashing:
    """A file that is written from the beginning to the end, with the checksum of what was."""

    closed = False

    def __init__(self, handle: BinaryIO) -> None:
        self.handle: BinaryIO | None = handle
        self.digest, self.bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self.handle is not None:
            self.handle.write(view)
        self.digest.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        """Nothing: the file is synced when it is whole."""

    def close(self) -> None:
        """Nothing: the file is closed by its owner."""


@dataclass(frozen=True)
class Shard:
    """A whole shard: its receipt and its file."""

    receipt: Receipt
    path: Path
    dim: int

    @property
    def name(self) -> str:
        return self.receipt.name

    def batches(self, rows: int = GROUP) -> Iterator[tuple[list[Item], Vectors]]:
        """Items with their vectors, images first; at most ``rows`` at a time are in memory."""
        for table in self.tables(COLUMNS, rows):
            columns = self.values_of(table)
            rows_of = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
            items = [
                Item(
                    **row
                    | {"metadata": self.metadata_of(row["metadata"]), "thumbnail": row["thumbnail"] or None}
                )
                for row in rows_of
            ]
            yield items, self.vectors_of(table)

    def tables(self, columns: Sequence[str], rows: int = GROUP) -> Iterator[Any]:
        """Some columns as Arrow record batches of at most ``rows`` rows."""
        arrow, module = parquet()
        self._check_size()
        count = 0
        try:
            handle = os.fdopen(FILES.open(self.path), "rb")
            with handle, module.ParquetFile(handle, page_checksum_verification=True) as file:
                self._check_schema(file.schema_arrow, columns)
                for batch in file.iter_batches(batch_size=rows, columns=list(columns)):
                    count += batch.num_rows
                    yield batch
        except (arrow.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
            raise DataError(f"{self.path} is damaged ({reason_of(error, 200)}): {self._advice()}") from error
        if count != self.receipt.rows:
            raise DataError(
                f"{self.path} has {count:,} rows, its receipt says {self.receipt.rows:,}: {self._advice()}"
            )

    def vectors_of(self, table: Any) -> Vectors:
        """The vectors (rows, dim) of a record batch that has them; read-only."""
        column = table.column("vector")
        values: Vectors = column.flatten().to_numpy(zero_copy_only=True).reshape(-1, self.dim)
        return values

    def values_of(self, table: Any) -> dict[str, list[Any]]:
        """The columns of a record batch but its vectors, as Python values."""
        try:
            found: dict[str, list[Any]] = table.drop_columns(["vector"]).to_pydict()
        except (ValueError, OverflowError) as error:  # bytes that are not text
            raise DataError(f"{self.path} is damaged ({reason_of(error, 200)}): {self._advice()}") from error
        if any(kind not in KINDS for kind in found.get("kind", ())) or any(
            None in one for one in found.values()
        ):
            raise DataError(f"{self.path} has a row that is neither image nor text: {self._advice()}")
        return found

    def metadata_of(self, text: str) -> dict[str, Any]:
        try:
            found = parse_json(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise DataError(
                f"{self.path} has metadata that are not JSON object ({text[:40]!r}): {self._advice()}"
            )
        return found

    def _check_schema(self, schema: Any, columns: Sequence[str]) -> None:
        for name, kind in _types(self.dim).items():
            if name in columns and (name not in schema.names or schema.field(name).type != kind):
                found = schema.field(name).type if name in schema.names else "missing"
                raise DataError(f"{self.path}: column '{name}' is {found}, not {kind}: {self._advice()}")

    def check(self) -> None:
        """Compare the file with the size and checksum of its receipt."""
        self._check_size()
        with os.fdopen(FILES.open(self.path), "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256")
        if digest.hexdigest() != self.receipt.sha256:
            raise DataError(f"{self.path} is not the file that was written: {self._advice()}")

    def _check_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise DataError(f"{self.path} is missing ({error.strerror}): {self._advice()}") from error
        if size != self.receipt.bytes:
            raise DataError(
                f"{self.path} is half-written, {size:,} of {self.receipt.bytes:,} bytes: {self._advice()}"
            )

    def _advice(self) -> str:
        return f"copy it again, or remove {self.path.with_suffix('.json').name} and embed again."


@dataclass(frozen=True)
class VectorFolder:
    """A folder of vectors: its manifest, the shards that are whole, and the names of those that are not yet."""

    path: Path
    manifest: Manifest
    shards: tuple[Shard, ...]
    missing: tuple[str, ...]

    def check_complete(self) -> None:
        """Raise unless every shard is whole."""
        if self.missing:
            raise DataError(
                f"{self.path} is not finished, {len(self.missing)} of {len(self.manifest.shards)} shards are missing "
                f"(the first: {self.missing[0]}): run the same diptych embed again, it goes on where it was."
            )


def open_vectors(folder: str | Path) -> VectorFolder:
    """The folder that ``diptych embed`` wrote, finished or not; no vector is read."""
    place = expanded(folder)
    manifest = read_manifest(place)
    shards, missing = [], []
    for name in manifest.shards:
        receipt = manifest.receipts.get(name) if manifest.complete else read_receipt(place, name)
        if receipt is None:
            missing.append(name)
        else:
            shards.append(Shard(receipt, shard_file(place, name), manifest.dim))
    return VectorFolder(place, manifest, tuple(shards), tuple(missing))
