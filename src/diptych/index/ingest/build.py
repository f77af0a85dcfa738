"""Making and refreshing an index of a collection: only what is new or changed is encoded."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from diptych.cache.local_features import LocalFeatures, features_place
from diptych.data.captions import Captions
from diptych.data.files import find_images
from diptych.data.formats import open_captions
from diptych.data.problems import Absent
from diptych.errors import DataError, DiptychError, SettingsError
from diptych.index.base import Index
from diptych.index.engines.opening import index_exists, open_index
from diptych.index.ingest.collection_files import CollectionFiles, KeptVectors, own_name, settle
from diptych.index.ingest.pipeline import PhotoReader, take_in
from diptych.index.ingest.target import (
    APPROXIMATE_ABOVE,
    Target,
    add_approximate,
    batches,
    check_clash,
    held_items,
)
from diptych.index.ingest.works import (
    ABSENT,
    NO_VECTOR,
    PREDICTED,
    BatchEncoder,
    End,
    IndexingResult,
    Labeller,
    SharedFeatures,
    Work,
)
from diptych.index.protocol import Item, Precision, Vectors
from diptych.machine import record_root
from diptych.model.protocol import Model, pairs_of, picture_side


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
    target_recall: float | None = None,
    labels: bool = False,
    local_features: LocalFeatures | bool = False,
    exif: bool = True,
    cache: bool = True,
    show_progress: bool = False,
) -> IndexingResult:
    """Bring an index in line with a collection, creating it if need be.

    New items are added, changed ones encoded again, those that vanished from the collection removed. Unreadable
    images are skipped and listed. Work is committed every few hundred images: a run that was killed continues where
    it was. With ``texts``, the texts are items of their own beside being the full text of their image, so that an
    image finds texts and a text finds texts. A collection is told from others in the same index by its ``name`` and
    root. ``batch_size`` None suits the device. From ``approximate_above`` items of a kind on, the index is given an
    approximate index of them (None: never): a graph, with ``codes`` a table of binary codes; ``target_recall`` sets
    the width of its searches. ``precision`` is that of a new index, float32 unless given. With ``labels``, the
    labels that the model predicts of an image are columns of it and of its texts: ``predicted_labels`` and, in the
    same order, ``label_scores``. With ``local_features``, those that the model's pair scorer reads are stored
    beside the index, for re-ranking. With ``exif``, date, camera and place of photos are columns; with ``cache``,
    features of a frozen backbone are shared with other commands. Large photos are decoded at a reduced size where
    the model says what it resizes them to.
    """
    absent = Absent()
    captions = source if isinstance(source, Captions) else open_captions(source, problems=absent)
    if len(captions.images) == 0:
        raise DataError(f"{captions.name} has no images: an index needs at least one.")
    labeller = _labeller(model, labels, bool(local_features))
    beside = features_place(place) if local_features is True and isinstance(place, str | Path) else None
    with _open_target(model, place, model_name, precision) as index:
        local = local_features if isinstance(local_features, LocalFeatures) else None
        if beside is not None:
            local = LocalFeatures(beside, model.fingerprint(), create=True)
        files = CollectionFiles(captions)
        end = IndexEnd(index, captions, files, model, name, labeller, local)
        shared = SharedFeatures.of(model, files.content) if cache else None
        pairs = None if local is None else pairs_of(model)
        encoder = BatchEncoder(model, batch_size, shared, labeller, pairs)
        reader = PhotoReader(
            captions, files, end, picture_side(model), texts=texts, exif=exif,
            further=[PREDICTED] * bool(labeller), shared=shared,
        )  # fmt: skip
        take_in(reader, encoder, end, show_progress)
        built = end.close()
        add = partial(add_approximate, index, approximate_above, codes=codes, target_recall=target_recall)
        built.notes += [*reader.notes(), *add(show_progress=show_progress)]
    built.skipped = [(file, ABSENT) for file in absent.files] + built.skipped
    built.notes += captions.notes
    return built


def _open_target(
    model: Model, place: str | Path | Index, model_name: str, precision: Precision | None
) -> AbstractContextManager[Index]:
    if not isinstance(place, str | Path):
        return nullcontext(place)
    return Target(place, model.dim, model.fingerprint(), model_name, precision).ready()


def _labeller(model: Model, labels: bool, local_features: bool) -> Labeller | None:
    """What predicts labels, None unless they are wanted; a model that cannot give what is wanted is refused."""
    if local_features and pairs_of(model) is None:
        raise SettingsError(
            "this model has no pair scorer, which local features are for: index without --local_features."
        )
    found: Labeller | None = getattr(model, "predict_labels", None) if labels else None
    if labels and found is None:
        raise SettingsError(
            "this model predicts no labels: index with a label-wise model, or without labels."
        )
    return found


class IndexEnd(End):
    """An index that is brought in line with one collection."""

    def __init__(
        self,
        index: Index,
        captions: Captions,
        files: CollectionFiles,
        model: Model,
        name: str,
        labeller: Labeller | None = None,
        local: LocalFeatures | None = None,
    ) -> None:
        self.index, self.files, self.model, self.labeller = index, files, model, labeller
        self.local, self.stored = local, local.contents() if local is not None else {}
        if files.root:
            record_root(files.root)
        found, note = settle(index, captions, files, name or own_name(captions))
        self.collection, self.size = found.number, len(captions.images)
        self.known = dict(index.contents(found.number))
        self.known_images = {id for id, _ in index.contents(found.number, "image")}
        self.seen: set[str] = set()
        self.built = IndexingResult(notes=[note] if note else [])
        plain = labeller is None and local is None  # nothing but the vector is made of a picture
        self.kept = KeptVectors(index, files, [(id, self.known[id]) for id in self.known_images if plain])

    def key_before(self, id: str) -> str:
        return self.known.get(id, "").rsplit("|", 1)[0]

    def compare(self, work: Work) -> None:
        """Whether something of an image must be written, and whether a vector in the index is that of its picture."""
        id = work.item.id
        lacking = self.local is not None and self.stored.get(id) != work.item.content
        work.done = not lacking and not self._changed([work.item, *work.texts])
        if lacking or self.labeller is not None:  # these are made of the picture
            return
        before = self.key_before(id)
        if not before:
            work.keeps = self.kept.find(work.row, work.key)
        elif self.files.content(before) == self.files.content(work.key):
            work.keeps = id  # its file was only touched, or its texts alone changed

    def accept(self, work: Work, look: Callable[[Work], None]) -> bool:
        """Whether an image must be written: it is new or changed, and can be read."""
        id = work.item.id
        try:
            if work.reason:
                raise DataError(work.reason)
            # an item of this collection, or of another in the same index, may have one of the ids already
            check_clash(sorted(work.names & self.seen))
            held_items(self.index, sorted(work.names - self.known.keys()), self.collection)
            if work.keeps not in ("", id) and not self.kept.take(id, work.keeps, work.item.content):
                work.keeps = ""
                look(work)
            if work.keeps and not work.done:
                work.vector = self.index.vectors([work.keeps])[0]
                if not self.files.own_file(work.row):
                    work.item = replace(work.item, thumbnail=self.index.thumbnail(id))
        except (DataError, OSError) as error:
            work.reason = str(error)
            self.built.skipped.append(work.skipped())  # unseen, so it leaves the index if it was there
            return False
        self.seen |= work.names
        self.built.images += 1
        self.built.texts += len(work.texts)
        self.built.unchanged += work.done
        return not work.done

    def _changed(self, items: list[Item]) -> list[Item]:
        return [item for item in items if self.known.get(item.id) != item.content]

    def finish(self, works: list[Work]) -> Vectors | None:
        """Vectors of the texts that changed, of images that have a vector; None without such texts."""
        texts = [text.text for work in works if work.is_encoded for text in self._changed(work.texts)]
        return self.model.encode_text(texts) if texts else None

    def commit(self, works: list[Work], of_texts: Vectors | None) -> None:
        """Write images and texts in one transaction; an image without a direction is skipped and leaves the index."""
        good = [work for work in works if work.is_encoded]
        for work in works:
            if not work.is_encoded:
                work.reason = NO_VECTOR
                self.seen -= work.names
                self.built.images -= 1
                self.built.texts -= len(work.texts)
                self.built.skipped.append(work.skipped())
        if not good:
            return
        rows = [work.vector for work in good if work.vector is not None]
        rows += [] if of_texts is None else list(of_texts)
        texts = [text for work in good for text in self._changed(work.texts)]
        self.index.update([work.item for work in good] + texts, np.stack(rows))
        if self.local is not None:
            self.local.put((w.item.id, w.item.content, w.local) for w in good if w.local is not None)
        updated = sum(work.item.id in self.known for work in good)
        self.built.updated += updated
        self.built.added += len(good) - updated

    def close(self) -> IndexingResult:
        """Remove what is no longer in the collection; what was done in all."""
        built = self.built
        if built.images == 0:  # a drive that is not there, say: no reason to forget what it had
            id, reason = built.skipped[0]
            raise DataError(f"none of the {self.size} images could be read; the first, {id}: {reason}")
        gone = [id for id in self.known if id not in self.seen]
        for some in batches(gone):
            self.index.delete(some)
            if self.local is not None:
                self.local.remove(some)
        moved = {id for id in self.kept.taken.values() if id not in self.seen}
        built.moved, built.total = len(moved), self.index.count("image")
        built.added -= len(moved)
        built.removed = len(self.known_images.intersection(gone) - moved)
        return built


MANY = 2000  # pictures above which the time is estimated
SAMPLE, TOGETHER = 16, 4  # pictures that are encoded for it, and at a time
PATIENCE = 3.0  # seconds after which the sample is large enough


def forecast(
    model: Model, folder: Path, place: str | Path, clock: Callable[[], float] = time.perf_counter
) -> str:
    """A sentence on the pictures of a folder that an index lacks and the time they will take; empty for few."""
    names = find_images(folder) if folder.is_dir() else []
    missing = len(names) - (_count_known(folder, place) if len(names) > MANY else 0)
    if missing <= MANY:
        return ""
    sample = [folder / name for name in names[:: max(1, len(names) // (SAMPLE + 1))]]
    _encode(model, sample[:1])  # the first picture also pays for what is set up once
    done, began = 0, clock()
    for start in range(1, len(sample), TOGETHER):
        done += _encode(model, sample[start : start + TOGETHER])
        if clock() - began > PATIENCE:
            break
    took = f", about {_duration((clock() - began) * missing / done)} on this machine" if done else ""
    return f"{folder}: {missing:,} pictures to index{took}."


def _count_known(folder: Path, place: str | Path) -> int:
    """Pictures of a folder that an index holds already."""
    if not index_exists(place):
        return 0
    root = str(folder.resolve())
    with open_index(place) as index:
        found = [one.number for one in index.info.collections if one.root == root]
        return sum(1 for number in found for _ in index.contents(number, "image"))


def _encode(model: Model, files: list[Path]) -> int:
    """How many of some files were read and encoded: one that cannot be read spoils only the estimate."""
    try:
        return len(model.encode_image(files))
    except DiptychError:
        return 0


def _duration(seconds: float) -> str:
    """A rough time in words."""
    for size, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds"
