"""What was meant: advice for an option that a command does not have."""

from __future__ import annotations

import difflib

import click

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
