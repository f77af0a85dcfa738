"""Every format that is read, and opening whatever a path holds."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from diptych.data.captions import Captions, canonical_split
from diptych.data.decode.extra_formats import left_out_by_kind
from diptych.data.decode.opening import is_special
from diptych.data.files import find_files
from diptych.data.problems import Problems
from diptych.errors import DataError, DiptychError, SettingsError
from diptych.names import call, first_line, import_plugins
from diptych.registries import READERS
from diptych.storage import expanded


@dataclass(frozen=True)
class Format:
    """A data format: how it is called, what it looks like, and its reader.

    ``splits`` lists the splits of a path for a reader that can read one alone (``read(path, split=...)``). ``given``
    are its options where its signature does not show them.
    """

    name: str
    description: str
    matches: Callable[[Path], object]
    read: Callable[..., Captions]
    splits: Callable[[Path], Iterable[str]] | None = None
    given: Sequence[str] | None = None

    @property
    def options(self) -> list[str]:
        hidden = {"path", "split", "problems"}
        own = inspect.signature(self.read).parameters if self.given is None else self.given
        return [*(name for name in own if name not in hidden), *FURTHER]

    def captions(self, place: Path, options: Mapping[str, Any], problems: Problems | None = None) -> Captions:
        """Read ``place``; the options that every format has are applied to what its reader gives.

        A reader that looks for faults tells ``problems`` of them.
        """
        own = {name: value for name, value in options.items() if name not in FURTHER}
        if problems is not None and "problems" in inspect.signature(self.read).parameters:
            own["problems"] = problems
        captions = self._read(place, own)
        for name, (module, function) in FURTHER.items():
            if name in options:
                captions = getattr(import_module(module), function)(captions, str(options[name]))
        return captions

    def _read(self, place: Path, options: Mapping[str, Any]) -> Captions:
        """What the reader gives; whatever else it raises for a file that nobody foresaw becomes one sentence."""
        try:
            return self.read(place, **options)
        except DiptychError:
            raise
        except Exception as error:
            # a file holds what it holds: a list where an object was expected, no line at all
            reason = f"{type(error).__name__}: {error}"[:300]
            raise DataError(f"{place} cannot be read as {self.name} ({reason}): check it.") from error

    def refuse_unknown(self, options: Iterable[str]) -> None:
        for name in options:
            if name not in self.options:
                known = ", ".join(self.options) or "none"
                raise SettingsError(f"the format '{self.name}' has no option '{name}': it has {known}.")


COLUMNS = ("image", "text")
"""Options that name the columns of a table."""

FURTHER = {
    "instances": ("diptych.data.labels", "with_instances"),
    "unlabelled": ("diptych.data.labels", "drop_unlabelled"),
    "corrections": ("diptych.data.corrections", "apply_corrections"),
}
"""Options of every format: the folder of COCO's instance annotations, what to do with images without a label, and a
file of corrections (``data.corrections``), which is about the whole data set."""


def formats() -> list[Format]:
    """Every format in the order they are tried: those of plugins, then the more particular of this package first."""
    import_plugins()
    return [format_named(name) for name in sorted(READERS, key=lambda name: name in READERS.own)]


def _formats_of(place: Path) -> Iterator[Format]:
    """The formats of a path, in the order they are tried; a reader whose signs are not there is not imported."""
    import_plugins()
    names = _names(place)
    for name in sorted(READERS, key=lambda name: name in READERS.own):
        signs = READERS.own[name].signs if name in READERS.own else ()
        if not signs or any(one.endswith(signs) for one in names):
            entry = format_named(name)
            if entry.matches(place):
                yield entry


def _names(place: Path) -> list[str]:
    """What signs are looked for in, in lower case: the name of a file or pattern, the names inside a folder."""
    try:
        with os.scandir(place) as inside:
            return [f"{one.name}/".lower() if one.is_dir() else one.name.lower() for one in inside]
    except OSError:
        return [place.name.lower()]


def format_named(name: str) -> Format:
    """A format by its name.

    A reader is a ``Format``, or a module or object with ``matches``, ``read`` and, if one split can be read alone,
    ``parts``.
    """
    reader = READERS.find(name)
    if isinstance(reader, Format):
        return reader
    if isinstance(reader, type):
        reader = call(reader, f"the format {name}")
    if not (hasattr(reader, "matches") and hasattr(reader, "read")):
        raise SettingsError(f"the format '{name}' has no reader: give it 'matches' and 'read'.")
    description = READERS.own[name].help if name in READERS.own else first_line(reader)
    splits, options = getattr(reader, "parts", None), getattr(reader, "options", None)
    return Format(name, description, reader.matches, reader.read, splits, options)


def open_captions(
    path: str | Path,
    *,
    split: str | None = None,
    format: str | None = None,
    problems: Problems | None = None,
    **options: Any,
) -> Captions:
    """Read a data set of any known format; ``split`` keeps one split, ``options`` go to its reader.

    Options may also stand behind the path: ``photos.csv?empty=drop&images=~/photos``. ``problems`` is told what is
    wrong with the data by every reader that looks; without it the first fault is an error.

    Example::

        captions = diptych.open_captions("photos", split="train")
        print(captions.texts[0])
    """
    path, own = split_options(path)
    options = {**own, **options}
    data_format = find(path, format, options)
    data_format.refuse_unknown(options)
    if split is not None and data_format.splits is not None and "corrections" not in options:
        options["split"] = canonical_split(split)
    captions = data_format.captions(expanded(path), options, problems)
    return captions if split is None else captions.split(canonical_split(split))


def separate_splits(path: str | Path) -> list[str]:
    """The splits of a path that can be read one by one, without the files of the others; none in most formats."""
    place, options = split_options(path)
    data_format = find(place, None, options)
    return [] if data_format.splits is None else list(data_format.splits(expanded(place)))


_OPTIONS = re.compile(r"(?P<path>.+?)\?(?P<options>\w+=[^&?]*(&\w+=[^&?]*)*)$")


def split_options(path: str | Path) -> tuple[str | Path, dict[str, Any]]:
    """A path and the options behind it, ``PATH?name=value&name=value``: numbers and true or false as such."""
    match = _OPTIONS.match(str(path))
    if match is None or Path(path).exists():
        return path, {}
    options: dict[str, Any] = {}
    for name, value in (pair.split("=", 1) for pair in match["options"].split("&")):
        if options.setdefault(name, _plain(value)) != _plain(value):
            raise DataError(f"{path} gives {name} twice: give it once.")
    return match["path"], options


def _plain(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text


def recognise(path: str | Path) -> str | None:
    """The name of the format a path holds, or None."""
    return next((entry.name for entry in _formats_of(expanded(path))), None)


def find(path: str | Path, name: str | None = None, options: Mapping[str, Any] | None = None) -> Format:
    """The format of a path (or the one called ``name``), or an error that says what was looked for.

    Where ``options`` name columns, a table is looked for that has them.
    """
    columns = {column: value for column, value in (options or {}).items() if column in COLUMNS}
    if name is not None:
        data_format = format_named(name)
        if not data_format.matches(expanded(path)) and not (columns and data_format.name == "manifest"):
            raise DataError(f"{path} is not in the format '{name}': expected {data_format.description}.")
        return data_format
    place = expanded(path)
    for file in (place, *(sorted(place.iterdir()) if place.is_dir() else ())):
        if is_special(file):
            raise DataError(f"{file} is a pipe or a device, which may have no end: move it out of the data.")
    if columns:
        from diptych.data.readers import manifest

        if manifest.tables(place):
            return format_named("manifest")
    found = next(_formats_of(place), None)
    if found is not None:
        return found
    if not place.exists():
        raise DataError(f"{path} does not exist: give the path of a data set, or 'emoji', the built-in one.")
    if unread := left_out_by_kind(find_files(place) if place.is_dir() else [place.name]):
        raise DataError(f"{path} holds no picture that can be read: {' '.join(unread)}")
    from diptych.data.readers.manifest import not_understood

    if table := not_understood(place):
        raise DataError(table)
    what = "no picture and no data set that is known" if place.is_dir() else "no data set that is known"
    raise DataError(
        f"{path} holds {what}{_hint(place)}: give a folder of pictures, a table of images and texts, or what "
        "'diptych data formats' lists."
    )


def _hint(place: Path) -> str:
    """Sub-folders that are data sets, for a path one level too high."""
    if not place.is_dir():
        return ""
    below = sorted(child for child in place.iterdir() if child.is_dir() and recognise(child))
    return f" (but {', '.join(str(child) for child in below)} would be read)" if below else ""
