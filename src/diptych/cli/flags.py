"""How commands are made: flags from settings classes, groups from registries, advice on unknown options."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import os
import re
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from diptych.errors import SettingsError
from diptych.machine import is_writable
from diptych.names import Registry
from diptych.progress import printable
from diptych.settings import TrainingSettings, literal_choices, plain_type
from diptych.storage import expanded

if TYPE_CHECKING:
    from diptych.model.protocol import OpenedModel

Command = Callable[..., Any]


def settings_flags(
    kind: type[TrainingSettings], leave_out: Collection[str] = ()
) -> Callable[[Command], Command]:
    """One flag per setting: ``--learning_rate 5e-4``, ``--compile/--no_compile``; none given means its default."""
    hints = typing.get_type_hints(kind)

    def decorate(command: Command) -> Command:
        for entry in reversed([one for one in dataclasses.fields(kind) if one.name not in leave_out]):
            names = [f"--{entry.name}"]
            registry = entry.metadata["names"]
            names_help = f": {registry.choices}" if registry else ""
            options: dict[str, Any] = {
                "default": None,
                "help": f"{entry.metadata['help']}{names_help}  [{entry.default}]",
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


def option(name: str, help: str, default: Any = None, *, to: str = "", **more: Any) -> Command:
    """A flag, whose value goes to the argument ``to``; its help page says the default where it has one."""
    if default is not None:
        more |= {"default": default, "show_default": True}
    return click.option(name, to or name.lstrip("-"), help=help, **more)


def switch(name: str, help: str) -> Command:
    """A flag that holds unless ``--no_NAME`` is given."""
    return click.option(f"--{name}/--no_{name}", default=True, help=help)


def together(*flags: Command) -> Command:
    """Several flags as one decorator; the help page lists them in this order."""

    def decorate(command: Command) -> Command:
        for flag in reversed(flags):
            command = flag(command)
        return command

    return decorate


class _Output(click.Path):
    """A folder or a file to write: one that cannot be written is refused before the work."""

    def __init__(self, kind: Literal["folder", "file"]) -> None:
        super().__init__(path_type=Path)
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Its path."""
        path = expanded(os.fsdecode(super().convert(value, param, ctx)))
        if not (
            is_writable(path) if self.kind == "folder" else is_writable(path.parent) and not path.is_dir()
        ):
            self.fail(f"{printable(str(path))} cannot be written: choose another {self.kind}.", param, ctx)
        return path


PATH, OUTPUT, OUTPUT_FILE = click.Path(path_type=Path), _Output("folder"), _Output("file")
SEED = click.IntRange(0, 2**32 - 1)
shard_flag = click.option(
    "--shard", "part", metavar="I/N", help="only part I of N of the shards, as in 2/8: one process of N"
)
precision_flag = option(
    "--precision",
    "what a new index stores of a vector (default: float32)",
    type=click.Choice(["float32", "float16", "binary"]),
)
chance_flag = option(
    "--chance",
    "chance of a false match: a higher value marks more answers as matches "
    "(default: calibrated with captions of the collection, no cut-off if that fails)",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
)
index_flag = option(
    "--index", "folder or database URL of the index (default: the pictures' path with .index behind it)"
)
root_flag = click.option(
    "--root",
    "roots",
    multiple=True,
    type=PATH,
    help="show pictures from below this folder (default: the folders that you indexed on this machine); repeatable",
)
device_flags = together(
    option(
        "--device", "cuda, cuda:1, mps or cpu (auto: cuda where there is a GPU, else cpu; never mps)", "auto"
    ),
    option(
        "--compute_precision",
        "precision of encoding (no: float32; half: fp16 on a GPU, bf16 on a CPU)",
        "no",
        type=click.Choice(["no", "half", "bf16", "fp16"]),
    ),
)
backend_flags = together(
    device_flags,
    option(
        "--backend",
        "what runs the model (default: onnx on a CPU where the model has a runtime/, else torch)",
        type=click.Choice(["torch", "onnx"]),
    ),
)
column_flags = together(
    option("--image_column", "column of the table that names the image"),
    option("--text_column", "column of the table that holds the text"),
)


def columns_of(options: dict[str, Any]) -> str:
    """What the flags of ``column_flags`` say, which leave ``options``, as ``open_captions`` reads it behind a path."""
    columns = {name: options.pop(f"{name}_column") for name in ("image", "text")}
    return "&".join(f"{name}={value}" for name, value in columns.items() if value)


def with_columns(path: str, columns: str) -> str:
    """A path with the columns of its table behind it."""
    if not columns:
        return path
    from diptych.data.formats import split_options

    return f"{path}{'&' if split_options(path)[1] else '?'}{columns}"


def model_of(place: str | Path, options: dict[str, Any], **more: Any) -> OpenedModel:
    """The model at a place, run as the flags of ``backend_flags`` say, which leave ``options``."""
    from diptych.index.models import open_model

    device, precision, backend = backend_options(options).values()
    return open_model(place, device, precision, backend=backend, **more)


def backend_options(options: dict[str, Any]) -> dict[str, Any]:
    """The flags of ``backend_flags`` alone, which leave ``options``."""
    return {name: options.pop(name) for name in ("device", "compute_precision", "backend")}


def user_flags(values: dict[str, Any]) -> dict[str, Any]:
    """The flags the user really gave."""
    return {name: value for name, value in values.items() if value is not None}


class RegistryGroup(click.Group):
    """The commands of a registry; a plugin's stand behind those of this package."""

    registry: Registry

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.registry)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name, imported now."""
        command = self.registry.find(cmd_name)
        if not isinstance(command, click.Command):
            raise SettingsError(
                f"the {self.registry.kind} '{cmd_name}' is a {type(command).__name__}: let its plugin name a "
                "click.Command."
            )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the help of their entries, by section: a help page imports none of them."""
        entries = self.registry.entries()
        own = [entry for entry in entries if entry.name in self.registry.own]
        rest = [(entry.name, entry.help) for entry in entries if entry.name not in self.registry.own]
        for section, some in itertools.groupby(own, lambda entry: entry.section):
            with formatter.section(section.capitalize() or "Commands"):
                formatter.write_dl([(entry.name, entry.help) for entry in some])
        if rest:
            with formatter.section("Plugins"):
                formatter.write_dl(rest)


def advice(error: click.UsageError) -> str:
    """The sentence for arguments that a command does not take, with the option that was meant where one is near."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        near: list[str] = getattr(error, "possibilities", None) or []  # of a command that is not there
        if near:
            return f"{error.message.rstrip('.')}: did you mean {' or '.join(near)}?"
        extra = re.fullmatch(r"Got unexpected extra argument \((.+)\)", error.message)
        if extra and error.ctx and "--data" in options_of(error.ctx.command):
            return f"{extra[1]} needs an option before it: did you mean --data {extra[1]}?"
        if error.ctx and isinstance(error.ctx.command, click.Group) and "No such command" in error.message:
            names = ", ".join(error.ctx.command.list_commands(error.ctx))
            return f"{error.message.rstrip('.')}: choose one of {names}."
        return error.format_message()
    command, name = error.ctx.command, error.option_name
    known = options_of(command)
    near_options = nearest_options(name, known)
    if near_options:
        return f"there is no option {name}: did you mean {' or '.join(near_options)}?"
    below = _first_with(command, name)
    if below is not None:
        path = error.ctx.command_path
        return f"{path} needs a name before {name}: as in {path} {below} {name} …"
    return f"there is no option {name} here: choose among those of the help page."


def nearest_options(name: str, known: list[str]) -> list[str]:
    """The options among those known that a wrong one stands for, in words or in letters; at most two."""
    bare = plain(name)
    by_name = {plain(option): option for option in known}
    # words of other programs, and the options here that they may mean, best first
    synonyms = json.loads(Path(__file__).with_name("synonyms.json").read_text("utf-8"))
    words = [bare, *synonyms.get(bare, ())]
    matches = [by_name[word] for word in words if word in by_name and by_name[word] != name]
    if matches:
        return matches[:1]
    near = difflib.get_close_matches(bare, by_name, n=2, cutoff=0.7)
    return [by_name[word] for word in near]


def plain(option: str) -> str:
    """An option without its dashes: ``--no-train-text`` → ``no_train_text``."""
    return option.lstrip("-").replace("-", "_")


def options_of(command: click.Command) -> list[str]:
    """The options of a command as they are written."""
    return [
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    ]


def _first_with(command: click.Command, name: str) -> str | None:
    """The first command below a group that has an option."""
    if not isinstance(command, click.Group):
        return None
    context = click.Context(command)
    below = ((at, command.get_command(context, at)) for at in command.list_commands(context))
    return next((at for at, one in below if one and plain(name) in map(plain, options_of(one))), None)
