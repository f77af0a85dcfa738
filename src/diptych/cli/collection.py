"""What several commands say of a collection, and how they read its path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from diptych.cli.echo import echo
from diptych.progress import counted

if TYPE_CHECKING:
    from diptych.index.ingest.works import Built


def say(sentence: str) -> None:
    """Tell the user something beside the answers."""
    echo(sentence, err=True)


def summary(place: str, built: Built) -> str:
    """One line on what indexing did, and on all that the index holds where that is more than this collection."""
    moved = f"{built.moved} moved, " if built.moved else ""
    more = f"; the index holds {built.total} images in all" if built.total > built.images else ""
    held = f"{counted(built.images, 'image')}, {counted(built.texts, 'text')}"
    return (
        f"{place}: {held} ({built.added} added, {built.updated} updated, {moved}"
        f"{built.unchanged} unchanged, {built.removed} removed, {len(built.skipped)} skipped){more}"
    )


def pictures_of(model: str, given: Sequence[str]) -> str:
    """The path that follows the name of a model."""
    if not given:
        raise click.UsageError(
            f"{model} is a model: give the pictures to search too, as in {model} ./photos."
        )
    return given[0]


def pictures_alone(path: str) -> str:
    """A path of pictures that was given without a model; a model without pictures is refused."""
    from diptych.encoders.known_names import is_pretrained_name
    from diptych.index.places import is_model_folder

    return pictures_of(path, () if is_pretrained_name(path) or is_model_folder(path) else (path,))
