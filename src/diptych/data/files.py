"""Reading files at the boundary: text with line numbers, JSON, image names, and images on disk."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from diptych.data.captions import StoredImage
from diptych.data.decode.extra_formats import COMPRESSED, is_image, is_video
from diptych.data.decode.opening import open_image
from diptych.data.problems import Problems
from diptych.errors import DataError, ImageError
from diptych.progress import counted
from diptych.storage import expanded, parse_json

IMAGE_FOLDERS = (
    ".",
    "images",
    "Images",
    "Images/mscoco",
    "img",
    "image",
    "flickr30k-images",
    "flickr30k_images",
    "coco-images",
    "coco_images",
    "Flicker8k_Dataset",
)
MOST_NAMES = 1_000_000  # largest number of names in a brace pattern
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
CACHES = frozenset({"__pycache__", "node_modules"})  # beside hidden ones such as .cache
ENVIRONMENT_FILE = "pyvenv.cfg"  # in the folder of a virtual environment
FEW_NAMES = 3  # names in a sentence about folders
WHOLE = 64 * 1024  # content up to this size is hashed whole
PAGE = 16 * 1024  # four pages of this size are hashed of larger compressed files


def read_lines(path: Path, problems: Problems) -> list[str | None]:
    """Lines of a UTF-8 file without their ends; a line that is not UTF-8 is reported and comes as None."""
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    raw = data.replace(b"\r\n", b"\n").split(b"\n")
    if raw and not raw[-1]:
        raw.pop()  # the end of the last line is not a line
    lines: list[str | None] = []
    for number, line in enumerate(raw, 1):
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            expected = "save the file as UTF-8"
            problems.error("encoding", f"{path}:{number}", f"not UTF-8 (byte {error.start + 1})", expected)
            lines.append(None)
    return lines


def read_object(text: str, where: object, problems: Problems, expected: str) -> dict[str, Any] | None:
    """The JSON object of a line or a small file, or None after its fault was reported."""
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        problems.error("json", where, f"not JSON ({error.msg} at {place})", expected)
        return None
    if isinstance(value, dict):
        return value
    problems.error("json", where, f"it holds a {type(value).__name__}", expected)
    return None


def read_json(path: Path, problems: Problems) -> Any:
    """A JSON file, or None after its fault (with line and column) was reported."""
    try:
        return parse_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except UnicodeDecodeError as error:
        line = bytes(error.object[: error.start]).count(b"\n") + 1
        problems.error("encoding", f"{path}:{line}", "the line is not UTF-8", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}"
        problems.error("json", where, f"not JSON ({error.msg} at column {error.colno})", "copy it again")
    return None


def column_names(path: Path, noun: str, count: int, problems: Problems) -> list[str]:
    """The names of ``count`` columns, one in each line of a file; numbered where it is not there, or wrong."""
    numbered = [f"{noun} {number}" for number in range(count)]
    if not path.is_file():
        return numbered
    names = [line.strip() for line in read_lines(path, problems) if line and line.strip()]
    if len(names) == len(set(names)) == count:
        return names
    message = f"{len(names)} names, {len(set(names))} of them different, for {count} columns"
    problems.error("list", path, message, f"one name per {noun}, in the order of the columns")
    return numbered


def head(path: Path, size: int = 64 * 1024) -> str:
    """The beginning of a file, to recognise what it is; bytes that are not text are replaced."""
    with path.open("rb") as handle:
        return handle.read(size).removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")


def find_videos(folder: Path) -> Iterator[str]:
    """Names of the videos below a folder, relative, with forward slashes, in no order."""
    return filter(is_video, find_files(folder))


def find_images(folder: Path) -> list[str]:
    """Names of every image below ``folder`` that can be read, relative, with forward slashes, sorted."""
    return sorted(name for name in find_files(folder) if is_image(name))


def find_files(folder: Path, left_out: list[str] | None = None) -> Iterator[str]:
    """Names of every file below ``folder``, relative, with forward slashes; hidden files and folders are left out.

    So are virtual environments and caches. ``left_out`` is told the names of the folders.
    """
    for base, folders, files in os.walk(folder):
        relative = os.path.relpath(base, folder).replace(os.sep, "/")
        prefix = "" if relative == "." else f"{relative}/"
        foreign = {name for name in folders if _is_foreign(base, name)}
        folders[:] = [name for name in folders if name not in foreign]
        if left_out is not None:
            left_out += [prefix + name for name in sorted(foreign)]
        yield from (prefix + name for name in files if not name.startswith("."))


def _is_foreign(base: str, name: str) -> bool:
    """Whether a folder belongs to programs, not to a person's pictures: hidden, a cache, a virtual environment."""
    return (
        name.startswith(".") or name in CACHES or os.path.isfile(os.path.join(base, name, ENVIRONMENT_FILE))
    )


def left_out_folders(names: Sequence[str]) -> list[str]:
    """A sentence that counts the folders that ``find_files`` left out, none where there are none."""
    if not names:
        return []
    few = ", ".join(names[:FEW_NAMES]) + (", …" if len(names) > FEW_NAMES else "")
    return [f"left out {counted(len(names), 'folder')} of hidden files, caches or environments: {few}."]


def named_files(path: Path, ends: tuple[str, ...]) -> list[Path]:
    """The files with one of these endings at a path, sorted: those of a folder, the file itself, those of a pattern.

    A pattern names what should be there: a file of it that is absent is for the reader to report, unless all are.
    """
    if path.is_dir():
        return sorted(f for f in path.iterdir() if f.name.endswith(ends) and not f.name.startswith("."))
    if not path.name.endswith(ends):
        return []
    if path.exists():
        return [path]
    patterns = dict.fromkeys(expand(str(path)))  # braces inside braces name some files twice
    files = [Path(name) for pattern in patterns for name in (sorted(glob.glob(pattern)) or [pattern])]
    return files if any(file.exists() for file in files) else []


def expand(pattern: str) -> Iterator[str]:
    """Names of a brace pattern: ``{0000..0009}`` counts with the zeros kept, ``{train,val}`` chooses."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    first, last, choice_list = match.groups()
    if first is None:
        choices = choice_list.split(",")
    else:
        if max(len(first), len(last)) > 18 or int(last) - int(first) >= MOST_NAMES:
            raise DataError(f"the pattern {match.group()[:60]} names over {MOST_NAMES:,} files: shorten it.")
        choices = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    for choice in choices:
        yield from expand(pattern[: match.start()] + choice + pattern[match.end() :])


def json_files(path: Path, is_one: Callable[[Path], bool], pattern: str = "*.json") -> list[Path]:
    """The JSON files of a kind at a path: the file itself, or those in the folder."""
    if path.is_dir():
        return sorted(file for file in path.glob(pattern) if file.is_file() and is_one(file))
    return [path] if path.is_file() and path.suffix.lower() == ".json" and is_one(path) else []


def image_root(names: Sequence[str], beside: Path, given: str | Path | None) -> Path:
    """The folder image names are relative to: ``given``, or the first usual place that holds one."""
    if given is not None:
        return expanded(given)
    places = [base / folder for base in (beside, beside.parent) for folder in IMAGE_FOLDERS]
    for name in (*names[:5], *names[-5:]):  # a few, in case the first is the one that is missing
        for place in places:
            with suppress(OSError, ValueError):  # a name too long, or of characters no file name has
                if (place / name).is_file():
                    return place
    return beside


class OnDisk:
    """Which files exist, asked folder by folder: 100,000 names cost a few listings, not 100,000 calls."""

    def __init__(self) -> None:
        self._folders: dict[str, frozenset[str]] = {}

    def __contains__(self, path: object) -> bool:
        folder, name = os.path.split(str(path))
        if folder not in self._folders:
            self._folders[folder] = frozenset(self._files(folder))
        return name in self._folders[folder]

    @staticmethod
    def _files(folder: str) -> Iterator[str]:
        try:
            with os.scandir(folder or ".") as entries:
                yield from (entry.name for entry in entries if entry.is_file())
        except (OSError, ValueError):
            return


def content_hash(handle: BinaryIO, start: int, size: int, suffix: str) -> str:
    """A hash of an image's bytes: all of them when few or uncompressed, else four pages and the size.

    Any change to a compressed picture moves its size or its coded data throughout, so pages suffice.
    """
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    whole = size <= WHOLE or suffix.lower() not in COMPRESSED
    pages = [(0, size)] if whole else [(k * (size - PAGE) // 3, PAGE) for k in range(4)]
    for offset, length in pages:
        handle.seek(start + offset)
        while length > 0 and (chunk := handle.read(min(length, 1 << 20))):
            digest.update(chunk)
            length -= len(chunk)
    return digest.hexdigest()


class FileImages:
    """Images in files, opened on access."""

    features = False

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = root, names
        self._keys: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> StoredImage:
        return open_image(self.path(index))

    def path(self, index: int) -> Path:
        return self.root / self.names[index]

    def content_key(self, index: int) -> str:
        if index not in self._keys:
            path = self.path(index)
            try:
                with path.open("rb") as handle:
                    size = os.fstat(handle.fileno()).st_size
                    self._keys[index] = content_hash(handle, 0, size, path.suffix)
            except FileNotFoundError as error:
                raise ImageError(f"{path} is not on disk: check the path.") from error
            except (OSError, ValueError) as error:
                raise ImageError(f"{path} cannot be read ({error}): check the file.") from error
        return self._keys[index]


@dataclass(frozen=True)
class Member:
    """Where the bytes of one file in a tar lie."""

    tar: str
    name: str
    offset: int
    size: int

    def bytes(self) -> bytes:
        try:
            with open(self.tar, "rb") as handle:
                handle.seek(self.offset)
                return handle.read(self.size)
        except (OSError, ValueError) as error:
            raise DataError(f"{self} cannot be read ({error}): copy the tar again.") from error

    def __str__(self) -> str:
        return f"{self.tar}/{self.name}"
