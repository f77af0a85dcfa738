"""index, search."""

from __future__ import annotations

import click


@click.group()
def index() -> None:
    """Index."""


@click.command()
def search() -> None:
    """Search."""
