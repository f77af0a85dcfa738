"""Webdataset tars: ``KEY.jpg`` (jpeg, png, webp) with ``KEY.txt`` or ``KEY.json``, read in place.

The path is a folder of tars, one tar, or a pattern (``data/train-{0000..0009}.tar``, ``data/*.tar``). The
split is in the name of the tar (``train-000000.tar``); without one everything is ``train``. A ``.txt``
holds one text per line; a ``.json`` holds ``captions``, ``caption`` or ``text`` (a string or a list), may
hold ``image_id``, and its further plain values become labels. The members are listed once when the tars are
opened; an image is then read by its offset, in any order, and nothing is unpacked.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.data.captions import UNSPLIT, Captions, StoredImage, split_in_name
from diptych.data.decode.opening import open_image
from diptych.data.files import Member, content_hash, named_files
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Empty, add_texts
from diptych.progress import track
from diptych.storage import parse_json

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
        """Where an image lies."""
        return self.members[index]

    def content_key(self, index: int) -> str:
        """The hash of the member's content."""
        if index not in self._keys:
            member = self.members[index]
            with open(member.tar, "rb") as handle:
                suffix = os.path.splitext(member.name)[1]
                self._keys[index] = content_hash(handle, member.offset, member.size, suffix)
        return self._keys[index]


def matches(path: Path) -> bool:
    """Whether ``path`` is a tar, a folder of tars, or a pattern that names some."""
    return bool(tars(path))


def tars(path: Path) -> list[Path]:
    """The tars at a path, sorted; compressed ones too, so that reading can say why not."""
    return named_files(path, (".tar", *NOT_RANDOM))


def read(path: Path, *, empty: Empty = "drop", problems: Problems | None = None) -> Captions:
    """Read webdataset tars."""
    problems = problems or Problems()
    files = tars(path)
    samples = [(file, sample) for file in track(files, "listing tars") for sample in scan(file, problems)]
    plain = _unique_keys(samples)
    draft = Draft(str(path), problems, empty)
    members: dict[str, Member] = {}
    for file, sample in samples:
        where = f"{file}/{sample.key}"
        if sample.image is None:
            expected = f"add {sample.key}.jpg or remove its texts"
            problems.error("missing image", where, "texts without an image", expected)
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
    return draft.captions(lambda keys: TarImages([members[key] for key in keys]))


def _unique_keys(samples: Sequence[tuple[Path, Sample]]) -> bool:
    """Whether keys name images; False when each shard counts from 0: one key, different images in two tars."""
    seen: dict[str, Member] = {}
    for _, sample in samples:
        if sample.image is None:
            continue
        other = seen.setdefault(sample.key, sample.image)
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
        expected = "unpack it to a plain .tar, which is read in place"
        problems.error("tar", path, "a compressed tar cannot be read at random", expected)
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
        expected = f"it has {size:,} bytes; copy it again"
        problems.error("tar", path, f"the tar is truncated or damaged ({error})", expected)
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
            problems.error(
                "duplicate key", member, f"'{key}' has two images, {sample.image.name} too", expected
            )
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
    try:
        values = parse_json(content)
    except json.JSONDecodeError as error:
        problems.error("json", member, f"not JSON ({error.msg} at line {error.lineno})", "write it again")
        return
    if not isinstance(values, dict):
        problems.error("json", member, f"the file holds a {type(values).__name__}", "an object with captions")
        return
    sample.values = values
