"""An index of webdataset tars: where every image lies and what its texts are, so that no image is read to start.

Listing a tar reads its headers and texts, never its images. The index of a tar is kept in the cache folder, by the
tar's path, size and time: the next start reads it from there. Everything is columns (arrays), not objects: an image
costs some forty bytes and its texts.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from diptych.data.captions import StoredImage
from diptych.data.decode.opening import open_image
from diptych.data.files import Member
from diptych.data.problems import Found, Problem
from diptych.data.readers.webdataset import scan
from diptych.errors import DataError, StorageError
from diptych.storage import CACHE, cache_folder, parse_json, write_bytes

Ints = NDArray[np.int64]
FORMAT = 1  # version of the index files
FATAL = {"missing file", "tar"}  # faults of a whole tar, not of one sample


class StringColumn(Sequence[str]):
    """Many strings in one block of bytes: string i is ``blob[ends[i−1]:ends[i]]`` in UTF-8."""

    def __init__(self, blob: bytes, ends: Ints) -> None:
        self.blob, self.ends = blob, ends

    @staticmethod
    def of(strings: Sequence[str]) -> StringColumn:
        """The column of some strings."""
        encoded = [string.encode() for string in strings]
        return StringColumn(b"".join(encoded), np.cumsum([len(one) for one in encoded], dtype=np.int64))

    @staticmethod
    def joined(columns: Sequence[StringColumn]) -> StringColumn:
        """Columns one after the other."""
        starts = np.cumsum([0, *(len(column.blob) for column in columns)])
        ends = [column.ends + start for column, start in zip(columns, starts[:-1], strict=True)]
        return StringColumn(
            b"".join(column.blob for column in columns), np.concatenate([np.empty(0, np.int64), *ends])
        )

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        place = index % len(self)
        start = int(self.ends[place - 1]) if place else 0
        return self.blob[start : int(self.ends[place])].decode()


@dataclass(frozen=True, eq=False)
class Shard:
    """What a tar holds: for each image its place and key, all texts, and the image of each text."""

    path: Path
    offsets: Ints  # (N,)
    sizes: Ints  # (N,) bytes
    keys: StringColumn  # (N,)
    texts: StringColumn  # (M,)
    image_of: Ints  # (M,)
    skipped: tuple[Problem, ...] = ()

    def digest(self) -> str:
        """16 hex digits of everything but the pixels: names, places, sizes and texts. The tar's path is no part."""
        digest = hashlib.sha256(self.path.name.encode())
        for column in (self.offsets, self.sizes, self.keys.ends, self.texts.ends, self.image_of):
            digest.update(np.ascontiguousarray(column).tobytes())
        digest.update(self.keys.blob + b"\0" + self.texts.blob)
        return digest.hexdigest()[:16]


class ShardImages:
    """Images in indexed tars, read by their offset on access."""

    features = False

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.paths = [shard.path for shard in shards]
        self.digests = [shard.digest() for shard in shards]
        counts = [len(shard.offsets) for shard in shards]
        self.shard_of = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
        self.offsets = np.concatenate([np.empty(0, np.int64), *(shard.offsets for shard in shards)])
        self.sizes = np.concatenate([np.empty(0, np.int64), *(shard.sizes for shard in shards)])
        self.names = StringColumn.joined([shard.keys for shard in shards])

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> StoredImage:
        path = str(self.paths[self.shard_of[index]])
        member = Member(path, self.names[index], int(self.offsets[index]), int(self.sizes[index]))
        return open_image(member.bytes(), name=str(member))

    def content_key(self, index: int) -> str:
        """The digest of the tar's index and the place in it: no image is read for it."""
        return f"{self.digests[self.shard_of[index]]}@{self.offsets[index]}+{self.sizes[index]}"


def index_shard(path: Path, names: Sequence[str], cache_dir: Path | None = None) -> Shard:
    """The index of a tar, from the cache folder or made again; ``names`` are the JSON fields that hold texts.

    A sample that cannot be used (no image, no text, broken JSON) is skipped and noted; a tar that is missing or
    damaged as a whole is refused.
    """
    if not path.is_file():
        raise DataError(f"the shard {path} does not exist: copy it, or shorten the pattern in the manifest.")
    found = path.stat()
    identity = f"{FORMAT}\0{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0{','.join(names)}"
    kept = cache_folder(cache_dir) / f"shard-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.npz"
    shard = _load(kept, path)
    if shard is None:
        shard = _list(path, names)
        # it only saves time: without it the next start lists the tar again
        with suppress(OSError, StorageError):
            write_bytes(kept, _packed(shard))
    return shard


def _list(path: Path, names: Sequence[str]) -> Shard:
    found = Found()
    keys: list[str] = []
    offsets, sizes, texts, image_of = [], [], [], []
    for sample in scan(path, found):
        where = f"{path}/{sample.key}"
        lines = [line for line in _texts(sample.take_texts(names)) if line]
        if sample.image is None:
            found.error("missing image", where, "texts without an image", "add the image or remove the texts")
        elif not lines and any(problem.file.startswith(f"{where}.") for problem in found.all):
            continue  # its text was noted as broken when the tar was listed
        elif not lines:
            found.error("no text", where, f"no text in {' or '.join(names)}, and no .txt", "write one")
        else:
            image_of += [len(keys)] * len(lines)
            texts += lines
            keys.append(sample.key)
            offsets.append(sample.image.offset)
            sizes.append(sample.image.size)
    fatal = next((problem for problem in found.all if problem.kind in FATAL), None)
    if fatal is not None:
        raise DataError(str(fatal))
    return Shard(
        path,
        np.array(offsets, dtype=np.int64),
        np.array(sizes, dtype=np.int64),
        StringColumn.of(keys),
        StringColumn.of(texts),
        np.array(image_of, dtype=np.int64),
        tuple(found.all),
    )


def _texts(value: object) -> Iterator[str]:
    """The strings of a field: a string, a list of strings, or VQA's list of objects with a ``question``."""
    for one in value if isinstance(value, list) else [value]:
        text = one.get("question") if isinstance(one, dict) else one
        if isinstance(text, str):
            yield " ".join(text.split())


def _packed(shard: Shard) -> bytes:
    buffer = io.BytesIO()
    problems = json.dumps([problem.as_dict() for problem in shard.skipped]).encode()
    columns: dict[str, Any] = {"offsets": shard.offsets, "sizes": shard.sizes, "image_of": shard.image_of}
    columns["problems"] = np.frombuffer(problems, np.uint8)
    for name, column in (("keys", shard.keys), ("texts", shard.texts)):
        columns |= {f"{name}_blob": np.frombuffer(column.blob, np.uint8), f"{name}_ends": column.ends}
    np.savez(buffer, **columns)
    return buffer.getvalue()


def _load(kept: Path, path: Path) -> Shard | None:
    """An index from the cache folder; None where there is none, or a damaged one."""
    try:
        with np.load(io.BytesIO(CACHE.read(kept)), allow_pickle=False) as data:
            columns = {
                name: StringColumn(data[f"{name}_blob"].tobytes(), data[f"{name}_ends"])
                for name in ("keys", "texts")
            }
            skipped = tuple(Problem(**entry) for entry in parse_json(data["problems"].tobytes()))
            return Shard(
                path, data["offsets"], data["sizes"], **columns, image_of=data["image_of"], skipped=skipped
            )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
