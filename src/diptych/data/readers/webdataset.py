"""Webdataset tars: ``KEY.jpg`` (jpeg, png, webp) with ``KEY.txt`` or ``KEY.json``, read in place.

The members are listed once when the tars are opened; an image is then read by its offset, in any order. ``index_shard``
lists a tar for pre-training: its headers and texts, never its images. The index is kept in the cache folder, by the
tar's path, size and time, and is columns (arrays), not objects: an image costs some forty bytes and its texts.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.captions import UNSPLIT, StoredImage, split_in_name
from diptych.data.decode.opening import open_image
from diptych.data.files import Member, content_hash, named_files, read_object
from diptych.data.problems import AllProblems, Problem, Problems
from diptych.data.readers.draft import Draft, Reader, add_texts
from diptych.entries import CACHE
from diptych.errors import DataError, StorageError
from diptych.progress import track
from diptych.storage import cache_folder, parse_json, write_bytes

IMAGES = ("jpg", "jpeg", "png", "webp")
JSON_TEXTS = ("captions", "caption", "text", "texts")
TEXT_BYTES = 16_000_000  # largest .txt or .json, which is read whole
NOT_RANDOM = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class BoundedInfo(tarfile.TarInfo):
    """A member whose size is not negative: Python's reader would go back over it for ever (CVE-2025-8194)."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.ReadError("a member of negative size")
        return super()._block(count)  # type: ignore[misc, no-any-return]


@dataclass
class Sample:
    """The members that share a key."""

    key: str
    image: Member | None = None
    lines: list[str] = field(default_factory=list)  # of the .txt
    values: dict[str, Any] = field(default_factory=dict)  # of the .json

    def take_texts(self, names: Sequence[str] = JSON_TEXTS) -> Any:
        """The texts of the .json if it has a field of these ``names`` (a .txt beside it repeats them), else of the
        .txt."""
        return next((self.values.pop(name) for name in names if name in self.values), self.lines)


class TarImages:
    """Images in tars, read by offset on access."""

    features = False

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._keys: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> StoredImage:
        member = self.members[index]
        return open_image(member.bytes(), name=str(member))

    def member(self, index: int) -> Member:
        return self.members[index]

    def content_key(self, index: int) -> str:
        if index not in self._keys:
            member = self.members[index]
            with open(member.tar, "rb") as handle:
                suffix = os.path.splitext(member.name)[1]
                self._keys[index] = content_hash(handle, member.offset, member.size, suffix)
        return self._keys[index]


def tars(path: Path) -> list[Path]:
    """The tars at a path, sorted; compressed ones too, so that reading can say why not."""
    return named_files(path, (".tar", *NOT_RANDOM))


def fill(draft: Draft, path: Path) -> TarImages:
    """Read webdataset tars."""
    files, problems = tars(path), draft.problems
    samples = [(file, sample) for file in track(files, "listing tars") for sample in scan(file, problems)]
    plain = _unique_keys(samples)
    members: dict[str, Member] = {}
    for file, sample in samples:
        where = f"{file}/{sample.key}"
        if sample.image is None:
            problems.error("missing image", where, "texts without an image", "add it or remove its texts")
            continue
        key = sample.key if plain else f"{file.stem}/{sample.key}"
        texts, image_id = sample.take_texts(), sample.values.pop("image_id", None)
        labels = {
            k: v for k, v in sample.values.items() if v is None or isinstance(v, str | int | float | bool)
        }
        row = draft.image(key, split_in_name(file.name) or UNSPLIT, where, image_id, labels)
        if key in members:
            problems.error("duplicate key", where, "the key is there twice", "give each image its own key")
            continue
        members[key] = sample.image
        add_texts(draft, row, texts, where)
    return TarImages([members[key] for key in draft.keys])


READER = Reader(tars, fill, empty="drop", files=False)


def _unique_keys(samples: Sequence[tuple[Path, Sample]]) -> bool:
    """Whether keys name images; False when each shard counts from 0: one key, different images in two tars."""
    first_of: dict[str, Member] = {}
    for _, sample in samples:
        if sample.image is None:
            continue
        other = first_of.setdefault(sample.key, sample.image)
        if other.tar != sample.image.tar and other.bytes() != sample.image.bytes():
            return False
    return True


def scan(path: Path, problems: Problems) -> list[Sample]:
    """The samples of one tar, in order; texts are read, images only located."""
    samples: dict[str, Sample] = {}
    if not path.exists():
        problems.error("missing file", path, "the tar does not exist", "copy it, or shorten the pattern")
        return []
    if path.name.endswith(NOT_RANDOM):
        problems.error("tar", path, "a compressed tar cannot be read at random", "unpack it to a plain .tar")
        return []
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:", tarinfo=BoundedInfo) as tar:
            for info in tar:
                if info.isfile() and not os.path.basename(info.name).startswith("."):
                    if info.offset_data + info.size > size:
                        raise tarfile.ReadError("unexpected end of data")
                    _place(samples, Member(str(path), info.name, info.offset_data, info.size), problems)
            # tarfile takes a damaged header for the end; the true end is a block of zeros
            with path.open("rb") as handle:
                handle.seek(tar.offset)
                if handle.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError(f"no end mark at byte {tar.offset:,}")
    except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError, MemoryError) as error:
        message = f"the tar is truncated or damaged ({error})"
        problems.error("tar", path, message, f"it has {size:,} bytes; copy it again")
    return list(samples.values())


def _place(samples: dict[str, Sample], member: Member, problems: Problems) -> None:
    folder, base = os.path.split(member.name)
    stem, _, extension = base.partition(".")  # the webdataset rule: a key ends at the first dot of the name
    extension = extension.lower()
    if extension not in (*IMAGES, "txt", "json"):
        return
    key = f"{folder}/{stem}".removeprefix("./").lstrip("/")
    sample = samples.setdefault(key, Sample(key))
    if extension in IMAGES:
        if sample.image is not None:
            expected = "one image per key"
            problems.error("duplicate key", member, f"'{key}' has two images, {sample.image.name}", expected)
            return
        sample.image = member
        return
    if member.size > TEXT_BYTES:
        expected = f"a text file has at most {TEXT_BYTES:,}"
        problems.error("text", member, f"the member has {member.size:,} bytes", expected)
        return
    try:
        content = member.bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        line = bytes(error.object[: error.start]).count(b"\n") + 1
        problems.error("encoding", f"{member}:{line}", "the line is not UTF-8", "save the texts as UTF-8")
        return
    if extension == "txt":
        # an empty file is one empty text, for the draft to judge
        sample.lines = [line for line in content.splitlines() if line.strip()] or [""]
        return
    sample.values = read_object(content, member, problems, "an object with captions") or {}


Ints = NDArray[np.int64]
FORMAT = 1  # version of the index files
FATAL = {"missing file", "tar"}  # faults of a whole tar, not of one sample


class StringColumn(Sequence[str]):
    """Many strings in one block of bytes: string i is ``blob[ends[i−1]:ends[i]]`` in UTF-8."""

    def __init__(self, blob: bytes, ends: Ints) -> None:
        self.blob, self.ends = blob, ends

    @staticmethod
    def of(strings: Sequence[str]) -> StringColumn:
        encoded = [string.encode() for string in strings]
        return StringColumn(b"".join(encoded), np.cumsum([len(one) for one in encoded], dtype=np.int64))

    @staticmethod
    def join(columns: Sequence[StringColumn]) -> StringColumn:
        starts = np.cumsum([0, *(len(column.blob) for column in columns)])
        ends = [column.ends + start for column, start in zip(columns, starts[:-1], strict=True)]
        return StringColumn(
            b"".join(column.blob for column in columns), np.concatenate([np.empty(0, np.int64), *ends])
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        place = index % len(self)
        start = int(self.ends[place - 1]) if place else 0
        return self.blob[start : int(self.ends[place])].decode()


@dataclass(frozen=True, eq=False)
class TarShard:
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

    def __init__(self, shards: Sequence[TarShard]) -> None:
        self.paths = [shard.path for shard in shards]
        self.digests = [shard.digest() for shard in shards]
        counts = [len(shard.offsets) for shard in shards]
        self.shard_of = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
        self.offsets = np.concatenate([np.empty(0, np.int64), *(shard.offsets for shard in shards)])
        self.sizes = np.concatenate([np.empty(0, np.int64), *(shard.sizes for shard in shards)])
        self.names = StringColumn.join([shard.keys for shard in shards])

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> StoredImage:
        path = str(self.paths[self.shard_of[index]])
        member = Member(path, self.names[index], int(self.offsets[index]), int(self.sizes[index]))
        return open_image(member.bytes(), name=str(member))

    def content_key(self, index: int) -> str:
        """The digest of the tar's index and the place in it: no image is read for it."""
        return f"{self.digests[self.shard_of[index]]}@{self.offsets[index]}+{self.sizes[index]}"


def index_shard(path: Path, names: Sequence[str], cache_dir: Path | None = None) -> TarShard:
    """The index of a tar, from the cache folder or made again; ``names`` are the JSON fields that hold texts.

    A sample that cannot be used (no image, no text, broken JSON) is skipped and noted; a tar that is missing or
    damaged as a whole is refused.
    """
    if not path.is_file():
        raise DataError(f"the shard {path} does not exist: copy it, or shorten the pattern in the manifest.")
    status = path.stat()
    identity = f"{FORMAT}\0{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{','.join(names)}"
    file = cache_folder(cache_dir) / f"shard-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.npz"
    shard = _load(file, path)
    if shard is None:
        shard = _list(path, names)
        # it only saves time: without it the next start lists the tar again
        with suppress(OSError, StorageError):
            write_bytes(file, _pack(shard))
    return shard


def _list(path: Path, names: Sequence[str]) -> TarShard:
    sink = AllProblems()
    keys: list[str] = []
    offsets, sizes, texts, image_of = [], [], [], []
    for sample in scan(path, sink):
        where = f"{path}/{sample.key}"
        lines = [line for line in _texts(sample.take_texts(names)) if line]
        if sample.image is None:
            sink.error("missing image", where, "texts without an image", "add the image or remove the texts")
        elif not lines and any(problem.file.startswith(f"{where}.") for problem in sink.all):
            continue  # its text was noted as broken when the tar was listed
        elif not lines:
            sink.error("no text", where, f"no text in {' or '.join(names)}, and no .txt", "write one")
        else:
            image_of += [len(keys)] * len(lines)
            texts += lines
            keys.append(sample.key)
            offsets.append(sample.image.offset)
            sizes.append(sample.image.size)
    fatal = next((problem for problem in sink.all if problem.kind in FATAL), None)
    if fatal is not None:
        raise DataError(str(fatal))
    return TarShard(
        path,
        np.array(offsets, dtype=np.int64),
        np.array(sizes, dtype=np.int64),
        StringColumn.of(keys),
        StringColumn.of(texts),
        np.array(image_of, dtype=np.int64),
        tuple(sink.all),
    )


def _texts(value: object) -> Iterator[str]:
    """The strings of a field: a string, a list of strings, or VQA's list of objects with a ``question``."""
    for one in value if isinstance(value, list) else [value]:
        text = one.get("question") if isinstance(one, dict) else one
        if isinstance(text, str):
            yield " ".join(text.split())


def _pack(shard: TarShard) -> bytes:
    buffer = io.BytesIO()
    problems = json.dumps([asdict(problem) for problem in shard.skipped]).encode()
    columns: dict[str, Any] = {"offsets": shard.offsets, "sizes": shard.sizes, "image_of": shard.image_of}
    columns["problems"] = np.frombuffer(problems, np.uint8)
    for name, column in (("keys", shard.keys), ("texts", shard.texts)):
        columns |= {f"{name}_blob": np.frombuffer(column.blob, np.uint8), f"{name}_ends": column.ends}
    np.savez(buffer, **columns)
    return buffer.getvalue()


def _load(file: Path, path: Path) -> TarShard | None:
    """An index from the cache folder; None where there is none, or a damaged one."""
    try:
        with np.load(io.BytesIO(CACHE.read(file)), allow_pickle=False) as data:
            columns = {
                name: StringColumn(data[f"{name}_blob"].tobytes(), data[f"{name}_ends"])
                for name in ("keys", "texts")
            }
            skipped = tuple(Problem(**entry) for entry in parse_json(data["problems"].tobytes()))
            return TarShard(
                path, data["offsets"], data["sizes"], **columns, image_of=data["image_of"], skipped=skipped
            )
    except Exception:  # the readers of numpy and zipfile raise many kinds
        return None
