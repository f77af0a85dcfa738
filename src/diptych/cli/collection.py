"""From the pictures that a command names to their index and its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diptych.cli.flags import say_device
from diptych.progress import counted

if TYPE_CHECKING:
    from diptych.index.ingest.works import Built
    from diptych.index.protocol import Index
    from diptych.model.protocol import OpenedModel


def collection_of(
    model: str | None, path: str, device: str = "auto", compute_precision: str = "no"
) -> tuple[str, str, OpenedModel]:
    """The index beside a path, brought up to date; the name of its model, which may be given, and the model."""
    place = default_place(path)
    model = model or model_for(place)
    ready = bring_up_to_date(model, path, place, device=device, compute_precision=compute_precision)[1]
    return place, model, ready


def bring_up_to_date(
    model: str, path: str, place: str, *, device: str = "auto", compute_precision: str = "no", **options: Any
) -> tuple[Built, OpenedModel]:
    """Index what is new at a path, and say what was skipped; the model that did it comes back too."""
    from diptych.encoders.known_names import recorded_name
    from diptych.index.ingest.build import index_collection
    from diptych.index.models import open_model

    retriever = open_model(model, device, compute_precision)
    say_device(retriever.device)
    built = index_collection(
        retriever, path, place, model_name=recorded_name(model), show_progress=True, **options
    )
    for item, reason in built.skipped:
        click.echo(f"skipped {item}: {reason}", err=True)
    for note in built.notes:
        click.echo(note, err=True)
    return built, retriever


def summary(place: str, built: Built) -> str:
    """One line on what indexing did, and on all that the index holds where that is more than this collection."""
    moved = f"{built.moved} moved, " if built.moved else ""
    more = f"; the index holds {built.total} images in all" if built.total > built.images else ""
    held = f"{counted(built.images, 'image')}, {counted(built.texts, 'text')}"
    return (
        f"{place}: {held} ({built.added} added, {built.updated} updated, {moved}"
        f"{built.unchanged} unchanged, {built.removed} removed, {len(built.skipped)} skipped){more}"
    )


def model_for(place: str) -> str:
    """The model that an index was made with; for an index to be made, the one that needs no training."""
    from diptych.encoders.known_names import CLASS_WORDS
    from diptych.index.engines.opening import index_exists, open_index

    if not index_exists(place):
        return CLASS_WORDS
    with open_index(place) as opened:
        return model_place(opened, None)


def model_place(opened: Index, given: str | None) -> str:
    """The folder or name of an index's model: as the user says, or as the index recorded."""
    from diptych.encoders.known_names import is_pretrained_name
    from diptych.errors import IndexFault

    recorded = opened.info.model
    if given is None and not (recorded and (is_pretrained_name(recorded) or Path(recorded).exists())):
        raise IndexFault(
            f"the model of this index was at {recorded}, which is gone: give its new place with --model."
            if recorded
            else "this index does not record its model: give the model with --model."
        )
    return given or recorded


def default_place(path: str) -> str:
    """Beside the data, with .index behind its name: ./photos → ./photos.index."""
    from diptych.data.formats import divided, located

    place = located(divided(path)[0])
    named = place if place.name not in ("", "..") else place.resolve()  # '.', '../..'
    return f"{named}.index"


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

    return pictures_of(path, () if is_pretrained_name(path) or is_model_folder(path) else (path,))


def is_collection(place: str) -> bool:
    """Whether a folder given in place of an index holds pictures to index: it is not an index, run or model."""
    from diptych.index.engines.opening import index_exists

    if "://" in place or is_model_folder(place) or index_exists(place):
        return False
    from diptych.data.formats import located, recognise  # every reader, which an index needs none of

    return located(place).is_dir() and recognise(located(place)) is not None


def is_model_folder(path: str) -> bool:
    """Whether a folder is that of a run or of a model."""
    return any((Path(path).expanduser() / name).is_file() for name in ("run.json", "config.json"))
