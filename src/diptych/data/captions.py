"""Captions: images, texts, and which text belongs to which image. The one in-memory idea of a data set.

Splits are called ``train``, ``val`` and ``test`` everywhere (and ``testall``, the 5,000 COCO images of which the
published ``test`` holds the first 1,000).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diptych import notebook
from diptych.data.decode.opening import make_thumbnail
from diptych.errors import DataError, ImageError
from diptych.progress import counted

PREVIEW_IMAGES = 6  # images that a notebook shows

HALVES = "surrogatepass"  # file names that are not UTF-8 hold halves of characters

StoredImage = Image.Image | NDArray[Any]
"""One image as a store gives it: a picture, or the features of one (R, D)."""


class ImageStore(Protocol):
    """Where images come from: files, tar members, rows of an array on disk. Read on access, never held.

    A store may say what it gives with an attribute ``features``: True for features, False for pictures. One that does
    not is asked for its first item (``holds_features``).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> StoredImage: ...

    def content_key(self, index: int) -> str:
        """A string that changes when the bytes of this image change (a hash, or path + size + time)."""


class TextOrder(Protocol):
    """Which texts an epoch shows, and when."""

    def __len__(self) -> int:
        """Texts of an epoch, the same for every epoch."""

    def epoch(self, seed: int, number: int) -> NDArray[np.int64]:
        """The rows of the texts of an epoch, in order."""

    def renumbered(self, new_row: NDArray[np.int64]) -> TextOrder:
        """The order of a subset: ``new_row`` (M,) is the new row of each text, −1 for one that is left out."""


_ANSWERS: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # what stores gave that do not say it


def holds_features(store: Any) -> bool:
    """Whether a store, or a list of images, gives features rather than pictures; no picture is decoded twice for it."""
    answer = getattr(store, "features", None)
    if answer is None:
        try:
            answer = _ANSWERS.get(store)
        except TypeError:  # a list, or another store that cannot be a key
            return _gives_features(store)
        if answer is None:
            answer = _ANSWERS[store] = _gives_features(store)
    return bool(answer)


def holds_pictures(store: ImageStore) -> bool:
    """Whether a store gives pictures; an empty one gives nothing."""
    return len(store) > 0 and not holds_features(store)


def first_readable(store: ImageStore) -> StoredImage:
    """The first item of a store that can be read."""
    fault: Exception | None = None
    for row in range(len(store)):
        try:
            return store[row]
        except (ImageError, OSError) as error:
            fault = fault or error
    if fault is None:
        raise DataError("there is no image: give data with at least one.")
    raise DataError(f"none of the {len(store)} images can be read; the first: {fault}") from fault


def _gives_features(store: Any) -> bool:
    first = first_readable(store) if len(store) else None
    return isinstance(first, np.ndarray) and first.dtype != np.uint8


@dataclass(frozen=True)
class Captions:
    """N images, M texts, and ``image_of``: text -> image, any number of texts per image.

    ``image_ids`` are the data set's own names of the images, unique. ``splits`` names the split of each
    image. ``labels`` are columns over the images (category, class ids, price, ...); ``text_ids`` optional
    names of texts. ``order`` says which texts an epoch of training shows (None: each once, in random order);
    ``unreadable`` what training does with an image that cannot be read. ``notes`` are sentences about what the reader
    left out, for whoever summarises the data. ``picture_of`` says which images are one picture (two corpora may hold
    the same one): the row of the first of them; None: all are different. ``classes`` are the names of the classes in
    the order of the columns, of data that have a column for each class.

    Example::

        captions = diptych.open_captions("photos")
        print(len(captions.images), captions.texts[:2], captions.split("train"))
    """

    images: ImageStore
    texts: Sequence[str]
    image_of: NDArray[np.int64]  # (M,)
    image_ids: Sequence[str]  # (N,)
    splits: Sequence[str]  # (N,)
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    text_ids: Sequence[str] | None = None
    name: str = "data"
    order: TextOrder | None = None
    unreadable: Literal["stop", "skip"] = "stop"
    notes: Sequence[str] = ()
    picture_of: NDArray[np.int64] | None = None  # (N,)
    classes: Sequence[str] = ()

    def __post_init__(self) -> None:
        n, m = len(self.images), len(self.texts)
        if len(self.image_of) != m:
            raise DataError(f"{self.name}: {m} texts, image_of has {len(self.image_of)}: give one each.")
        if len(self.image_ids) != n or len(self.splits) != n:
            raise DataError(
                f"{self.name}: {n} images, {len(self.image_ids)} ids, {len(self.splits)} splits: give one each."
            )
        if m and (self.image_of.min() < 0 or self.image_of.max() >= n):
            raise DataError(f"{self.name}: image_of points outside the {n} images: check the image column.")
        if len(set(self.image_ids)) != n:
            twice = next(i for i, count in Counter(self.image_ids).items() if count > 1)
            raise DataError(f"{self.name}: two images have the id '{twice}': give each image its own id.")
        for column, values in self.labels.items():
            if len(values) != n:
                raise DataError(f"{self.name}: label '{column}' has {len(values)} values for {n} images.")

    def split(self, name: str) -> Captions:
        """The images of one split, with their texts."""
        rows = [i for i, s in enumerate(self.splits) if s == name]
        if not rows:
            known = ", ".join(sorted(set(self.splits))) or "none"
            raise DataError(f"{self.name} has no split '{name}': its splits are {known}.")
        return self.subset(rows)

    def subset(self, rows: Sequence[int]) -> Captions:
        """The given images, in the given order, with their texts in the original text order per image."""
        selection = np.asarray(rows, dtype=np.int64)
        numbers = selection.tolist()
        new_row = np.full(len(self.images), -1, dtype=np.int64)
        new_row[selection] = np.arange(len(selection))
        if (new_row >= 0).sum() != len(selection):
            raise DataError(f"{self.name}: a subset names the same image twice.")
        keep = np.flatnonzero(new_row[self.image_of] >= 0)
        keep = keep[np.argsort(new_row[self.image_of[keep]], kind="stable")]  # texts follow their images
        return self.with_texts(
            keep,
            new_row[self.image_of[keep]],
            images=StoreRows(self.images, selection),
            image_ids=[self.image_ids[i] for i in numbers],
            splits=[self.splits[i] for i in numbers],
            labels={k: [v[i] for i in numbers] for k, v in self.labels.items()},
            picture_of=None if self.picture_of is None else first_of_each(self.picture_of[selection]),
        )

    def with_texts(self, rows: NDArray[np.int64], image_of: NDArray[np.int64], **changes: Any) -> Captions:
        """Some of the texts, in the given order, each with the image given for it; ``changes`` are other fields."""
        new_row = np.full(len(self.texts), -1, dtype=np.int64)
        new_row[rows] = np.arange(len(rows))
        return replace(
            self,
            texts=[self.texts[i] for i in rows.tolist()],
            image_of=image_of,
            text_ids=None if self.text_ids is None else [self.text_ids[i] for i in rows.tolist()],
            order=None if self.order is None else self.order.renumbered(new_row),
            **changes,
        )

    def pictures(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The picture of each of these images: equal numbers are one picture."""
        return rows if self.picture_of is None else self.picture_of[rows]

    def texts_of(self) -> list[NDArray[np.int64]]:
        """For each image, the rows of its texts."""
        order = np.argsort(self.image_of, kind="stable")
        bounds = np.searchsorted(self.image_of[order], np.arange(len(self.images) + 1))
        return [order[bounds[i] : bounds[i + 1]] for i in range(len(self.images))]

    def fingerprint(self) -> str:
        """A hash of ids, splits, texts, pairing and image contents: two equal data sets share it."""
        digest = hashlib.sha256()
        for row, (image_id, split) in enumerate(zip(self.image_ids, self.splits, strict=True)):
            digest.update(f"{image_id}\0{split}\0{self.images.content_key(row)}\0".encode("utf-8", HALVES))
        for text in self.texts:
            digest.update(text.encode("utf-8", HALVES) + b"\0")
        digest.update(np.ascontiguousarray(self.image_of).tobytes())
        if self.picture_of is not None:
            digest.update(np.ascontiguousarray(self.picture_of).tobytes())
        return digest.hexdigest()[:16]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Pairs (image row, text)."""
        return zip(self.image_of.tolist(), self.texts, strict=True)

    def __repr__(self) -> str:
        splits = ", ".join(f"{name} {count:,}" for name, count in Counter(self.splits).items())
        counts = f"{counted(len(self.images), 'image')}, {counted(len(self.texts), 'text')}"
        return f"Captions({self.name!r}: {counts}; {splits or 'no split'})"

    def _repr_html_(self) -> str:
        first = range(min(PREVIEW_IMAGES, len(self.images)))
        some = self.subset(first)
        texts = [" · ".join(some.texts[n] for n in rows) for rows in some.texts_of()]
        cards = [
            (small_jpeg(self.images, row, notebook.SIDE), self.image_ids[row], texts[row]) for row in first
        ]
        return notebook.gallery(cards, repr(self))


def small_jpeg(images: ImageStore, row: int, side: int) -> bytes | None:
    """A thumbnail; None for features and for what cannot be read."""
    try:
        image = images[row]
    except (DataError, OSError):
        return None
    return make_thumbnail(image, side) if isinstance(image, Image.Image) else None


def first_of_each(names: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    """For each row, the first row with the same name."""
    first: dict[Any, int] = {}
    values = names.tolist() if isinstance(names, np.ndarray) else names
    return np.array([first.setdefault(name, row) for row, name in enumerate(values)], np.int64)


class StoreRows:
    """Some rows of another store, in a given order.

    Nested selections are flattened, and one that lies within a single part of a ``StoreChain`` store refers to
    that part: a split of an array is again rows of an array, which loaders read in blocks.
    """

    def __init__(self, store: ImageStore, rows: NDArray[np.int64]) -> None:
        self.store: ImageStore
        self.rows: NDArray[np.int64]
        if isinstance(store, StoreChain) and (part := store.part_of(rows)) is not None:
            store, rows = part
        if isinstance(store, StoreRows):
            self.store, self.rows = store.store, store.rows[rows]
        else:
            self.store, self.rows = store, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> StoredImage:
        return self.store[int(self.rows[index])]

    @property
    def features(self) -> bool:
        return holds_features(self.store)

    def content_key(self, index: int) -> str:
        return self.store.content_key(int(self.rows[index]))


class StoreChain:
    """Several stores one after the other (one array per split, one table per split)."""

    def __init__(self, stores: Sequence[ImageStore]) -> None:
        self.stores = list(stores)
        self.ends = np.cumsum([len(store) for store in self.stores], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> StoredImage:
        store, row = self._place(index)
        return store[row]

    @property
    def features(self) -> bool:
        return all(holds_features(store) for store in self.stores)

    def content_key(self, index: int) -> str:
        store, row = self._place(index)
        return store.content_key(row)

    def part_of(self, rows: NDArray[np.int64]) -> tuple[ImageStore, NDArray[np.int64]] | None:
        """The one store that holds all these rows, with their numbers in it; None if they lie in several."""
        if not len(rows):
            return None
        first, last = np.searchsorted(self.ends, (rows.min(), rows.max()), side="right")
        if first != last:
            return None
        return self.stores[first], rows - (self.ends[first - 1] if first else 0)

    def _place(self, index: int) -> tuple[ImageStore, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} images")
        which = int(np.searchsorted(self.ends, index, side="right"))
        return self.stores[which], index - int(self.ends[which - 1] if which else 0)


SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("val", "dev", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "tst", "testing"), "test"),
    "testall": "testall",
}
UNSPLIT = "train"  # split of data without splits, as in the datasets library


def canonical_split(name: str) -> str:
    """``dev``, ``valid``, ``validation`` become ``val``; any other name stays as it is."""
    return SPLIT_NAMES.get(name.strip().lower(), name.strip())


def split_in_name(name: str) -> str | None:
    """The split a file or folder is named after: ``flickr30k_train.json`` and ``val-0001.tar`` name one."""
    words = [SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_NAMES]
    return words[0] if words else None


def split_of_each(path: Path, files: Sequence[Path], what: str) -> list[str | None]:
    """The split that each of several files is named after; two files that cannot be told apart are refused."""
    splits = [split_in_name(file.stem) for file in files]
    if len(files) > 1 and (None in splits or len(set(splits)) < len(files)):
        names = ", ".join(file.name for file in files)
        raise DataError(f"{path} holds several {what} ({names}): keep one per split, or pass one path.")
    return splits


def split_by_hash(key: str, val: float, test: float) -> str:
    """A split that depends on ``key`` alone: the same on every machine, whatever else the data holds."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "val" if place < val else "test" if place < val + test else "train"
