"""What is wrong with a data set: raised at once when reading, gathered into a list when checking.

Every reader reports through a ``Problems`` sink. With ``Problems()`` the first error becomes a
``DataError``; with ``Found()`` it is noted and the reader goes on with what is left, so that ``diptych data
check`` lists exactly what reading would refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from diptych.errors import DataError

Severity = Literal["error", "warning"]
NAMED = 3  # missing files an error names before it counts the rest


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

    def as_dict(self) -> dict[str, str]:
        """A JSON value of the finding."""
        return asdict(self)


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
            named = ", ".join(files[:NAMED]) + (", ..." if len(files) > NAMED else "")
            self.error("missing image", where, f"{len(files)} of {total} images are missing ({named})", hint)


class Found(Problems):
    """The sink of a check: everything is noted, nothing stops."""

    def __init__(self) -> None:
        self.all: list[Problem] = []

    def error(self, kind: str, file: object, message: str, expected: str = "") -> None:
        """Note an error and go on."""
        self.all.append(Problem("error", kind, str(file), message, expected))

    def raised(self, kind: str, file: object, error: DataError) -> None:
        """Note what was raised and go on."""
        self.error(kind, file, str(error).removeprefix(str(file)).strip(" .:"))

    def warn(self, kind: str, file: object, message: str, expected: str = "") -> None:
        """Note something that can be lived with."""
        self.all.append(Problem("warning", kind, str(file), message, expected))

    def not_understood(self, path: object, sentence: str) -> None:
        """Note it: whoever checks the data wants its texts read."""
        self.error("table", path, sentence.removeprefix(f"{path}/").rstrip("."))

    def missing(self, files: Sequence[str], total: int, where: str, hint: str) -> None:
        """Note every missing image by itself."""
        for file in files:
            self.error("missing image", file, f"named in {where} but not on disk", hint)


class Absent(Problems):
    """The sink of a reader that goes on without images that are not on disk, unless none is."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def missing(self, files: Sequence[str], total: int, where: str, hint: str) -> None:
        """Note them."""
        if len(files) == total:
            super().missing(files, total, where, hint)
        self.files += files
