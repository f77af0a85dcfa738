"""reproduce."""

from __future__ import annotations

from pathlib import Path

import click

from diptych.cli.collection import echo


@click.group()
def reproduce() -> None:
    """Reproduce an experiment of a paper that needs no data."""


@reproduce.command("vse-infinity")
@click.option("--table", required=True, type=click.Choice(["6"]), help="6: the synthetic pooling experiment")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="runs per cell")
@click.option("--output", type=click.Path(path_type=Path), help="also save the numbers as JSON")
def reproduce_vse_infinity(table: str, seeds: int, output: Path | None) -> None:
    """How well each design of GPO learns known poolings (VSE∞)."""
    from diptych.runs import synthetic_pooling

    echo(synthetic_pooling.reproduce(seeds=seeds, output=output))
