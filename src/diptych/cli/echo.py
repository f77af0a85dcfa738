"""How every command prints."""

from __future__ import annotations

import click

from diptych.progress import printable


def echo(text: object = "", err: bool = False, nl: bool = True) -> None:
    """Print a text whose control characters are made visible; lines and tabs stay."""
    click.echo(printable(str(text), keep="\n\t"), err=err, nl=nl)
