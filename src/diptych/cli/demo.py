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
    help="folder of the runs, the index and the report",
)
def demo(output_dir: Path) -> None:
    """Train two models on emoji pictures, search them, write a report. A second run reuses what is there."""
    click.echo(f"demo: two models, an index and a report, in {output_dir}; loading the libraries", err=True)
    from diptych.runs.demo import run_demo

    run_demo(output_dir)
