"""How every command prints, and how several read a collection's path and describe it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diptych.progress import counted, echo

if TYPE_CHECKING:
    from diptych.index.ingest.works import IndexingResult


def summary(place: str, result: IndexingResult) -> str:
    """One line on what indexing did, and on all that the index holds where that is more than this collection."""
    moved = f"{result.moved} moved, " if result.moved else ""
    more = f"; the index holds {result.total} images in all" if result.total > result.images else ""
    counts = f"{counted(result.images, 'image')}, {counted(result.texts, 'text')}"
    return (
        f"{place}: {counts} ({result.added} added, {result.updated} updated, {moved}"
        f"{result.unchanged} unchanged, {result.removed} removed, {len(result.skipped)} skipped){more}"
    )


def pictures_of(model: str, rest: Sequence[str]) -> str:
    """The path that follows the name of a model."""
    if not rest:
        raise click.UsageError(
            f"{model} is a model: give the pictures to search too, as in {model} ./photos."
        )
    return rest[0]


def place_first(place: str, query: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The place and the query, also where the words came first: dog ./photos."""
    from diptych.encoders.known_names import is_pretrained_name
    from diptych.index.engines.opening import index_exists
    from diptych.index.places import is_collection

    if not query or is_path(place) or is_pretrained_name(place) or Path(place).exists():
        return place, query
    last = query[-1]
    if is_pretrained_name(last) or not (index_exists(last) or (is_collection(last) and Path(last).is_dir())):
        return place, query
    words = (place, *query[:-1])
    echo(f"searching {last} for {' '.join(words)}; the folder usually comes first.", err=True)
    return last, words


def is_path(text: str) -> bool:
    """Whether a text looks like a path or the address of a database, whatever is there."""
    return "/" in text or os.sep in text or text.startswith((".", "~")) or text.endswith(".index")


def pictures_alone(path: str) -> str:
    """A path of pictures that was given without a model; a model without pictures is refused."""
    from diptych.encoders.known_names import is_pretrained_name
    from diptych.index.places import is_model_folder

    return pictures_of(path, () if is_pretrained_name(path) or is_model_folder(path) else (path,))
