"""data check, data formats, extract, teach, cache info, cache clear."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diptych.cli.flags import OUTPUT, column_flags, columns_of, device_flags, option, switch, with_columns
from diptych.progress import counted, echo
from diptych.registries import BACKBONES, IMAGE_TEACHERS, TEXT_TEACHERS
from diptych.settings import IMAGE_TEACHER_HELP, TEXT_TEACHER_HELP

if TYPE_CHECKING:
    from diptych.cache.contents import CacheEntry


@click.group()
def data() -> None:
    """Check data before training on it."""


@data.command()
@click.argument("path")
@column_flags
def check(path: str, **columns: Any) -> None:
    """Recognise the format and list what is wrong. Missing and malformed files, duplicates, empty texts, leaks.

    Whether texts fit their pictures is the business of diptych audit.
    """
    from diptych.data.check import check as run

    report = run(with_columns(path, columns_of(columns)))
    echo(report.render())
    sys.exit(0 if report.ok else 1)


@data.command()
def formats() -> None:
    """List the formats that Diptych recognises."""
    from diptych.data.formats import formats as all_formats

    for entry in all_formats():
        echo(f"{entry.name:14} {entry.description}")


@click.command()
@click.argument("path")
@option("--output_dir", "folder to fill", required=True, type=OUTPUT)
@option("--backbone", f"image backbone: {BACKBONES.choices}", "lite0")
@option("--image_size", "pixels of the square input", 224)
@option("--batch_size", "pictures at a time (default: by device)", type=click.IntRange(1))
@switch("cache", "share features with other commands through the cache folder, or not (--frames never does)")
@option("--frames", "one set of frame vectors per video, for video recipes", is_flag=True)
@column_flags
@device_flags
def extract(path: str, output_dir: Path, cache: bool, frames: bool, **options: Any) -> None:
    """Turn images into grid features (precomputed layout). Run again to continue after an interruption."""
    from diptych.data.formats import open_captions
    from diptych.data.images import PixelInput
    from diptych.data.problems import ToBeLeftOut
    from diptych.devices import autocast, pick_device, pick_precision
    from diptych.index.models import say_device
    from diptych.model import named
    from diptych.runs.extract import extract as extract_grid
    from diptych.runs.extract import extract_frames

    place = pick_device(options["device"])
    precision = pick_precision(options["compute_precision"], place)
    network = named.backbone(options["backbone"], options["image_size"]).to(place)
    say_device(place)
    with autocast(place, precision):
        captions = open_captions(with_columns(path, columns_of(options)), problems=ToBeLeftOut())
        for note in captions.notes:
            echo(note, err=True)
        run = extract_frames if frames else partial(extract_grid, cache=cache)
        pixels = PixelInput(**network.pixel_format)
        echo(run(captions, network, pixels, output_dir, batch_size=options["batch_size"]))


@click.group()
def cache() -> None:
    """List or remove the computed features and the ONNX encoders in the cache folder."""


@cache.command()
def info() -> None:
    """List what the cache folder holds. A line for each backbone and each model's encoders: size, last use."""
    from diptych.cache.contents import contents, in_words
    from diptych.storage import cache_folder

    entries = contents()
    echo(f"{cache_folder()} (another folder: set DIPTYCH_CACHE)")
    for line in _table(entries):
        echo(line)
    echo(f"total {in_words(sum(entry.bytes for entry in entries))}; features are float16")


@cache.command()
@option("--backbone", "only the features of this backbone: the start of its name in 'cache info'")
@option("--old", "only files of earlier versions, which nothing reads any more", is_flag=True)
@option("--older_than", "only features that no command has used for this long: 12h, 30d, 8w")
@option("--keep", "keep this much, the features used last: 500MB, 10GB")
@option("--dry_run", "say what would be removed, and remove nothing", is_flag=True)
def clear(backbone: str | None, old: bool, older_than: str | None, keep: str | None, dry_run: bool) -> None:
    """Remove computed features and encoders. Without an option, all of them; commands make again what they need."""
    from diptych.cache.contents import contents, in_words, select

    entries = select(contents(), backbone=backbone, old=old, older_than=older_than, keep=keep)
    for line in _table(entries):
        echo(line)
    size = sum(entry.bytes for entry in entries)
    if dry_run:
        echo(f"would remove {in_words(size)}; nothing was removed (--dry_run)")
        return
    busy = [entry for entry in entries if not entry.remove()]
    echo(f"removed {in_words(size - sum(entry.bytes for entry in busy))}")
    if busy:
        busy_size = in_words(sum(entry.bytes for entry in busy))
        echo(f"left {busy_size} that another process is reading: run it again when that is done")


def _table(entries: Sequence[CacheEntry]) -> list[str]:
    """A line for each backbone or kind of file."""
    from diptych.cache.contents import in_words

    groups: dict[tuple[str, str], list[CacheEntry]] = {}
    for entry in entries:
        named = entry.name if entry.items or entry.kind in ("images", "runtime") else ""
        groups.setdefault((entry.kind, named), []).append(entry)
    lines = []
    for (kind, name), some in groups.items():
        size = in_words(sum(entry.bytes for entry in some))
        day = time.strftime("%Y-%m-%d", time.localtime(max(entry.used for entry in some)))
        pictures = sum(entry.items for entry in some)
        what = f"{pictures:,} pictures" if kind == "images" else counted(len(some), "file")
        lines.append(f"  {kind:14} {what:>18} {size:>10}  used {day}  {name} {some[0].title}".rstrip())
    return lines


@click.command()
@click.argument("data")
@option("--image_teacher", f"{IMAGE_TEACHER_HELP}: {IMAGE_TEACHERS.choices}", "auto", to="image")
@option("--text_teacher", f"{TEXT_TEACHER_HELP}: {TEXT_TEACHERS.choices}", "minilm", to="text")
@option(
    "--image_teacher_space",
    "the mean of the image teacher's cells, or all cells end to end",
    "pooled",
    to="space",
    type=click.Choice(["pooled", "tokens"]),
)
@option(
    "--teacher_projection",
    "project teacher vectors to this many dimensions (0: none)",
    0,
    to="project",
    type=click.IntRange(0),
)
@option("--image_size", "pixels of the image teacher's input", 224)
@option("--clean_captions", "clean the texts first, as cusa-clip does", to="clean", is_flag=True)
def teach(data: str, **options: Any) -> None:
    """Compute the teacher vectors of a data set once (CUSA). Run again to continue after an interruption."""
    from diptych.runs.extract import teach as run
    from diptych.training.teachers import Teachers

    for line in run(Teachers(**options), data):
        echo(line)
