"""From a place that a person names to an index and its model: an index, or pictures that are indexed first."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diptych.encoders.known_names import CLASS_WORDS, is_pretrained_name, recorded_name
from diptych.errors import DiptychError, IndexFault, RuntimeFault, SettingsError, StorageError
from diptych.index.base import Index, preview_of
from diptych.index.engines.opening import index_exists, open_index, without_password
from diptych.index.models import Say, StoredVectors, check_probes, open_model, say_device, tell
from diptych.index.protocol import Item, Kind
from diptych.machine import is_writable
from diptych.model.protocol import OpenedModel
from diptych.progress import counted, printable
from diptych.runtime.folder import REFUSED_HALF, worst_cosine
from diptych.storage import data_folder, expanded

if TYPE_CHECKING:
    from diptych.index.ingest.works import IndexingResult

PROBED = 5  # items of each kind that are encoded again


def index_folder(
    folder: str | Path,
    index: str | Path | None = None,
    model: str | Path | None = None,
    *,
    device: str = "auto",
    compute_precision: str = "no",
    backend: str | None = None,
    say: Say = tell,
    **options: Any,
) -> Index:
    """Make the pictures of a folder or data set searchable, or bring their index up to date; the index, opened.

    ``index`` is the place of the index, a folder or a database URL; by default that of ``default_place``. ``model``
    is a run, a model folder or a name such as ``hf:ID``; by default the model that the index records, and for a new
    index ``lite0+minilm``, which needs no training. ``options`` are those of
    ``index.ingest.build.index_collection``: ``texts``, ``name``, ``precision``, ``exif``, ``batch_size``, … Pictures
    that cannot be read are skipped; ``say`` is told which, and on which device the model runs. ``backend`` is "onnx" or
    "torch"; by default, ONNX Runtime on a CPU, for which a model without ONNX encoders is given some.

    Example::

        index = diptych.index_folder("photos", model="runs/photos")
        print(len(index), index.info.model)
    """
    place = default_place(str(folder), say) if index is None else str(index)
    name = model_for(place) if model is None else str(model)
    bring_up_to_date(
        name, str(folder), place, device=device, compute_precision=compute_precision, backend=backend, say=say,
        **options,
    )  # fmt: skip
    return open_index(place)


class OpenedPlace(NamedTuple):
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
    index: str | Path | None = None,
    backend: str | None = None,
    pictures: bool | None = None,
    encodes: bool = True,
    say: Say = tell,
) -> OpenedPlace:
    """The index at a place, with its model; a folder of pictures is indexed first, into ``index``.

    ``index`` None is the index of ``default_place``. ``model`` replaces the model that the index records.
    ``pictures`` says that the place holds pictures or a data set; None looks. Without ``encodes`` an index is opened
    for queries of stored vectors alone, which need no model.
    """
    place, name, ready = str(place), None if model is None else str(model), None
    if is_collection(place) if pictures is None else pictures:
        path, place = place, default_place(place, say) if index is None else str(index)
        if "://" not in place and index_exists(place) and not is_writable(place):
            say(f"{place} cannot be written: it is searched as it is, without new pictures.")
        else:
            new, name = not index_exists(place), name or model_for(place)
            how: dict[str, Any] = {
                "device": device,
                "compute_precision": compute_precision,
                "backend": backend,
            }
            built, ready = bring_up_to_date(name, path, place, **how, say=say)
            if new:
                say(f"indexed {counted(built.images, 'image')} into {without_password(place)}.")
    elif index is not None:
        raise SettingsError(f"{place} holds no pictures to index: leave --index out, or give their folder.")
    refuse_model(place)
    opened = open_index(place)
    try:
        if ready is None and not encodes and name is None:
            ready = StoredVectors(opened.info)
        if ready is None:
            name = model_place(opened, name)
            known = _recorded(opened, name)
            ready = open_model(name, device, compute_precision, backend=backend, fingerprint=known, say=say)
            if ready.device != "cpu":
                say_device(ready.device, say)
            if (backend or ready.device != "cpu") and known == ready.fingerprint():
                try:
                    check_items(opened, ready)
                except RuntimeFault as fault:  # it is only read
                    say(f"warning: {fault}")
    except BaseException:
        opened.close()
        raise
    return OpenedPlace(opened, ready, name or "", place)


def bring_up_to_date(
    model: str,
    path: str,
    place: str,
    *,
    device: str = "auto",
    compute_precision: str = "no",
    backend: str | None = None,
    say: Say = tell,
    show_progress: bool = True,
    **options: Any,
) -> tuple[IndexingResult, OpenedModel]:
    """Index what is new at a path, and say what was skipped; the model that did it comes back too."""
    from diptych.data.formats import find, split_options
    from diptych.index.ingest.build import forecast, index_collection

    where, reading = split_options(path)
    find(where, None, reading)  # what cannot be read is refused before a model is opened
    retriever = open_encoder(model, place, device, compute_precision, backend=backend, say=say)
    if expected := forecast(retriever, expanded(where), place):
        say(expected)
    built = index_collection(
        retriever, path, place, model_name=recorded_name(model), show_progress=show_progress, **options
    )
    for item, reason in built.skipped:
        say(f"skipped {printable(str(item))}: {printable(str(reason))}")
    for note in built.notes:
        say(note)
    return built, retriever


def open_encoder(
    model: str,
    place: str | Path,
    device: str = "auto",
    compute_precision: str = "no",
    *,
    backend: str | None = None,
    say: Say = tell,
) -> OpenedModel:
    """The model that encodes a collection for the index at a place; it is compared with its probes first.

    A model without a runtime is given one, which the searches of the index use.
    """
    known = None
    if index_exists(place):
        with open_index(place) as index:
            known = _recorded(index, model)
    ready = open_model(
        model, device, compute_precision, backend=backend, fingerprint=known, make=True, say=say
    )
    say_device(ready.device, say)
    check_probes(ready, model, say)
    if known == ready.fingerprint():
        with open_index(place) as index:
            check_items(index, ready)
    return ready


def check_items(index: Index, model: OpenedModel) -> None:
    """Encode a few items of an index again, and refuse a model whose vectors are not those that are stored.

    Texts are in the index; of pictures, those count whose files can be read, and most of them must agree: some may have
    changed. Binary codes are not compared.
    """
    if index.info.precision == "binary":
        return
    kinds: tuple[Kind, ...] = ("text", "image")
    for kind in kinds:
        items = [one for one in index.sample_items(kind, size=PROBED) if kind == "image" or one.text]
        pairs = [(one.id, one.text if kind == "text" else _picture(index, one)) for one in items]
        known = [(id, content) for id, content in pairs if content is not None]
        if not known:
            continue
        contents = [content for _, content in known]
        # one picture at a time: a service would hold the memory of a larger batch for ever
        found = model.encode_text(contents) if kind == "text" else model.encode_image(contents, batch_size=1)
        wanted = np.asarray(index.vectors([id for id, _ in known]), np.float32)
        cosines = [
            worst_cosine(np.asarray(one)[None], other[None]) for one, other in zip(found, wanted, strict=True)
        ]
        cosine = min(cosines) if kind == "text" else float(np.median(cosines))
        if cosine < REFUSED_HALF:
            raise RuntimeFault(
                f"{index.info.path} was not made with this model as it is now: its vectors of "
                f"{counted(len(known), kind)} are others (cosine {cosine:.4f}, at least {REFUSED_HALF} is needed); use "
                "the model as it was or another --device or --backend, or index again into another place."
            )


def _picture(index: Index, item: Item) -> Any:
    from diptych.data.decode.opening import open_image

    try:
        file = index.file(item)
        return None if file is None else open_image(file)
    except (DiptychError, OSError):
        return None


def _recorded(index: Index, model: str) -> str | None:
    """The fingerprint of a model, where it is the one that the index records."""
    return index.info.fingerprint if recorded_name(model) == recorded_name(index.info.model) else None


def model_for(place: str | Path) -> str:
    """The model that an index was made with; for an index to be made, the one that needs no training."""
    if not index_exists(place):
        return CLASS_WORDS
    with open_index(place) as opened:
        return model_place(opened, None)


def model_place(opened: Index, model: str | None) -> str:
    """The folder or name of an index's model: as the user says, or as the index recorded."""
    recorded = opened.info.model
    if model is None and not (recorded and (is_pretrained_name(recorded) or Path(recorded).exists())):
        raise IndexFault(
            f"the model of this index was at {recorded}, which is gone: give its new place with --model."
            if recorded
            else "this index does not record its model: give the model with --model."
        )
    return model or recorded


def default_place(path: str, say: Say = tell) -> str:
    """Beside the data, with .index behind its name: ./photos → ./photos.index.

    Where nothing can be written there (a camera's card, a disc), it is a folder below the user's data folder, and
    ``say`` is told which.
    """
    from diptych.data.formats import split_options

    place = expanded(split_options(path)[0])
    named = place if place.name not in ("", "..") else place.resolve()  # '.', '../..'
    beside = Path(f"{named}.index")
    if beside.exists() or not beside.parent.is_dir() or is_writable(beside.parent):
        return str(beside)
    whole = place.resolve()
    digest = hashlib.blake2b(os.fsencode(whole), digest_size=4).hexdigest()
    folder = data_folder() / f"{whole.name or 'root'}-{digest}.index"
    if not is_writable(folder):
        raise StorageError(
            f"neither {beside} nor {folder} can be written: give a place with --index, or set XDG_DATA_HOME."
        )
    say(f"{beside.parent} cannot be written: the index is {folder}.")
    return str(folder)


def is_collection(place: str) -> bool:
    """Whether a path given in place of an index is one to index: it exists, and is no index, run or model."""
    if "://" in place or index_exists(place) or is_model_folder(place):
        return False
    from diptych.data.formats import split_options  # every reader, which an index needs none of

    data = expanded(split_options(place)[0])
    return data.exists() and data.suffix != ".index"  # a damaged index keeps its own sentence


def is_model_folder(path: str) -> bool:
    """Whether a folder is that of a run or of a model."""
    return any((expanded(path) / name).is_file() for name in ("run.json", "config.json"))


def refuse_model(place: str) -> None:
    """Raise for the folder of a model in the place of an index."""
    if "://" not in place and is_model_folder(place) and not index_exists(place):
        raise IndexFault(
            f"{place} is a model, not an index: index pictures with it first, as in diptych index {place} ./photos."
        )


def preview(place: str, item: Item) -> bytes | None:
    """A small JPEG of an item of the index at a place, if there is a picture to make it of."""
    try:
        with open_index(place) as index:
            return preview_of(index, item)
    except (DiptychError, OSError):  # an index that is gone: the hit is shown without it
        return None
