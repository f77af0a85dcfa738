"""Vectors of other programs in, ours out: .npy and Parquet in the layout of clip-retrieval, and faiss.

clip-retrieval writes ``img_emb/img_emb_0.npy``, … and ``metadata/metadata_0.parquet``, … with a row for each vector and
the columns ``image_path`` and ``caption``.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import check_rows, read_array, unit_rows
from diptych.data.decode.opening import open_image
from diptych.data.files import FileImages
from diptych.errors import DataError, DiptychError, import_extra
from diptych.index.base import Index
from diptych.index.engines.opening import empty_index, index_exists, open_index
from diptych.index.ingest.photos import MARGIN
from diptych.index.protocol import Item, Kind, Vectors
from diptych.model.protocol import Model, picture_side
from diptych.progress import counted
from diptych.runtime.folder import REFUSED, REFUSED_HALF, SAID
from diptych.storage import expanded, storing, write_text
from diptych.vectors.files import parquet

PATHS = ("image_path", "path", "filepath", "file", "filename", "image", "url")
TEXTS = ("caption", "text", "title", "description")
VECTORS = ("embedding", "vector", "image_embedding", "clip_emb")
ROWS = 10_000  # written together
CHECKED = 8  # pictures whose vectors are compared with the model's own
SCALARS = (str, int, float, bool)


@dataclass(slots=True)
class Imported:
    """What ``import_embeddings`` did, with sentences for the user."""

    images: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SourceShard:
    """Vectors (N, D) and what is known of each; both are read when asked for."""

    vectors: Path
    table: Path | None = None

    def load(self) -> tuple[NDArray[Any], list[dict[str, Any]]]:
        """The vectors, mapped where they are an .npy, and a row of metadata for each."""
        if self.vectors.suffix == ".npy":
            rows = read_table(self.table) if self.table is not None else []
            found = read_array(self.vectors)
        else:
            rows = read_table(self.vectors)
            column = _column(rows[0] if rows else {}, VECTORS, self.vectors, "vectors")
            found = np.asarray([row.pop(column) for row in rows], np.float32)
        if found.ndim != 2:
            raise DataError(f"{self.vectors} has the shape {found.shape}: vectors are (rows, numbers).")
        if len(rows) != len(found):
            raise DataError(
                f"{self.vectors} has {len(found)} vectors and {self.table} {len(rows)} rows: give one for each vector."
            )
        return found, rows


def import_embeddings(
    source: Path,
    place: str | Path,
    model: Model,
    *,
    model_name: str = "",
    paths: Path | None = None,
    root: Path | None = None,
    name: str = "",
    check: bool = True,
) -> Imported:
    """Put vectors that ``model`` made elsewhere into an index; nothing is written unless all of them are sound.

    ``root`` is the folder that relative paths start from. With ``check``, pictures that can be read are encoded again,
    and vectors that are not the model's are refused.
    """
    shards = find_shards(source, paths)
    folder = (root or _root(shards)).resolve()
    done = Imported()
    seen: set[str] = set()
    half = getattr(model, "precision", "no") != "no"
    readable: list[tuple[Path, Vectors]] = []
    for shard in shards:
        vectors, rows = shard.load()
        check_vectors(vectors, model.dim, shard.vectors)
        for row, vector in zip(rows, vectors, strict=True):
            item = _item(row, folder, shard, hashed=False)
            if item.id in seen:
                raise DataError(f"{shard.table or shard.vectors} has two vectors of {item.id}: keep one.")
            seen.add(item.id)
            if check and len(readable) < CHECKED and item.path and (folder / item.path).is_file():
                readable.append((folder / item.path, np.array(vector, np.float32)))
                half = half or vectors.dtype == np.float16
    if not seen:
        raise DataError(f"{source} holds no vectors: give a folder that has some.")
    if check:
        done.notes += _compare(model, readable, half)
    fingerprint = model.fingerprint()
    if index_exists(place):
        index = open_index(place, writable=True, fingerprint=fingerprint, model=model_name)
    else:
        index = empty_index(place, model.dim, model=model_name, fingerprint=fingerprint)
    with index:
        collection = index.collection(name or str(source.resolve()), str(folder))
        for shard in shards:
            vectors, rows = shard.load()
            for start in range(0, len(rows), ROWS):
                items = [_item(row, folder, shard, collection.number) for row in rows[start : start + ROWS]]
                index.update(items, unit_rows(vectors[start : start + ROWS]))
        done.images = len(seen)
    return done


def find_shards(source: Path, paths: Path | None = None) -> list[SourceShard]:
    """The files of vectors with their tables: a folder of clip-retrieval, an .npy with ``paths``, a Parquet file."""
    if not source.exists():
        raise DataError(f"{source} does not exist: check the path.")
    if source.is_dir():
        folder = source / "img_emb" if (source / "img_emb").is_dir() else source
        arrays = sorted(folder.glob("*.npy"), key=_number)
        tables = sorted((source / "metadata").glob("*.parquet"), key=_number)
        if not arrays or len(arrays) != len(tables):
            raise DataError(
                f"{source} has {len(arrays)} files img_emb/*.npy and {len(tables)} files metadata/*.parquet: give a "
                "folder with one of each, or an .npy file with --paths."
            )
        return [SourceShard(*pair) for pair in zip(arrays, tables, strict=True)]
    if source.suffix == ".npy":
        if paths is None:
            raise DataError(
                f"{source} holds vectors alone: say what they are of with --paths FILE, one line for each."
            )
        return [SourceShard(source, paths)]
    if source.suffix == ".parquet":
        return [SourceShard(source)]
    raise DataError(f"{source} is no .npy, Parquet file or folder of them: give one of these.")


def check_vectors(vectors: NDArray[Any], width: int, source: Path) -> None:
    """Raise unless vectors have the width of a model and are finite and not zero."""
    if vectors.shape[1] != width:
        raise DataError(
            f"{source} has vectors of {vectors.shape[1]} numbers and the model makes {width}: name the model of these."
        )
    check_rows(vectors, str(source), outcome=", nothing was imported")


def read_table(file: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet, CSV or JSON-lines table, or the lines of a text file as paths."""
    try:
        if file.suffix == ".parquet":
            rows: list[dict[str, Any]] = parquet()[1].read_table(file).to_pylist()
            return rows
        lines = file.read_text("utf-8").splitlines()
        if file.suffix == ".csv":
            return [dict(row) for row in csv.DictReader(lines)]
        if file.suffix == ".jsonl":
            return [dict(json.loads(line)) for line in lines if line.strip()]
    except DiptychError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{file} does not exist: check the path.") from error
    except Exception as error:  # pyarrow and json have errors of their own
        raise DataError(f"{file} cannot be read as a table ({error}): write it again.") from error
    return [{"path": line} for line in lines if line]


def export_vectors(index: Index, folder: Path, kind: Kind = "image") -> int:
    """Write the vectors of a kind and their items in the layout of clip-retrieval; how many."""
    arrow, files = parquet()
    start = {"image": "img_emb", "text": "text_emb"}[kind]
    with storing(folder):
        for part in (start, "metadata"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        count = 0
        for number, (items, vectors) in enumerate(_batches(index, kind)):
            columns = sorted({name for item in items for name in item.metadata})
            table: dict[str, list[Any]] = {
                "id": [item.id for item in items],
                "image_path": [_place(index, item) for item in items],
                "caption": [item.text for item in items],
            }
            for name in columns:
                values = [item.metadata.get(name) for item in items]
                table.setdefault(name, values if _is_plain(values) else [_as_text(value) for value in values])
            np.save(folder / start / f"{start}_{number}.npy", vectors)
            files.write_table(arrow.table(table), folder / "metadata" / f"metadata_{number}.parquet")
            count += len(items)
    return count


def export_faiss(index: Index, file: Path, kind: Kind = "image") -> int:
    """Write an exact faiss index of inner products, and its ids and paths beside it as JSON; how many vectors."""
    faiss = import_extra("faiss", "faiss", "writing a faiss index", "faiss-cpu")
    flat = faiss.IndexFlatIP(index.info.dimension)
    rows: list[dict[str, str]] = []
    for items, vectors in _batches(index, kind):
        flat.add(vectors)
        rows += [{"id": item.id, "path": _place(index, item), "text": item.text} for item in items]
    with storing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        faiss.write_index(flat, str(file))
    write_text(file.with_name(file.name + ".json"), json.dumps(rows, ensure_ascii=False, indent=1))
    return len(rows)


def _batches(index: Index, kind: Kind) -> Iterator[tuple[list[Item], Vectors]]:
    """All items of a kind with their vectors, ``ROWS`` at a time."""
    if not index.count(kind):
        raise DataError(f"the index holds no {kind}s: choose the other kind.")
    ids = [id for one in index.info.collections for id, _ in index.contents(one.number, kind)]
    for start in range(0, len(ids), ROWS):
        some = ids[start : start + ROWS]
        items = [item for item in index.get(some) if item is not None]
        yield items, np.ascontiguousarray(index.vectors([item.id for item in items]), np.float32)


def _root(shards: Sequence[SourceShard]) -> Path:
    """The folder that holds all pictures that are named by whole paths; else where the user stands."""
    common = ""
    for shard in shards:
        for row in shard.load()[1]:
            path = str(row[_column(row, PATHS, shard.table or shard.vectors, "paths")] or "")
            if not os.path.isabs(path):
                return Path.cwd()
            parent = os.path.dirname(path)
            common = os.path.commonpath([common, parent]) if common else parent
    return Path(common or ".")


def _item(
    row: Mapping[str, Any], folder: Path, shard: SourceShard, collection: int = 0, hashed: bool = True
) -> Item:
    """One row of metadata as an item; ``hashed``, it knows the content of its file."""
    column = _column(row, PATHS, shard.table or shard.vectors, "paths")
    written = str(row[column] or "")
    if not written:
        raise DataError(f"{shard.table or shard.vectors} has a row without {column}: name every vector.")
    path = expanded(written)
    absolute = path if path.is_absolute() else folder / path
    inside = absolute.resolve().is_relative_to(folder) and "://" not in written
    relative = absolute.resolve().relative_to(folder).as_posix() if inside else ""
    text = next((str(row[name]) for name in TEXTS if row.get(name)), "")
    own = relative if inside and absolute.is_file() else written
    id = own if collection == 0 else f"{collection}/{own}"
    used = {column, "id", "split", *TEXTS}  # of the rest, NaN is not itself
    metadata = {str(k): v for k, v in row.items() if k not in used and isinstance(v, SCALARS) and v == v}
    content = _content(folder, relative) if inside and hashed else ""
    return Item(id, "image", relative, text, metadata=metadata, content=content, collection=collection)


def _content(folder: Path, relative: str) -> str:
    """What indexing would record of a file, so that a later ``diptych index`` keeps the vector."""
    try:
        stat = (folder / relative).stat()
        key = FileImages(folder, [relative]).content_key(0)
    except (OSError, DiptychError):
        return ""
    return f"{stat.st_size}:{stat.st_mtime_ns}:{key}|imported"


def _compare(model: Model, readable: Sequence[tuple[Path, Vectors]], half: bool) -> list[str]:
    """Raise when the model makes other vectors of the same pictures; a sentence when they differ, or none can be read.

    A picture may have been encoded whole, or decoded at a reduced size as ``diptych index`` does it.
    """
    if not readable:
        return ["none of the pictures is here: the vectors could not be compared with the model's own."]
    side, others = picture_side(model), unit_rows(np.stack([vector for _, vector in readable]))
    worst = -1.0
    for hint in (None, side and MARGIN * side):
        pictures = [open_image(path, size_hint=hint) for path, _ in readable]
        own = unit_rows(np.asarray(model.encode_image(pictures, batch_size=CHECKED), np.float32))
        worst = max(worst, float((own * others).sum(1).min()))
        if worst >= SAID or not side:
            break
    least = REFUSED_HALF if half else REFUSED
    if worst < least:
        raise DataError(
            f"the vectors are not those of this model: {counted(len(readable), 'picture')} encoded again, worst cosine "
            f"{worst:.4f} with them (at least {least} is needed), nothing was imported; name the model that made them, "
            "or give --unchecked if it prepared its pictures in another way."
        )
    if worst < SAID:
        return [f"the vectors differ a little from the model's own: worst cosine {worst:.6f}."]
    return []


def _column(row: Mapping[str, Any], names: Sequence[str], source: Path, what: str) -> str:
    found = next((name for name in names if name in row), None)
    if found is None:
        raise DataError(
            f"{source} has no column of {what}: it has {', '.join(map(str, row)) or 'none'}; name it {names[0]}."
        )
    return found


def _place(index: Index, item: Item) -> str:
    file = index.file(item)
    return item.id if file is None else str(file)


def _number(file: Path) -> tuple[int, str]:
    digits = "".join(c for c in file.stem if c.isdigit())
    return int(digits or 0), file.name


def _is_plain(values: Sequence[Any]) -> bool:
    return len({type(value) for value in values if value is not None}) <= 1 and all(
        value is None or isinstance(value, SCALARS) for value in values
    )


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
