"""demo."""

from __future__ import annotations

from pathlib import Path

import click

from diptych.cli.flags import one_sentence


@click.command()
@click.option(
    "--output_dir", "--output-dir", default="demo", show_default=True, type=click.Path(path_type=Path)
)
@one_sentence
def demo(output_dir: Path) -> None:
    """Train VSE∞ on emoji pictures, evaluate, index, search, and write demo/report.html."""
    from diptych.recipes.demo import run_demo

    run_demo(output_dir)
