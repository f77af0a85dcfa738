"""audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from diptych.cli.flags import column_flags, with_columns


@click.command()
@click.argument("data")
@click.option("--split", help="split to audit (default: all, with leaks between them)")
@click.option("--model", help="a run or model folder whose vectors are used (default: frozen encoders)")
@click.option("--image_size", default=224, show_default=True, help="pixels of the square that Lite0 reads")
@click.option(
    "--output_dir",
    default="audit",
    show_default=True,
    type=click.Path(path_type=Path),
    help="folder for audit.json, the page audit.html and suggested.csv",
)
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, mps or cpu")
@column_flags
def audit(
    data: str, output_dir: Path, image_column: str | None, text_column: str | None, **options: Any
) -> None:
    """List wrong pairs, missing positives, leaks and empty texts. No training; the data stay as they are.

    The page audit.html asks a person about the worst pairs and saves corrections.csv, which every command reads:
    DATA?corrections=corrections.csv. Files and formats are the business of diptych data check.
    """
    from diptych.runs.audit import audit as run

    found = run(with_columns(data, image_column, text_column), **options)
    found.save(output_dir)
    click.echo("\n".join(found.lines()))
    click.echo(
        f"pictures and texts, worst first: {output_dir / 'audit.html'}; all of it: {output_dir / 'audit.json'}"
    )
