"""Making and refreshing an index of a collection: only what is new or changed is encoded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diptych.cache.local_features import LocalFeatures, features_place
from diptych.data.ahead import read_ahead
from diptych.data.captions import Captions, StoredImage
from diptych.data.formats import open_captions
from diptych.data.problems import Absent
from diptych.data.thumbnails import make_thumbnail
from diptych.errors import DataError, DiptychError, IndexFault, MissingExtra, SettingsError
from diptych.index.engines.opening import empty_index, index_exists, open_index
from diptych.index.ingest.collection_files import (
    CollectionFiles,
    check_writable,
    content_of,
    metadata_of,
    own_name,
    text_items,
)
from diptych.index.ingest.moved import KeptVectors, settle
from diptych.index.ingest.overlap import Overlap, decoders
from diptych.index.ingest.photos import EXIF, PhotoColumns, SharedFeatures
from diptych.index.ingest.works import NOT_FINITE, Built, Read, Work, has_vector, reason_of
from diptych.index.protocol import KINDS, Index, Item, Precision, Vectors
from diptych.model.protocol import Model, pairs_of
from diptych.progress import track

APPROXIMATE_ABOVE = 200_000  # items of a kind from which a scan takes tens of milliseconds on two cores
ON_CPU, ON_GPU = 8, 64  # pictures encoded at a time; on a CPU more are slower and take more memory
CHUNK = 256  # images committed together: a killed run may have to encode two chunks again
PIXELS = 64_000_000  # decoded pixels of a batch; one batch is encoded while the next is read
ABSENT = "it is named by the collection but not on disk."
PREDICTED, SCORES = "predicted_labels", "label_scores"  # columns of the labels a model predicts
SCORE_DIGITS = 4  # digits of a stored label score
Labeller = Callable[..., Sequence[Mapping[str, float]]]
"""``predict_labels`` of a model: pictures to labels with their scores, best first."""


def index_collection(
    model: Model,
    source: Captions | str | Path,
    place: str | Path | Index,
    *,
    model_name: str = "",
    name: str = "",
    texts: bool = True,
    precision: Precision | None = None,
    batch_size: int | None = None,
    approximate_above: int | None = APPROXIMATE_ABOVE,
    codes: bool | None = None,
    labels: bool = False,
    local_features: LocalFeatures | bool = False,
    exif: bool = True,
    cache: bool = True,
    show_progress: bool = False,
) -> Built:
    """Bring an index in line with a collection, creating it if need be.

    ``batch_size`` None suits the device.

    New items are added, changed ones encoded again, those that vanished from the collection removed.
    Unreadable images are skipped and listed. Work is committed every few hundred images: a run that was
    killed continues where it was. With ``texts``, the texts are items of their own beside being the full text
    of their image, so that an image finds texts and a text finds texts. A collection is told from others in
    the same index by its ``name`` and root. From ``approximate_above`` items of a kind on, the index is given
    an approximate index of them (None: never): a graph, with ``codes`` a table of binary codes. ``precision`` is
    that of a new index, float32 unless given. With ``labels``, the labels that the model predicts of an image are
    columns of it and of its texts: ``predicted_labels`` and, in the same order, ``label_scores``. With
    ``local_features``, those that the model's pair scorer reads are stored beside the index, for re-ranking. With
    ``exif``, date, camera and place of photos are columns; with ``cache``, features of a frozen backbone are shared
    with other commands.
    """
    absent = Absent()
    captions = source if isinstance(source, Captions) else open_captions(source, problems=absent)
    if len(captions.images) == 0:
        raise DataError(f"{captions.name} has no images: an index needs at least one.")
    if local_features and pairs_of(model) is None:
        raise SettingsError(
            "this model has no pair scorer, which local features are for: index without --local_features."
        )
    if isinstance(place, str | Path):
        fingerprint = model.fingerprint()
        beside = features_place(place) if local_features is True else None
        fresh = not index_exists(place)
        if not fresh:
            index = open_index(place, writable=True, fingerprint=fingerprint, model=model_name)
        else:
            index = empty_index(
                place, model.dim, model=model_name, fingerprint=fingerprint, precision=precision or "float32"
            )
        try:
            with index:
                _check_precision(index, precision)
                if beside is not None:
                    local_features = LocalFeatures(beside, fingerprint, create=True)
                built = index_collection(
                    model,
                    captions,
                    index,
                    name=name,
                    texts=texts,
                    batch_size=batch_size,
                    approximate_above=approximate_above,
                    codes=codes,
                    labels=labels,
                    local_features=local_features,
                    exif=exif,
                    cache=cache,
                    show_progress=show_progress,
                )
        except DiptychError:
            if fresh:  # an empty index of a model that cannot read these images would stand in another's way
                _discard_empty(place)
            raise
        built.skipped = [(file, ABSENT) for file in absent.files] + built.skipped
        built.notes += captions.notes
        return built
    labeller = getattr(model, "predict_labels", None) if labels else None
    if labels and labeller is None:
        raise SettingsError(
            "this model predicts no labels: index with a label-wise model, or without labels."
        )
    store = local_features if isinstance(local_features, LocalFeatures) else None
    shared = SharedFeatures.of(model) if cache else None
    photos = PhotoColumns() if exif else None
    sync = _Sync(model, captions, place, name, texts, batch_size, labeller, store, shared, photos)
    built = sync.run(show_progress)
    for kind in KINDS if approximate_above is not None else ():
        if place.count(kind) >= max(1, approximate_above or 0):
            try:
                place.build_graph(kind, codes=codes, show_progress=show_progress)
            except (MissingExtra, SettingsError) as error:  # nothing that an exact search needs
                built.notes.append(f"the {place.count(kind):,} {kind} items are searched one by one: {error}")
    return built


def _discard_empty(place: str | Path) -> None:
    """Remove an index on disk that holds nothing; in a database it stays."""
    if "://" in str(place):
        return
    with suppress(IndexFault), open_index(place, writable=True) as index:  # unless another writes it by now
        if not any(index.count(kind) for kind in KINDS):
            shutil.rmtree(Path(place).expanduser())


class _Sync:
    """One run over one collection."""

    def __init__(
        self,
        model: Model,
        captions: Captions,
        index: Index,
        name: str,
        texts: bool,
        batch_size: int | None,
        labeller: Labeller | None = None,
        local: LocalFeatures | None = None,
        shared: SharedFeatures | None = None,
        photos: PhotoColumns | None = None,
    ) -> None:
        self.shared, self.photos = shared, photos
        self.model, self.captions, self.index, self.labeller = model, captions, index, labeller
        on_gpu = getattr(model, "device", "cpu") != "cpu"
        self.with_texts, self.batch_size = texts, batch_size or (ON_GPU if on_gpu else ON_CPU)
        self.local, self.stored = local, local.contents() if local is not None else {}
        self.texts_of = captions.texts_of()
        self.files = CollectionFiles(captions)
        # columns whose values are known only after encoding, or follow from the file
        self.further = [PREDICTED] * bool(labeller) + [EXIF] * bool(photos and self.files.has_photos)
        self.collection, note = settle(index, captions, self.files, name or own_name(captions))
        self.known = dict(index.contents(self.collection.number))
        self.known_images = {id for id, _ in index.contents(self.collection.number, "image")}
        self.seen: set[str] = set()
        self.built = Built(notes=[note] if note else [])
        plain = labeller is None and local is None  # nothing but the vector is made of a picture
        self.kept = KeptVectors(
            index, self.files, [(id, self.known[id]) for id in self.known_images if plain]
        )

    def run(self, show_progress: bool) -> Built:
        """Images are read ahead in threads, encoded in another, and written in this one."""
        rows = range(len(self.captions.images))
        waiting: list[Work] = []
        pending: list[Work] = []  # of those waiting, the ones whose picture is in memory
        pixels = 0
        with Overlap(self.encode, self.encode_texts, self.commit) as overlap:
            ahead = read_ahead(rows, self.read, decoders(self.files.store))
            for read in track(ahead, "index", len(rows), show_progress):
                overlap.commit_if_ready()
                work = self.examine(read)
                if work is None:
                    continue
                waiting.append(work)
                if work.picture is not None:
                    pending.append(work)
                    picture = work.picture
                    pixels += picture.width * picture.height if isinstance(picture, Image.Image) else 0
                if len(pending) >= self.batch_size or pixels >= PIXELS or len(waiting) >= CHUNK:
                    overlap.encode(pending)
                    pending, pixels = [], 0
                if len(waiting) >= CHUNK:
                    overlap.close_chunk(waiting)
                    waiting = []
            overlap.encode(pending)
            overlap.close_chunk(waiting)
            overlap.commit()
        if self.built.images == 0:  # a drive that is not there, say: no reason to forget what it had
            id, reason = self.built.skipped[0]
            raise DataError(
                f"none of the {len(self.captions.images)} images could be read; the first, {id}: {reason}"
            )
        gone = [id for id in self.known if id not in self.seen]
        for start in range(0, len(gone), 10_000):
            self.index.delete(gone[start : start + 10_000])
            if self.local is not None:
                self.local.remove(gone[start : start + 10_000])
        moved = {id for id in self.kept.taken.values() if id not in self.seen}
        self.built.moved, self.built.total = len(moved), self.index.count("image")
        self.built.added -= len(moved)
        self.built.removed = len(self.known_images.intersection(gone) - moved)
        self.built.notes += self.photos.notes() if self.photos is not None else []
        self.built.notes += [self.shared.note] if self.shared is not None and self.shared.note else []
        return self.built

    def read(self, row: int) -> Read:
        """What a thread finds out of one image, without the index: whether it changed, and then its picture."""
        read = Read(row, self.name(str(self.captions.image_ids[row])), metadata_of(self.captions, row))
        read.lines = [self.captions.texts[n] for n in self.texts_of[row]]
        try:
            check_writable(read.id, read.lines, read.metadata)
            before = self.known.get(read.id, "").rsplit("|", 1)[0]
            key = self.files.key(row, before)
            read.content = content_of(key, read.lines, read.metadata, self.further)
            if self.with_texts:
                number = self.collection.number
                read.texts = text_items(read.id, read.lines, read.metadata, self.further, number)
            # a file that was only touched, or whose texts alone changed, keeps its vector
            read.same = bool(before) and self.files.content(before) == self.files.content(key)
            read.same = read.same and self.labeller is None  # labels are predicted from the picture
            if not before:
                read.like = self.kept.find(row, key)
                read.same = bool(read.like)
            read.lacking = self.local is not None and self.stored.get(read.id) != read.content
            read.same = read.same and not read.lacking
        except (UnicodeError, DataError, OSError) as error:
            read.refused = reason_of(error)
            return read
        try:
            if not self.is_changed(read):
                return read
            if self.photos is not None:
                told = self.photos.of(read.id, self.files.photo(row))
                read.metadata = {**told, **read.metadata}  # the collection's own columns win
                read.texts = [replace(text, metadata=read.metadata) for text in read.texts]
            if not read.same:
                cells = None
                if self.shared is not None and self.files.own_file(row):  # needs no picture for a thumbnail
                    cells = self.shared.known(self.files.content(key))
                read.picture = self.captions.images[row] if cells is None else cells
        except (UnicodeError, DataError, OSError) as error:
            read.unread = reason_of(error)
        return read

    def is_changed(self, read: Read) -> bool:
        """Whether something of an image must be written."""
        own = self.known.get(read.id) != read.content
        return own or read.lacking or any(self.known.get(text.id) != text.content for text in read.texts)

    def examine(self, read: Read) -> Work | None:
        """What must be written for one image; None when it is in line already or cannot be read."""
        names = {read.id, *(text.id for text in read.texts)}
        work = None
        try:
            if read.refused:
                raise DataError(read.refused)
            self.check_names(names)
            if read.unread:
                raise DataError(read.unread)
            if self.is_changed(read):
                if read.like and not self.kept.take(read.id, read.like, read.content):
                    read.like, read.same, read.picture = "", False, self.captions.images[read.row]
                item = Item(
                    id=read.id,
                    path=self.files.relative(read.row),
                    text="\n".join(read.lines),
                    metadata=read.metadata,
                    content=read.content,
                    collection=self.collection.number,
                    thumbnail=self.thumbnail(read.id, read.row, read.picture),
                )
                vector = self.index.vectors([read.like or read.id])[0] if read.same else None
                changed = [text for text in read.texts if self.known.get(text.id) != text.content]
                work = Work(item, read.picture, vector, changed, len(read.texts))
        except (UnicodeError, DataError, OSError) as error:
            self.skip(read.id, reason_of(error))
            return None
        self.seen |= names
        self.built.images += 1
        self.built.texts += len(read.texts)
        self.built.unchanged += work is None
        return work

    def check_names(self, names: set[str]) -> None:
        """Raise when an item of this collection, or of another in the same index, has one of the ids already."""
        taken = names & self.seen
        strangers = sorted(name for name in names if name not in self.known)
        for name, item in zip(strangers, self.index.get(strangers), strict=True):
            if item is not None and item.collection != self.collection.number:
                taken.add(name)
        if taken:
            raise DataError(
                f"the index already has another item with the id '{min(taken)}': index it into another place."
            )

    def encode(self, pending: list[Work]) -> None:
        """Turn pictures into vectors, and let go of them."""
        if not pending:
            return
        pictures: Sequence[Any] = [work.picture for work in pending]
        if self.shared is not None:
            keys = [self.files.content(work.item.content.rsplit("|", 1)[0]) for work in pending]
            pictures = self.shared.items(keys, pictures)
        rows = self.model.encode_image(pictures, batch_size=self.batch_size)
        if self.labeller is not None:
            for work, found in zip(pending, self.labeller(pictures, batch_size=self.batch_size), strict=True):
                told = {
                    PREDICTED: list(found),
                    SCORES: [round(score, SCORE_DIGITS) for score in found.values()],
                }
                work.item = replace(work.item, metadata={**work.item.metadata, **told})
                work.texts = [replace(text, metadata={**text.metadata, **told}) for text in work.texts]
        if self.local is not None:
            scorer = pairs_of(self.model)
            assert scorer is not None  # as ``index_collection`` checked
            for work, local in zip(pending, scorer.image_features(pictures), strict=True):
                work.local = local
        for work, vector in zip(pending, rows, strict=True):
            work.vector, work.picture = vector, None

    def encode_texts(self, waiting: list[Work]) -> Vectors | None:
        """Vectors of the texts that go with images that have one; None without such texts."""
        texts = [text.text for work in waiting if has_vector(work) for text in work.texts]
        return self.model.encode_text(texts) if texts else None

    def commit(self, waiting: list[Work], of_texts: Vectors | None) -> None:
        """Write images and texts in one transaction."""
        works = [work for work in waiting if self.is_encoded(work)]
        if not works:
            return
        texts = [text for work in works for text in work.texts]
        rows = [work.vector for work in works if work.vector is not None]
        rows += [] if of_texts is None else list(of_texts)
        self.index.update([work.item for work in works] + texts, np.stack(rows))
        if self.local is not None:
            self.local.put((w.item.id, w.item.content, w.local) for w in works if w.local is not None)
        updated = sum(work.item.id in self.known for work in works)
        self.built.updated += updated
        self.built.added += len(works) - updated

    def is_encoded(self, work: Work) -> bool:
        """Whether the model made numbers of an image; if not, it is skipped and leaves the index."""
        if has_vector(work):
            return True
        id = work.item.id
        self.seen -= {id, *(f"{id}#text{n}" for n in range(work.count))}
        self.built.images -= 1
        self.built.texts -= work.count
        self.skip(id, NOT_FINITE)
        return False

    def skip(self, id: str, reason: str) -> None:
        """Note what cannot be indexed; it stays unseen, and so leaves the index if it was there."""
        self.built.skipped.append((id.encode("utf-8", "replace").decode(), reason))

    def name(self, image_id: str) -> str:
        """The id of an image in the index: its own, with the number of any later collection in front."""
        return image_id if self.collection.number == 0 else f"{self.collection.number}/{image_id}"

    def thumbnail(self, id: str, row: int, picture: StoredImage | None) -> bytes | None:
        """A stored thumbnail for an image that has no file of its own to make one from later: a frame has none."""
        if self.files.own_file(row):
            return None
        if picture is None:
            return self.index.thumbnail(id)
        return make_thumbnail(picture) if isinstance(picture, Image.Image) else None


def _check_precision(index: Index, precision: Precision | None) -> None:
    """Raise when vectors are wanted in another precision than an index has."""
    if precision is not None and index.info.precision != precision:
        raise SettingsError(
            f"{index.info.path} stores {index.info.precision} vectors, not {precision}: "
            "leave the precision out, or index into another place."
        )
