"""How commands are made: flags from settings classes, groups from registries, advice on unknown options."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import typing
from collections.abc import Callable, Collection
from typing import Any

import click

from diptych.errors import SettingsError
from diptych.names import Registry
from diptych.progress import echo
from diptych.settings import TrainingSettings, literal_choices, plain_type

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


class Registered(click.Group):
    """The commands of a registry; a plugin's stand behind those of this package."""

    registry: Registry

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, from metadata alone."""
        return list(self.registry)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name, imported now."""
        found = self.registry.find(cmd_name)
        if not isinstance(found, click.Command):
            raise SettingsError(
                f"the {self.registry.kind} '{cmd_name}' is a {type(found).__name__}: let its plugin name a "
                "click.Command."
            )
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments start with; a name that is none of them gets the nearest one as advice."""
        if args and not args[0].startswith("-"):
            try:
                self.registry.check(args[0])
            except SettingsError as error:
                ctx.fail(str(error))
        return super().resolve_command(ctx, args)

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


MEANT = {
    "lr": ("learning_rate",),
    "bs": ("batch_size",),
    "epoch": ("epochs",),
    "n": ("k", "count", "limit"),
    "num": ("k", "count", "limit"),
    "top": ("k",),
    "top_k": ("k",),
    "limit": ("k",),
    "out": ("output_dir", "output"),
    "output": ("output_dir",),
    "output_dir": ("output",),
    "save_dir": ("output_dir",),
    "resume": ("resume_from_checkpoint",),
    "checkpoint": ("resume_from_checkpoint",),
    "dataset": ("data",),
    "wd": ("weight_decay",),
    "where": ("filter",),
    "urls": ("allow_urls",),
    "gpu": ("device",),
    "cuda": ("device",),
    "fp16": ("compute_precision", "mixed_precision"),
    "bf16": ("compute_precision", "mixed_precision"),
    "freeze_text": ("no_train_text",),
    "freeze_image": ("no_train_image",),
}
"""Words that people bring from other programs, and the options here that they may mean, best first."""


def advice(error: click.UsageError) -> str:
    """The sentence for arguments that a command does not take, with the option that was meant where one is near."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        near: list[str] = getattr(error, "possibilities", None) or []  # of a command that is not there
        return (
            f"{error.message.rstrip('.')}: did you mean {' or '.join(near)}?"
            if near
            else error.format_message()
        )
    command, name = error.ctx.command, error.option_name
    known = options_of(command)
    found = meant(name, known)
    if found:
        return f"there is no option {name}: did you mean {' or '.join(found)}?"
    below = _first_with(command, name)
    if below is not None:
        path = error.ctx.command_path
        return f"{path} needs a name before {name}: as in {path} {below} {name} …"
    return f"there is no option {name} here: choose among those of the help page."


def meant(name: str, known: list[str]) -> list[str]:
    """The options among those known that a wrong one stands for, in words or in letters; at most two."""
    bare = plain(name)
    by_name = {plain(option): option for option in known}
    wanted = [bare, *MEANT.get(bare, ())]
    found = [by_name[word] for word in wanted if word in by_name and by_name[word] != name]
    if found:
        return found[:1]
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
