"""demo."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--output_dir",
    default="demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="folder of the run, the index and the report",
)
def demo(output_dir: Path) -> None:
    """Train VSE∞ on emoji pictures, search them, write a report. A second run reuses what is there."""
    from diptych.runs.demo import run_demo

    run_demo(output_dir)
