"""Parts that remember how they were made, so that a model folder rebuilds itself.

A class decorated with ``@part`` records its constructor arguments. ``describe`` turns a tree of parts into JSON,
``rebuild`` turns the JSON back into the tree. Weights travel apart, in safetensors; nothing is pickled.

An argument may be a JSON value, another part, a list or dict of these, or a path. A part whose arguments should
live in files of the model folder (a vocabulary, a tokenizer) defines ``save_assets(folder) -> {argument: value}``:
a string is the name of a file or folder it wrote there, recorded as ``{"asset": name}``, and ``rebuild`` passes the
parsed content of a ``.json`` asset or the path of any other; any other value replaces the argument (``False`` for
"load pretrained weights", since the weights travel with the model). Such a part also defines
``content_arguments() -> {argument: value}``: what stands for these arguments in a fingerprint (a digest of the
vocabulary, not where it lay), the same before saving and after loading.

A part may name arguments in ``LATER``: those it was given after models had been saved without them. They are left out
while they have their default, so that a description, and with it a fingerprint, stays what it was.

A part that is met twice in a tree (an encoder that both towers use) is written once, with a number, ``{"part": …,
"as": 1}``, and referred to afterwards as ``{"is": 1}``: the rebuilt tree shares it too. A part that does not belong to
this package also names its module, ``"from"``. All three are keywords of Python, so that no argument of a part can
be called that.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from diptych.entries import MODEL
from diptych.errors import CheckpointError, DiptychError
from diptych.names import fits, import_declared, import_plugins
from diptych.storage import parse_json

T = TypeVar("T")
PARTS: dict[tuple[str, str], type] = {}
"""The parts that were imported so far, by the module that defines them and their name."""
ROOMS = ("aggregators", "branches", "data", "encoders", "interaction", "model")
"""The folders whose files may define parts."""
DEFINED = re.compile(r"^@part\nclass (\w+)", re.MULTILINE)
LARGEST = 100_000_000  # number in a config.json: no size of a model is beyond it


def content_digest(content: str) -> str:
    """16 hex digits that stand for a text in ``content_arguments``."""
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def part(cls: type[T]) -> type[T]:
    """Register a class under its name and record the arguments of each instance."""
    key = (cls.__module__, cls.__name__)
    if key in PARTS:
        raise ValueError(f"two parts of {cls.__module__} are called {cls.__name__}")
    make = cls.__init__
    signature, names = inspect.signature(make), _parameters(make)

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        arguments = {name: call.arguments[name] for name in names}
        make(self, *args, **kwargs)
        # after construction: nn.Module refuses attributes before its own __init__ has run
        if type(self) is cls:
            object.__setattr__(self, "_arguments", arguments)

    cls.__init__ = init  # type: ignore[method-assign]
    PARTS[key] = cls
    return cls


def find_part(name: Any, module: Any = None) -> type | None:
    """The part of this name: one of this package, whose module is imported now, or one of a plugin.

    ``module`` is what the model folder says of a part that is not ours. It is compared with the parts that were
    imported, and never imported itself.
    """
    if module is None and name in (own := own_parts()):
        importlib.import_module(own[name])
        return PARTS[own[name], name]
    if (module, name) not in PARTS:
        import_plugins() if module is None else import_declared(module)
    if (module, name) in PARTS:
        return PARTS[module, name]
    # where the module moved inside its package, was the script that ran, or is not written
    package = "" if module in (None, "__main__") else module.partition(".")[0]
    alike = [kind for (_, known), kind in PARTS.items() if known == name and not _is_ours(kind)]
    near = [kind for kind in alike if package in ("", kind.__module__.partition(".")[0])]
    return near[0] if len(near) == 1 else None


@functools.cache
def own_parts() -> dict[str, str]:
    """The module that defines each part of this package, read from the sources: nothing is imported."""
    root = Path(__file__).parent
    found: dict[str, str] = {}
    for file in sorted(file for room in ROOMS for file in (root / room).rglob("*.py")):
        module = ".".join(("diptych", *file.relative_to(root).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for name in DEFINED.findall(file.read_text("utf-8")):
            if name in found:
                raise ValueError(f"{found[name]} and {module} both define the part {name}")
            found[name] = module
    return found


def describe(value: Any, folder: Path | None = None) -> Any:
    """JSON for a part tree; with ``folder``, assets are written there and referred to by name.

    Without ``folder`` nothing is written and the JSON identifies the tree by content.
    """
    meetings: Counter[int] = Counter()
    _count(value, meetings)
    return _Description(folder, {key for key, times in meetings.items() if times > 1}).of(value)


def _count(value: Any, meetings: Counter[int]) -> None:
    """How often each part is met in a tree; the inside of one is looked at once."""
    if hasattr(value, "_arguments"):
        meetings[id(value)] += 1
        if meetings[id(value)] == 1:
            _count(value._arguments, meetings)
    elif isinstance(value, dict):
        for one in value.values():
            _count(one, meetings)
    elif isinstance(value, list | tuple):
        for one in value:
            _count(one, meetings)


class _Description:
    """The JSON of a tree whose parts of these ids are ``shared``."""

    def __init__(self, folder: Path | None, shared: set[int]) -> None:
        self.folder, self.shared = folder, shared
        self.numbers: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        """JSON for a part, or for what an argument holds."""
        if hasattr(value, "_arguments"):
            return self._part(value)
        if isinstance(value, dict):
            return {str(k): self.of(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(v) for v in value]
        if isinstance(value, Path):
            return str(value)
        if value is None or isinstance(value, str | int | float | bool):
            return value
        raise TypeError(f"a part's argument cannot be written as JSON: {value!r}")

    def _part(self, value: Any) -> dict[str, Any]:
        if id(value) in self.numbers:
            return {"is": self.numbers[id(value)]}
        config: dict[str, Any] = {"part": type(value).__name__}
        if not _is_ours(type(value)):
            config["from"] = type(value).__module__
        if id(value) in self.shared:
            config["as"] = self.numbers[id(value)] = len(self.numbers) + 1
        arguments = dict(value._arguments)
        for name in getattr(value, "LATER", ()):
            if arguments[name] == inspect.signature(type(value)).parameters[name].default:
                del arguments[name]
        assets: dict[str, Any] = {}
        if self.folder is None:
            arguments.update(value.content_arguments() if hasattr(value, "content_arguments") else {})
        elif hasattr(value, "save_assets"):
            assets = value.save_assets(self.folder)
        for name, argument in arguments.items():
            saved = assets.get(name, argument)
            asset = name in assets and isinstance(saved, str)
            config[name] = {"asset": saved} if asset else self.of(saved)
        return config


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "diptych"


def rebuild(config: Any, folder: Path | None = None) -> Any:
    """The part tree that ``describe`` wrote, shared where it was shared; assets are read from ``folder``."""
    return _Rebuilder(folder).of(config)


class _Rebuilder:
    """A tree in the making, with the shared parts made so far by number."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.by_number: dict[Any, Any] = {}

    def of(self, config: Any) -> Any:
        """The part, asset or plain value that a piece of JSON stands for."""
        if isinstance(config, list):
            return [self.of(v) for v in config]
        if not isinstance(config, dict):
            return config
        if "asset" in config:
            return self._asset(config["asset"])
        if set(config) == {"is"}:
            if not isinstance(config["is"], int) or config["is"] not in self.by_number:
                raise CheckpointError(
                    f"this model refers to shared part {config['is']}, which its config.json does not describe: "
                    "copy the model again."
                )
            return self.by_number[config["is"]]
        if "part" in config:
            return self._part(config)
        return {k: self.of(v) for k, v in config.items()}

    def _part(self, config: dict[str, Any]) -> Any:
        name, module = config["part"], config.get("from")
        kind = find_part(name, module) if isinstance(name, str) and isinstance(module, str | None) else None
        if kind is None:
            raise CheckpointError(_unknown(name, module))
        arguments = {k: self.of(v) for k, v in config.items() if k not in ("part", "from", "as")}
        check_arguments(kind, arguments)
        try:
            thing = kind(**arguments)
        except DiptychError:
            raise
        except Exception as error:  # numbers that no such part can have
            raise CheckpointError(
                f"the part '{name}' cannot be made as config.json says ({type(error).__name__}: {error}): copy the "
                "model again, or update diptych."
            ) from error
        if "as" in config:
            if not isinstance(config["as"], int):
                raise CheckpointError(f"the shared part '{name}' has no number: copy the model again.")
            self.by_number[config["as"]] = thing
        return thing

    def _asset(self, name: Any) -> Any:
        if self.folder is None:
            raise CheckpointError(f"the asset '{name}' needs a model folder: pass the folder it lies in.")
        path = MODEL.path(self.folder, name, folders=True)
        try:
            if not path.exists():
                raise CheckpointError(f"{path} is missing: copy the whole folder, not only its weights.")
            return parse_json(MODEL.read(path)) if path.suffix == ".json" else path
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): copy the model again.") from error


def _parameters(make: Any) -> dict[str, inspect.Parameter]:
    """The arguments of a constructor; nn.Module's own (*args, **kwargs) are none."""
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = {name: p for name, p in inspect.signature(make).parameters.items() if p.kind not in open_ended}
    return dict(list(found.items())[1:])  # without self


def check_arguments(kind: type, arguments: Mapping[str, Any]) -> None:
    """Raise where arguments read from a file are not those that a part takes: names, and types as annotated."""
    make = kind.__init__  # type: ignore[misc]
    parameters = _parameters(make)
    wrong = next((name for name in arguments if name not in parameters), None)
    absent = next(
        (n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in arguments),
        None,
    )
    if wrong is not None or absent is not None:
        what = f"an argument {wrong!r:.60}, which it does not take" if wrong else f"no argument '{absent}'"
        raise CheckpointError(
            f"the part '{kind.__name__}' was saved by another version of diptych: config.json gives it {what}; copy "
            "the model again, or update diptych."
        )
    if (name := misfit(kind, arguments, LARGEST)) is not None:
        raise CheckpointError(
            f"config.json gives the argument {name} of the part '{kind.__name__}' the value {arguments[name]!r:.60}: "
            "copy the model again, or update diptych."
        )


def misfit(kind: type, arguments: Mapping[str, Any], largest: float | None = None) -> str | None:
    """The first argument whose value has not the type that the class asks for, or is beyond ``largest``."""
    try:
        hints = typing.get_type_hints(inspect.unwrap(kind.__init__))  # type: ignore[misc]
    except (NameError, TypeError):  # an annotation for the type checker only
        return None
    return next(
        (name for name in arguments if not fits(arguments[name], hints.get(name, Any), largest)), None
    )


def _unknown(name: object, module: object) -> str:
    if module is None:
        return f"this model uses a part called '{name}', which this version does not know: update diptych."
    return (
        f"this model uses the part '{name}' of the module '{module}', which is not imported: install that package and "
        f"set DIPTYCH_PLUGINS={module}, or import it before you load the model."
    )
