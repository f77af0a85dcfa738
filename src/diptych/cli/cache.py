"""cache info, cache clear."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from diptych.cli.echo import echo

if TYPE_CHECKING:
    from diptych.cache.contents import Entry


@click.group()
def cache() -> None:
    """List or remove the computed features on disk."""


@cache.command()
def info() -> None:
    """List what the cache folder holds. A line for each backbone: pictures, size, last use."""
    from diptych.cache.contents import contents, in_words
    from diptych.storage import cache_folder

    entries = contents()
    echo(f"{cache_folder()} (another folder: set DIPTYCH_CACHE)")
    for line in _table(entries):
        echo(line)
    echo(f"total {in_words(sum(entry.bytes for entry in entries))}; features are float16")


@cache.command()
@click.option("--backbone", help="only the features of this backbone: the start of its name in 'cache info'")
@click.option("--old", is_flag=True, help="only files of earlier versions, which nothing reads any more")
@click.option("--older_than", help="only features that no command has used for this long: 12h, 30d, 8w")
@click.option("--keep", help="keep this much, the features used last: 500MB, 10GB")
@click.option("--dry_run", is_flag=True, help="say what would be removed, and remove nothing")
def clear(backbone: str | None, old: bool, older_than: str | None, keep: str | None, dry_run: bool) -> None:
    """Remove computed features. Without an option, all of them; commands compute again what they need."""
    from diptych.cache.contents import chosen, contents, in_words

    found = chosen(contents(), backbone=backbone, old=old, older_than=older_than, keep=keep)
    for line in _table(found):
        echo(line)
    size = sum(entry.bytes for entry in found)
    if dry_run:
        echo(f"would remove {in_words(size)}; nothing was removed (--dry_run)")
        return
    busy = [entry for entry in found if not entry.remove()]
    echo(f"removed {in_words(size - sum(entry.bytes for entry in busy))}")
    if busy:
        left = in_words(sum(entry.bytes for entry in busy))
        echo(f"left {left} that another process is reading: run it again when that is done")


def _table(entries: Sequence[Entry]) -> list[str]:
    """A line for each backbone or kind of file."""
    from diptych.cache.contents import in_words

    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(
            (entry.kind, entry.name if entry.items or entry.kind == "images" else ""), []
        ).append(entry)
    lines = []
    for (kind, name), some in groups.items():
        size = in_words(sum(entry.bytes for entry in some))
        day = time.strftime("%Y-%m-%d", time.localtime(max(entry.used for entry in some)))
        pictures = sum(entry.items for entry in some)
        what = f"{pictures:,} pictures" if kind == "images" else f"{len(some):,} files"
        lines.append(f"  {kind:14} {what:>18} {size:>10}  used {day}  {name} {some[0].title}".rstrip())
    return lines
