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
"""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any, TypeVar

from diptych.errors import CheckpointError

T = TypeVar("T")
PARTS: dict[str, type] = {}


def part(cls: type[T]) -> type[T]:
    """Register a class under its name and record the arguments of each instance."""
    if cls.__name__ in PARTS:
        raise ValueError(f"two parts are called {cls.__name__}")
    make = cls.__init__
    signature = inspect.signature(make)
    # a class without its own __init__ shows nn.Module's (*args, **kwargs), which is no argument of it
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, p in signature.parameters.items() if p.kind not in open_ended][1:]

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = {name: bound.arguments[name] for name in named}
        make(self, *args, **kwargs)
        # after construction: nn.Module refuses attributes before its own __init__ has run
        if type(self) is cls:
            object.__setattr__(self, "_arguments", arguments)

    cls.__init__ = init  # type: ignore[method-assign]
    PARTS[cls.__name__] = cls
    return cls


def describe(value: Any, folder: Path | None = None) -> Any:
    """JSON for a part tree; with ``folder``, assets are written there and referred to by name.

    Without ``folder`` nothing is written and the JSON identifies the tree by content.
    """
    if hasattr(value, "_arguments"):
        arguments = dict(value._arguments)
        assets: dict[str, Any] = {}
        if folder is None:
            arguments.update(value.content_arguments() if hasattr(value, "content_arguments") else {})
        elif hasattr(value, "save_assets"):
            assets = value.save_assets(folder)
        config: dict[str, Any] = {"part": type(value).__name__}
        for name, argument in arguments.items():
            saved = assets.get(name, argument)
            config[name] = (
                {"asset": saved} if name in assets and isinstance(saved, str) else describe(saved, folder)
            )
        return config
    if isinstance(value, dict):
        return {str(k): describe(v, folder) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [describe(v, folder) for v in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"a part's argument cannot be written as JSON: {value!r}")


def rebuild(config: Any, folder: Path | None = None) -> Any:
    """The part tree that ``describe`` wrote; assets are read from ``folder``."""
    if isinstance(config, dict) and "asset" in config:
        if folder is None:
            raise CheckpointError(
                f"the asset '{config['asset']}' needs a model folder: pass the folder it lies in."
            )
        path = folder / config["asset"]
        if not path.exists():
            raise CheckpointError(f"{path} is missing: copy the whole model folder, not only its weights.")
        try:
            return json.loads(path.read_text("utf-8")) if path.suffix == ".json" else path
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error}): copy the model again.") from error
    if isinstance(config, dict) and "part" in config:
        name = config["part"]
        if name not in PARTS:
            raise CheckpointError(f"this model uses a part called '{name}', unknown here: update diptych.")
        arguments = {k: rebuild(v, folder) for k, v in config.items() if k != "part"}
        try:
            return PARTS[name](**arguments)
        except TypeError as error:
            raise CheckpointError(
                f"the part '{name}' was saved by another version of diptych ({error})."
            ) from error
    if isinstance(config, dict):
        return {k: rebuild(v, folder) for k, v in config.items()}
    if isinstance(config, list):
        return [rebuild(v, folder) for v in config]
    return config
