"""Flags made from settings classes."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import click

from diptych.cli.echo import echo
from diptych.settings import TrainingSettings, literal_choices, plain_type

Command = Callable[..., Any]


def settings_flags(kind: type[TrainingSettings]) -> Callable[[Command], Command]:
    """One flag per setting: ``--learning_rate 5e-4``, ``--compile/--no_compile``; none given means its default."""
    hints = typing.get_type_hints(kind)

    def decorate(command: Command) -> Command:
        for entry in reversed(dataclasses.fields(kind)):
            names = [f"--{entry.name}"]
            registry = entry.metadata["names"]
            known = f": {registry.choices}" if registry else ""
            options: dict[str, Any] = {
                "default": None,
                "help": f"{entry.metadata['help']}{known}  [{entry.default}]",
            }
            choices, kind_of = literal_choices(hints[entry.name]), plain_type(hints[entry.name])
            if kind_of is bool:
                names = ["/".join([f"--{entry.name}", f"--no_{entry.name}"])]
                options["is_flag"] = True
            elif choices:
                options["type"] = click.Choice(choices)
            else:
                options["type"] = kind_of
            command = click.option(*names, entry.name, **options)(command)
        return command

    return decorate


def index_flag(command: Command) -> Command:
    """``--index``: where the index of a collection is."""
    return click.option(
        "--index",
        help="folder or database URL of the index (default: the pictures' path with .index behind it)",
    )(command)


def backend_flags(command: Command) -> Command:
    """``--backend``, and what torch's takes: ``--device`` and ``--compute_precision``."""
    command = click.option(
        "--backend",
        type=click.Choice(["torch", "onnx"]),
        help="what runs the model (default: onnx on a CPU where the model has a runtime/, else torch)",
    )(command)
    return device_flags(command)


def device_flags(command: Command) -> Command:
    """``--device`` and ``--compute_precision``: where a model runs, and in which precision its products are."""
    command = click.option(
        "--compute_precision",
        default="no",
        show_default=True,
        type=click.Choice(["no", "half", "bf16", "fp16"]),
        help="precision of encoding (no: float32; half: fp16 on a GPU, bf16 on a CPU)",
    )(command)
    return click.option(
        "--device",
        default="auto",
        show_default=True,
        help="cuda, cuda:1, mps or cpu (auto: cuda where there is a GPU, else cpu; never mps)",
    )(command)


def column_flags(command: Command) -> Command:
    """``--image_column`` and ``--text_column``: what the columns of a table are called."""
    command = click.option("--text_column", help="column of the table that holds the text")(command)
    return click.option("--image_column", help="column of the table that names the image")(command)


def with_columns(path: str, image_column: str | None, text_column: str | None) -> str:
    """A path with the columns of its table behind it, as ``open_captions`` reads them."""
    given = [f"{name}={value}" for name, value in (("image", image_column), ("text", text_column)) if value]
    if not given:
        return path
    from diptych.data.formats import divided

    return f"{path}{'&' if divided(path)[1] else '?'}{'&'.join(given)}"


def say_device(device: Any) -> None:
    """Tell the user where a model runs, beside the answers."""
    name = str(device)
    if name.startswith("cuda"):
        from diptych.devices import describe_device

        name = describe_device(name)
    echo(f"device: {name}", err=True)


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The flags the user really gave."""
    return {name: value for name, value in values.items() if value is not None}
