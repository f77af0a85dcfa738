"""From a place that a person names to an index and its model: an index, or pictures that are indexed first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from diptych import notebook
from diptych.data.formats import divided, located
from diptych.data.thumbnails import make_thumbnail
from diptych.encoders.known_names import CLASS_WORDS, is_pretrained_name, recorded_name
from diptych.errors import DiptychError, IndexFault
from diptych.index.engines.opening import index_exists, open_index
from diptych.index.ingest.build import index_collection
from diptych.index.ingest.works import Built
from diptych.index.models import open_model
from diptych.index.protocol import Index, Item
from diptych.model.protocol import OpenedModel
from diptych.progress import printable

Say = Callable[[str], None]
"""Told in sentences what the user should know: the device, what was skipped."""


def tell(sentence: str) -> None:
    """Print a sentence beside the answers."""
    print(printable(sentence), file=sys.stderr, flush=True)


def index_folder(
    folder: str | Path,
    index: str | Path | None = None,
    model: str | Path | None = None,
    *,
    device: str = "auto",
    compute_precision: str = "no",
    say: Say = tell,
    **options: Any,
) -> Index:
    """Make the pictures of a folder or data set searchable, or bring their index up to date; the index, opened.

    ``index`` is the place of the index, a folder or a database URL; by default the folder's name with ``.index``
    behind it. ``model`` is a run, a model folder or a name such as ``hf:ID``; by default the model that the index
    records, and for a new index ``lite0+minilm``, which needs no training. ``options`` are those of
    ``index.ingest.build.index_collection``: ``texts``, ``name``, ``precision``, ``exif``, ``batch_size``, … Pictures
    that cannot be read are skipped; ``say`` is told which, and on which device the model runs.

    Example::

        index = diptych.index_folder("photos", model="runs/photos")
        print(len(index), index.info.model)
    """
    place = default_place(str(folder)) if index is None else str(index)
    chosen = model_for(place) if model is None else str(model)
    bring_up_to_date(
        chosen, str(folder), place, device=device, compute_precision=compute_precision, say=say, **options
    )
    return open_index(place)


class Opened(NamedTuple):
    """An index, the model that searches it, the name of that model, and the place of the index."""

    opened: Index
    model: OpenedModel
    name: str
    place: str


def open_place(
    place: str | Path,
    model: str | Path | None = None,
    device: str = "auto",
    compute_precision: str = "no",
    *,
    pictures: bool | None = None,
    say: Say = tell,
) -> Opened:
    """The index at a place, with its model; a folder of pictures is indexed first, into the index beside it.

    ``model`` replaces the model that the index records. ``pictures`` says that the place holds pictures or a data set;
    None looks.
    """
    place, name, ready = str(place), None if model is None else str(model), None
    if is_collection(place) if pictures is None else pictures:
        path, place = place, default_place(place)
        name = name or model_for(place)
        ready = bring_up_to_date(
            name, path, place, device=device, compute_precision=compute_precision, say=say
        )[1]
    index = open_index(place)
    try:
        if ready is None:
            name = model_place(index, name)
            ready = open_model(name, device, compute_precision)
            if ready.device != "cpu":
                say_device(ready, say)
    except BaseException:
        index.close()
        raise
    return Opened(index, ready, name or "", place)


def bring_up_to_date(
    model: str,
    path: str,
    place: str,
    *,
    device: str = "auto",
    compute_precision: str = "no",
    say: Say = tell,
    show_progress: bool = True,
    **options: Any,
) -> tuple[Built, OpenedModel]:
    """Index what is new at a path, and say what was skipped; the model that did it comes back too."""
    retriever = open_model(model, device, compute_precision)
    say_device(retriever, say)
    built = index_collection(
        retriever, path, place, model_name=recorded_name(model), show_progress=show_progress, **options
    )
    for item, reason in built.skipped:
        say(f"skipped {printable(str(item))}: {printable(str(reason))}")
    for note in built.notes:
        say(note)
    return built, retriever


def say_device(model: OpenedModel, say: Say = tell) -> None:
    """Say where a model runs."""
    from diptych.devices import describe_device

    say(f"device: {describe_device(model.device)}")


def model_for(place: str | Path) -> str:
    """The model that an index was made with; for an index to be made, the one that needs no training."""
    if not index_exists(place):
        return CLASS_WORDS
    with open_index(place) as opened:
        return model_place(opened, None)


def model_place(opened: Index, given: str | None) -> str:
    """The folder or name of an index's model: as the user says, or as the index recorded."""
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
    place = located(divided(path)[0])
    named = place if place.name not in ("", "..") else place.resolve()  # '.', '../..'
    return f"{named}.index"


def is_collection(place: str) -> bool:
    """Whether a folder given in place of an index holds pictures to index: it is not an index, run or model."""
    if "://" in place or not located(place).is_dir() or index_exists(place) or is_model_folder(place):
        return False
    from diptych.data.formats import recognise  # every reader, which an index needs none of

    return recognise(located(place)) is not None


def is_model_folder(path: str) -> bool:
    """Whether a folder is that of a run or of a model."""
    return any((Path(path).expanduser() / name).is_file() for name in ("run.json", "config.json"))


def preview(place: str, item: Item) -> bytes | None:
    """A small JPEG of an item of the index at a place, if there is a picture to make it of."""
    from diptych.data.decode.opening import open_image

    try:
        with open_index(place) as index:
            stored, file = index.thumbnail(item.id), index.file(item)
        if stored is None and file is not None and item.kind == "image":
            return make_thumbnail(open_image(file), notebook.SIDE)
    except (DiptychError, OSError):  # an index or a picture that is gone: the hit is shown without it
        return None
    return stored
