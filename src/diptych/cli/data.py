"""data check, data formats, extract."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from diptych.cli.echo import echo
from diptych.cli.flags import column_flags, device_flags, say_device, with_columns
from diptych.registries import BACKBONES


@click.group()
def data() -> None:
    """Check data before training on it."""


@data.command()
@click.argument("path")
@column_flags
def check(path: str, image_column: str | None, text_column: str | None) -> None:
    """Recognise the format and list what is wrong. Missing and malformed files, duplicates, empty texts, leaks.

    Whether texts fit their pictures is the business of diptych audit.
    """
    from diptych.data.check import check as run

    report = run(with_columns(path, image_column, text_column))
    echo(report.render())
    sys.exit(0 if report.ok else 1)


@data.command()
def formats() -> None:
    """List the formats that Diptych recognises."""
    from diptych.data.formats import formats as known

    for entry in known():
        echo(f"{entry.name:14} {entry.description}")


@click.command()
@click.argument("path")
@click.option("--output_dir", required=True, type=click.Path(path_type=Path), help="folder to fill")
@click.option("--backbone", default="lite0", show_default=True, help=f"image backbone: {BACKBONES.choices}")
@click.option("--image_size", default=224, show_default=True, help="pixels of the square input")
@click.option("--batch_size", type=click.IntRange(1), help="pictures at a time (default: by device)")
@click.option(
    "--cache/--no_cache",
    default=True,
    help="share features with other commands through the cache folder, or not (--frames never does)",
)
@click.option("--frames", is_flag=True, help="one set of frame vectors per video, for video recipes")
@column_flags
@device_flags
def extract(
    path: str,
    output_dir: Path,
    backbone: str,
    image_size: int,
    batch_size: int | None,
    cache: bool,
    frames: bool,
    image_column: str | None,
    text_column: str | None,
    device: str,
    compute_precision: str,
) -> None:
    """Turn images into grid features (precomputed layout). Run again to continue after an interruption."""
    from diptych.data.formats import open_captions
    from diptych.data.images import PixelInput
    from diptych.data.readable import ToBeLeftOut
    from diptych.devices import autocast, pick_device, pick_precision
    from diptych.model import named
    from diptych.runs.extract import extract as extract_grid
    from diptych.runs.extract_frames import extract_frames

    place = pick_device(device)
    compute_precision = pick_precision(compute_precision, place)
    network = named.backbone(backbone, image_size).to(place)
    say_device(place)
    with autocast(place, compute_precision):
        captions = open_captions(with_columns(path, image_column, text_column), problems=ToBeLeftOut())
        for note in captions.notes:
            echo(note, err=True)
        run = extract_frames if frames else partial(extract_grid, cache=cache)
        report = run(
            captions,
            network,
            PixelInput(**network.pixel_format),
            output_dir,
            batch_size=batch_size,
        )
    echo(report)
