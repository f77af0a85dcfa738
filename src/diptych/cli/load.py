"""index load: files of vectors into an index."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from diptych.cli.echo import echo
from diptych.progress import counted


@click.command()
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--index", "place", required=True, help="folder or database URL of the index")
@click.option(
    "--shard", "part", metavar="I/N", help="load part I of N of the shards, as in 2/8: one process of N"
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "float16", "binary"]),
    help="what a new index stores of a vector (default: float32)",
)
@click.option(
    "--approximate/--exact",
    default=None,
    help="make an approximate index at the end, or none (default: from 200,000 items of a kind on, without --shard)",
)
def load(out: Path, place: str, part: str | None, precision: Any, approximate: bool | None) -> None:
    """Fill an index with what diptych embed wrote. Run again to continue.

    What the index holds already is left as it is, so a loader that was killed loses nothing, and several may run at
    once. Nothing is removed. What is not embedded yet is loaded by a later run.
    """
    from diptych.errors import DataError
    from diptych.index.engines.opening import shown
    from diptych.index.ingest.target import APPROXIMATE_ABOVE
    from diptych.vectors.embed import parse_part
    from diptych.vectors.load import load as load_vectors

    chosen = parse_part(part) if part else (1, 1)
    above = 1 if approximate else None if approximate is False or part else APPROXIMATE_ABOVE
    done = load_vectors(
        out, place, part=chosen, precision=precision, approximate_above=above, show_progress=True
    )
    for note in done.notes:
        echo(note, err=True)
    rows = done.written + done.unchanged
    echo(
        f"{shown(place)}: {counted(done.shards, 'shard')}, {counted(done.images, 'image')}, "
        f"{counted(done.texts, 'text')} ({done.written:,} written, {done.unchanged:,} unchanged) "
        f"in {done.seconds:.1f} s, {rows / max(done.seconds, 1e-3):,.0f} rows/s"
    )
    if done.missing:
        verb = "is" if done.missing == 1 else "are"
        echo(f"{counted(done.missing, 'shard')} {verb} not embedded yet: load again later.", err=True)
    if done.failed:
        name, reason = done.failed[0]
        raise DataError(
            f"{len(done.failed)} of {len(done.failed) + done.shards} shards could not be loaded, the others are; "
            f"{name}: {reason}"
        )
    named = shlex.quote(shown(place))
    echo(f'next: diptych search {named} "your words"   |   in a browser: diptych serve {named}')
