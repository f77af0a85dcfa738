"""What is wrong with a data set: raised at once when reading, gathered into a list when checking.

Every reader reports through a ``Problems`` sink, so ``diptych data check`` lists exactly what reading would refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from diptych.data.arrays import read_ahead
from diptych.data.captions import HALVES, Captions, ImageStore
from diptych.entries import MODEL
from diptych.errors import DataError, ImageError, reason_of
from diptych.progress import counted, echo, track
from diptych.storage import write_bytes

T = TypeVar("T")
Severity = Literal["error", "warning"]
MOST_FILES = 3  # missing files an error names before it counts the rest


@dataclass(frozen=True)
class Problem:
    """One finding: ``kind`` groups findings of a sort, ``file`` may end in a line number (``a.csv:12``)."""

    severity: Severity
    kind: str
    file: str
    message: str
    expected: str = ""

    def __str__(self) -> str:
        correction = f": {self.expected}" if self.expected else ""
        return f"{self.file}: {self.message}{correction}."


class Problems:
    """The sink of a reader that stops at the first error.

    ``keeps_missing``: images that are not on disk stay in the data, for whoever reads them to find out.
    """

    keeps_missing = False

    def error(self, kind: str, file: object, message: str, expected: str = "") -> None:
        """Report something that makes the data unreadable; returns only where findings are gathered."""
        raise DataError(str(Problem("error", kind, str(file), message, expected)))

    def raised(self, kind: str, file: object, error: DataError) -> None:
        """Report what opening a file raised, in its own words."""
        raise error

    def warn(self, kind: str, file: object, message: str, expected: str = "") -> None:
        """Report something a reader can live with."""

    def not_understood(self, path: object, sentence: str) -> None:
        """Report a table beside images whose columns are not understood: the images are read without it."""

    def missing(self, files: Sequence[str], total: int, where: str, hint: str) -> None:
        """Report images named by ``where`` but absent from the disk: one error that names the first few."""
        if files:
            few = ", ".join(files[:MOST_FILES]) + (", ..." if len(files) > MOST_FILES else "")
            self.error("missing image", where, f"{len(files)} of {total} images are missing ({few})", hint)


STOP = Problems()
"""The sink of readers that are given none."""


class AllProblems(Problems):
    """The sink of a check: everything is noted, nothing stops."""

    def __init__(self) -> None:
        self.all: list[Problem] = []

    def error(self, kind: str, file: object, message: str, expected: str = "") -> None:
        self.all.append(Problem("error", kind, str(file), message, expected))

    def raised(self, kind: str, file: object, error: DataError) -> None:
        self.error(kind, file, str(error).removeprefix(str(file)).strip(" .:"))

    def warn(self, kind: str, file: object, message: str, expected: str = "") -> None:
        self.all.append(Problem("warning", kind, str(file), message, expected))

    def not_understood(self, path: object, sentence: str) -> None:
        """Note it: whoever checks the data wants its texts read."""
        self.error("table", path, sentence.removeprefix(f"{path}/").rstrip("."))

    def missing(self, files: Sequence[str], total: int, where: str, hint: str) -> None:
        for file in files:
            self.error("missing image", file, f"named in {where} but not on disk", hint)


class ToBeLeftOut(Problems):
    """The sink of a reader that goes on without images that are not on disk, unless none is.

    They stay in the data, which lose their unreadable images later.
    """

    keeps_missing = True

    def __init__(self) -> None:
        self.files: list[str] = []

    def missing(self, files: Sequence[str], total: int, where: str, hint: str) -> None:
        if len(files) == total:
            super().missing(files, total, where, hint)
        self.files += files


class Absent(ToBeLeftOut):
    """The same for data without them."""

    keeps_missing = False


MOST_PICTURES = 10  # pictures that a message names before it counts the rest
OPENERS = 2  # threads that try pictures
FILE = "unreadable.txt"


@dataclass
class LeftOut:
    """Pictures that were left out: the reason of each, by its id, and how many texts went with them."""

    reasons: dict[str, str] = field(default_factory=dict)
    texts: int = 0

    def add(self, captions: Captions, failed: Mapping[int, str]) -> Captions:
        """The captions without the images that failed, which are noted; an error where that is all of them."""
        if not failed:
            return captions
        if len(failed) == len(captions.images):
            row = next(iter(failed))
            raise DataError(
                f"none of the {len(failed)} images of {captions.name} could be read; the first, "
                f"{captions.image_ids[row]}: {failed[row]}"
            )
        rest = captions.subset([row for row in range(len(captions.images)) if row not in failed])
        self.reasons |= {str(captions.image_ids[row]): reason for row, reason in failed.items()}
        self.texts += len(captions.texts) - len(rest.texts)
        return rest

    def draw(self, captions: Captions, rows: Sequence[int], count: int) -> list[int]:
        """The first ``count`` of these rows whose image can be read; those before them that cannot are noted."""
        readable: list[int] = []
        failed: dict[int, str] = {}
        for row in rows:
            if len(readable) == count:
                break
            try:
                captions.images[row]
                readable.append(row)
            except (ImageError, OSError) as error:
                failed[row] = reason_of(error)
        self.add(captions, failed)
        if failed and not readable:
            raise DataError(f"no image of {captions.name} with a text can be read: see diptych data check.")
        return readable

    def lines(self, total: int) -> list[str]:
        """What to tell the user, the first few by name; empty where nothing was left out."""
        if not self.reasons:
            return []
        count = len(self.reasons)
        texts = f", with {counted(self.texts, 'text')}" if self.texts else ""
        lines = [f"left out {count:,} of {total:,} pictures, which cannot be read{texts}:"]
        lines += [f"  {id}: {reason}" for id, reason in list(self.reasons.items())[:MOST_PICTURES]]
        return lines + ([f"  … and {count - MOST_PICTURES:,} more"] if count > MOST_PICTURES else [])

    def tell(self, total: int, where: Path | None = None, *, advice: bool = True) -> None:
        """Say it on standard error; ``where`` is the file that lists all, ``advice`` how to stop instead."""
        if lines := self.lines(total):
            place = f"all are listed in {where}; " if where is not None else ""
            lines += [f"{place}use --strict_images to stop at the first"] * advice
            echo("\n".join(lines), err=True)

    def save(self, folder: Path) -> None:
        """Write all of them to ``unreadable.txt``, one per line; remove the file where there are none."""
        if self.reasons:
            lines = "".join(f"{id}\t{reason}\n" for id, reason in self.reasons.items())
            write_bytes(folder / FILE, lines.encode("utf-8", HALVES))
        else:
            MODEL.remove(folder / FILE)


def read_rows(
    rows: Iterable[int], read: Callable[[int], T], skip: bool = True
) -> tuple[dict[int, T], dict[int, str]]:
    """What ``read`` gives for each row, and the reasons of those that it cannot read: an error unless ``skip``."""
    found: dict[int, T] = {}
    failed: dict[int, str] = {}
    for row in rows:
        try:
            found[row] = read(row)
        except (ImageError, OSError) as error:
            if not skip:
                raise
            failed[row] = reason_of(error)
    return found, failed


def content_keys(store: ImageStore, skip: bool = True) -> tuple[dict[int, str], dict[int, str]]:
    """The content key of every image, and the reasons of those whose file cannot be read: an error unless ``skip``."""
    return read_rows(range(len(store)), store.content_key, skip)


def unopenable(store: ImageStore) -> dict[int, str]:
    """The rows whose file cannot even be read, with the reason; pictures are not decoded."""
    return content_keys(store)[1]


def undecodable(store: ImageStore, *, show_progress: bool = True) -> dict[int, str]:
    """The rows whose picture cannot be read, with the reason; every picture is opened once."""
    threads = 1 if getattr(store, "sequential", False) else OPENERS
    tries = read_ahead(range(len(store)), lambda row: read_rows([row], store.__getitem__)[1], threads)
    every = track(tries, "open pictures", len(store), show_progress)
    return {row: reason for failed in every for row, reason in failed.items()}
