"""Every error a user can meet, each one sentence with its correction.

::

    DiptychError
    ├── DataError          a file, folder or manifest that cannot be read as the format it claims
    │   └── ImageError     one image that is corrupt, too large, or not an image
    ├── SettingsError      a setting out of range, or two that cannot be combined
    ├── CheckpointError    a run or model folder that is incomplete, of another recipe, or of another version
    │   └── RuntimeFault   the ONNX encoders of a model folder that cannot be used; its weights may be fine
    ├── IndexFault         an index of another model, half copied, or locked
    │   └── Unavailable    a database or service that does not answer now; the same request may work later
    ├── QueryError         a query or filter with a mistake, and the character it is at
    │   └── AddressError   a web address that is malformed, not public, or does not answer with an image
    ├── MissingExtra       an optional dependency that is not installed, with the command that installs it
    ├── StorageError       the disk is full or read-only while saving
    └── TrainingError      a run that cannot go on: NaN with its step, collapse when told to stop on it
    Interrupted            not an error: the user asked a run to stop, and it is saved

The command line prints the message alone and exits with status 2 (status 130 after an interrupt).
"""

from __future__ import annotations

import importlib
from typing import Any, TypeVar, get_args

T = TypeVar("T")


class DiptychError(Exception):
    """Base of every error meant for the user."""


class DataError(DiptychError):
    """A file, folder or manifest that cannot be read as the format it claims."""


class ImageError(DataError):
    """One image that is corrupt, too large, or not an image."""


class SettingsError(DiptychError):
    """A setting out of range, or two settings that cannot be combined."""


class CheckpointError(DiptychError):
    """A run or model folder that is incomplete, of another recipe, or of another version."""


class RuntimeFault(CheckpointError):
    """The ONNX encoders of a model folder that cannot be used; its weights may be fine."""


class IndexFault(DiptychError):
    """An index of another model, half copied, or locked by another writer."""


class Unavailable(IndexFault):
    """A database or service that does not answer now; the same request may work later."""


class QueryError(DiptychError):
    """A query or filter that cannot be read; ``position`` counts characters from 0 when the place is known."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class AddressError(QueryError):
    """A web address that is malformed, not public, or does not answer with an image."""


class StorageError(DiptychError):
    """The disk is full or read-only while saving; what was saved before is untouched."""


class TrainingError(DiptychError):
    """A run that cannot go on."""


class MissingExtra(DiptychError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(
            f"{why} needs the package '{package}': install it with pip install 'diptych[{extra}]'."
        )


def import_extra(name: str, extra: str, why: str, package: str = "") -> Any:
    """The module ``name`` of an optional package, which the ``extra`` brings; ``why`` says what needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(package or name.partition(".")[0], extra, why) from error


WORKBENCH = ("torch", "transformers", "accelerate", "onnx")  # packages of the extra 'train'


def without_torch(error: ModuleNotFoundError, why: str, extra: str = "train") -> MissingExtra:
    """Which extra brings the package of the workbench that an import lacks; ``why`` says what needs it."""
    package = str(error.name).split(".")[0]
    if package not in WORKBENCH:
        raise error
    return MissingExtra(package, extra, why)


class Interrupted(Exception):
    """The run was interrupted and its state saved; the message says how to resume."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence alone, for nothing went wrong."""
        return [str(self)]


def reason_of(error: BaseException, most: int | None = None) -> str:
    """What an error says, in one line; ``most`` characters of it, for the inside of a sentence."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if most is None else line[:most].rstrip(".")


def one_of(value: T, what: str, kind: Any) -> T:
    """An argument, unless it is none of the values of a ``Literal``."""
    if value not in get_args(kind):
        raise SettingsError(f"{what} is '{value}': choose {', '.join(get_args(kind))}.")
    return value


def at_least(value: T, what: str, least: Any) -> T:
    """An argument, unless it is below its smallest value."""
    if not value >= least:
        raise SettingsError(f"{what} is {value}: give {least} or more.")
    return value


def between(value: float, what: str, low: float = 0, high: float = 1) -> float:
    """An argument, unless it lies outside an interval, whose ends belong to it."""
    if not low <= value <= high:
        raise SettingsError(f"{what} is {value}: give a number from {low:g} to {high:g}.")
    return value


def positive(value: T, what: str) -> T:
    """An argument, unless it is 0 or negative."""
    if not value > 0:  # type: ignore[operator]
        raise SettingsError(f"{what} is {value}: it must be greater than 0.")
    return value
