"""What a name stands for: registries of the things that flags name, and plugins.

A ``Registry`` holds the names of one kind of thing: those of this package, those that installed packages declare as
entry points of its group, and those that a plugin adds while it runs. Entry points are read as metadata; a target is
imported when it is used. Where a person types a name, ``module:Class`` names a class of any module.

What is saved never makes a module run: a part or a setting of another package is taken from a file only where that
package was imported already or is declared. ``DIPTYCH_PLUGINS`` declares modules (several with commas), an installed
package declares its own with entry points of the group ``diptych.plugins`` or of any registry's group.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from diptych.errors import SettingsError

PLUGINS = "diptych.plugins"
"""The group of entry points that are modules to import, for whatever they add."""
PREFIXES = ("hf:", "timm:", "open_clip:")
"""What names of pretrained models start with; none of them is a module."""
MODULE_CLASS = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*")


@dataclass(frozen=True)
class Entry:
    """A name, one line of help, and what it stands for: ``module:attribute``, a module, or the thing itself.

    ``signs`` of a data format are endings of names, in lower case: a path without any of them is not in the format.
    """

    name: str
    help: str
    target: Any
    section: str = ""
    signs: tuple[str, ...] = ()


class Registry:
    """The names of one kind of thing.

    ``forms`` are further ways to write one, such as ``hf:ID`` or "a model folder", which whoever uses the registry
    reads. ``bases`` are the classes that things of this kind derive from, as ``module:Class``. Where ``typed`` is off,
    nobody can write ``module:Class``. With ``terms`` a setting holds several names, in a sum.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        entries: Iterable[Entry],
        *,
        forms: Sequence[str] = (),
        bases: Sequence[str] = (),
        typed: bool = True,
        terms: bool = False,
    ) -> None:
        self.kind, self.group, self.forms, self.bases = kind, f"diptych.{group}", tuple(forms), tuple(bases)
        self.typed, self.terms = typed, terms
        self.own = {entry.name: entry for entry in entries}
        self.added: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[str]:
        """Every name that is known without an import: the package's, those added, those of entry points."""
        return iter(dict.fromkeys([*self.own, *self.added, *(point.name for point in _points(self.group))]))

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __setitem__(self, name: str, target: Any) -> None:
        """Add a name while running; ``target`` is the thing, or where it is: ``module:attribute``."""
        if name in self.own or (name in self.added and self.added[name].target != target):
            raise SettingsError(
                f"there is a {self.kind} '{name}' already: give the one that a plugin adds another name."
            )
        self.added[name] = Entry(name, first_line(target), target)

    def __getitem__(self, name: str) -> Any:
        return self.find(name)

    @property
    def choices(self) -> str:
        """What may be written, for help pages and messages."""
        words = [*self, *self.forms, *(["module:Class"] if self.typed else [])]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))

    def entries(self) -> list[Entry]:
        """Every name with its help, without an import; a plugin's says which package it is of."""
        known = {**self.own, **self.added}
        plugins = {
            point.name: Entry(point.name, f"From the package {_package(point)}.", point.value)
            for point in _points(self.group)
        }
        return [known.get(name) or plugins[name] for name in self]

    def is_foreign(self, name: str) -> bool:
        """Whether a name is ``module:Class``, and nothing that this registry reads in another way."""
        return (
            self.typed
            and name not in self
            and not name.startswith(PREFIXES)
            and MODULE_CLASS.fullmatch(name) is not None
        )

    def check(self, name: str) -> None:
        """Refuse a name that nothing has; nothing is imported for one that is known or is ``module:Class``."""
        if name not in self and not self.is_foreign(name):
            import_plugins()
            if name not in self:
                raise self.unknown(name)

    def check_saved(self, value: str) -> None:
        """Refuse a name of a saved setting that would import a module which nothing but the file names."""
        for name in re.split(r"[-+*\s(),=]+", value) if self.terms else [value]:
            module = name.partition(":")[0]
            if self.is_foreign(name) and module not in sys.modules and not _is_declared(module):
                raise SettingsError(
                    f"the saved settings name the {self.kind} '{name}', and a file does not make its module run: give "
                    f"the flag again, or set DIPTYCH_PLUGINS={module}."
                )

    def find(self, name: str) -> Any:
        """What a name stands for, imported now."""
        self.check(name)
        entry = self.own.get(name) or self.added.get(name)
        if entry is not None:
            return _target(entry.target) if isinstance(entry.target, str) else entry.target
        points = [point for point in _points(self.group) if point.name == name]
        if len(points) > 1:
            packages = " and ".join(sorted(_package(point) for point in points))
            raise SettingsError(
                f"the packages {packages} both have a {self.kind} '{name}': uninstall one of them"
                + (f", or write {points[0].value}." if self.typed else ".")
            )
        return _load(points[0]) if points else self._import_class(name)

    def get(self, name: str) -> Any | None:
        """What a name stands for, or None where neither this package nor a plugin has it."""
        if name not in self:
            import_plugins()
        return self.find(name) if name in self else None

    def make(self, name: str, settings: Any = None, **given: Any) -> Any:
        """The thing of a name, made by its class or function.

        Arguments are ``given`` where they have that name. A required argument is the setting of that name, or all
        settings where it is called ``settings``; others keep their defaults.
        """
        thing = call(self.find(name), f"the {self.kind} {name}", settings, **given)
        if self.bases and not isinstance(thing, self._kinds()):
            raise SettingsError(
                f"the {self.kind} '{name}' makes a {type(thing).__name__}: let it make a {self._kind_names()}."
            )
        return thing

    def unknown(self, name: str) -> SettingsError:
        """The refusal of a name that nothing has."""
        return unknown_name(self.kind, name, list(self), self.choices)

    def _import_class(self, name: str) -> Any:
        """The class that a person named as ``module:Class``."""
        module, _, path = name.partition(":")
        try:
            target = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
                raise _broken(f"the module '{module}'", error) from error
            prefix = f", or use {', '.join(self.forms)}" if self.forms else ""
            raise SettingsError(
                f"there is no module '{module}' for the {self.kind} '{name}': install its package or put its folder "
                f"on PYTHONPATH{prefix}."
            ) from error
        for part in path.split("."):
            if not hasattr(target, part):
                near = ", ".join(sorted(kind for kind in vars(target) if kind.lower() == part.lower()))
                raise SettingsError(
                    f"the module '{module}' has no '{path}' for the {self.kind} '{name}': "
                    f"{f'did you mean {near}?' if near else 'name a class that it defines.'}"
                )
            target = getattr(target, part)
        if self.bases and not (isinstance(target, type) and issubclass(target, self._kinds())):
            raise SettingsError(f"{name} is no {self.kind}: name a class derived from {self._kind_names()}.")
        return target

    def _kinds(self) -> tuple[type, ...]:
        return tuple(_target(base) for base in self.bases)

    def _kind_names(self) -> str:
        return " or ".join(base.replace(":", ".") for base in self.bases)


def unknown_name(kind: str, name: str, names: Sequence[str], choices: str = "") -> SettingsError:
    """The refusal of a name that nothing has, with the nearest, or else all that may be written."""
    import difflib

    near = difflib.get_close_matches(name, names, n=1)
    advice = f"did you mean {near[0]}?" if near else f"use {choices or ', '.join(names)}."
    return SettingsError(f"there is no {kind} '{name}': {advice}")


def call(make: Any, what: str, settings: Any = None, **given: Any) -> Any:
    """What a class or function makes of the arguments it asks for; see ``Registry.make``."""
    arguments = {}
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in given:
            arguments[name] = given[name]
        elif parameter.default is parameter.empty:
            if name != "settings" and not hasattr(settings, name):
                raise SettingsError(
                    f"{what} needs the argument '{name}', which is no setting here: give it a default value."
                )
            arguments[name] = settings if name == "settings" else getattr(settings, name)
    return make(**arguments)


def fits(value: Any, hint: Any, largest: float | None = None) -> bool:
    """Whether a value has the type of an annotation, as far as that can be said, and no number beyond ``largest``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one, largest) for one in inner)
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if hint is None or hint is type(None):
        return value is None
    if hint in (int, float):
        number = isinstance(value, int) or (hint is float and isinstance(value, float))
        # the comparison is false for NaN too
        return number and not isinstance(value, bool) and (largest is None or abs(value) <= largest)
    if hint is Path:
        return isinstance(value, str | Path)
    if origin in (list, tuple, Sequence, Iterable):
        kinds = set(inner) - {...}
        alike = next(iter(kinds)) if len(kinds) == 1 else Any
        return isinstance(value, list | tuple) and all(fits(one, alike, largest) for one in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(fits(one, inner[1], largest) for one in value.values())
    if isinstance(origin or hint, type):
        try:
            return isinstance(value, origin or hint)
        except TypeError:  # a protocol
            return True
    return True


def first_line(thing: Any) -> str:
    """The first line of the docstring of a thing; nothing for one that has none."""
    doc = None if isinstance(thing, str) else inspect.getdoc(thing)
    return (doc or "").partition("\n")[0]


def import_plugins() -> None:
    """Import the modules that ``DIPTYCH_PLUGINS`` and entry points of the group ``diptych.plugins`` name."""
    for name in _named_modules():
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            remedy = "correct the name or the module, or put its folder on PYTHONPATH"
            raise _broken(f"DIPTYCH_PLUGINS names '{name}', which", error, remedy) from error
    for point in _points(PLUGINS):
        _load(point)


def import_declared(module: str) -> None:
    """Import the plugins that may define a part of ``module``: never that module itself because a file names it."""
    import_plugins()
    declared = {point.module: point for point in _points() if _top(point.module) == _top(module)}
    for point in [declared[module]] if module in declared else declared.values():
        _load(point)


def _is_declared(module: str) -> bool:
    """Whether a user or an installed package asked for a module."""
    declared = [*_named_modules(), *(point.module for point in _points())]
    return any(f"{name}.".startswith(f"{module}.") for name in declared)


def _named_modules() -> list[str]:
    names = (name.strip() for name in os.environ.get("DIPTYCH_PLUGINS", "").split(","))
    return [name for name in names if name]


def _points(group: str = "") -> list[EntryPoint]:
    """The entry points of a group, or of all groups of this package; metadata alone is read."""
    return [point for point in _all_points(tuple(sys.path)) if not group or point.group == group]


@functools.lru_cache(maxsize=1)
def _all_points(path: tuple[str, ...]) -> list[EntryPoint]:
    """Every entry point of a group ``diptych.…``, while ``sys.path`` stays as it is."""
    found = entry_points()
    groups = sorted(group for group in found.groups if group.startswith("diptych."))
    return [point for group in groups for point in found.select(group=group)]


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        what = f"the plugin '{point.name}' ({point.value}) of the package {_package(point)}"
        raise _broken(what, error) from error


def _broken(what: str, error: BaseException, remedy: str = "correct or uninstall it") -> SettingsError:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return SettingsError(f"{what} cannot be imported ({reason}): {remedy}.")


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.module


def _top(module: str) -> str:
    return module.partition(".")[0]


def _target(target: str) -> Any:
    """What ``module:attribute`` names, or a module."""
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    return functools.reduce(getattr, path.split("."), found) if path else found
