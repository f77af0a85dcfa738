"""An image on its way into an index or a file of vectors: what is encoded of it, and what was done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diptych.data.captions import StoredImage
from diptych.errors import DataError, StorageError
from diptych.index.protocol import Item, Vectors
from diptych.model.protocol import CellCache, Local, Model, PairScoring
from diptych.runtime.model import PICTURES

ABSENT = "it is named by the collection but not on disk."
NO_VECTOR = "the model makes zeros, NaN or infinity of it: check the model and the picture."


@dataclass(slots=True)
class Work:
    """An image with its texts; ``reason`` says why it cannot be indexed.

    A new picture is encoded. ``keeps`` is the id of a known image of the same picture, whose vector it takes; ``done``
    says that nothing of it must be written.
    """

    row: int
    item: Item
    key: str = ""  # of the file, as an item's content begins with it
    texts: list[Item] = field(default_factory=list)
    done: bool = False
    keeps: str = ""
    picture: StoredImage | None = None
    reduced: bool = False  # the picture has fewer pixels than its file
    vector: Vectors | None = None
    local: Local | None = None
    reason: str = ""

    @property
    def names(self) -> set[str]:
        """The ids of the image and its texts."""
        return {self.item.id, *(text.id for text in self.texts)}

    @property
    def is_encoded(self) -> bool:
        """Whether the model made a direction of the picture: numbers that are not all zeros."""
        return self.vector is not None and bool(np.isfinite(self.vector).all() and self.vector.any())

    def skipped(self) -> tuple[str, str]:
        """The id, as it can be printed, and the reason."""
        return self.item.id.encode("utf-8", "replace").decode(), self.reason


class End(ABC):
    """Where images go: an index, or a file of vectors, which is written from its beginning: every image is new to it.

    The threads that read call ``key_before`` and ``compare``, the thread that encodes calls ``finish``, the thread that
    writes calls the others.
    """

    collection = 0

    def key_before(self, id: str) -> str:
        """The key of the file that the end has seen under this id, empty where it has none."""
        return ""

    def compare(self, work: Work) -> None:  # noqa: B027  nothing is to be compared with
        """Note whether an image is ``done``, and which vector it ``keeps``."""

    def accept(self, work: Work, look: Callable[[Work], None]) -> bool:
        """Whether an image belongs in the next chunk; ``look`` reads the picture of one that cannot keep its vector."""
        return True

    def finish(self, works: list[Work]) -> Any:
        """Compute what a chunk needs beside its pictures."""
        return None

    @abstractmethod
    def commit(self, works: list[Work], finished: Any) -> None:
        """Write a chunk."""


@dataclass(slots=True)
class IndexingResult:
    """What ``index_collection`` did.

    ``images`` and ``texts`` are those of the collection, ``total`` all images of the index; ``moved`` ones kept their
    vector under another id.
    ``skipped`` are (image id, reason) of what could not be read, ``notes`` sentences for the user.
    """

    images: int = 0
    texts: int = 0
    added: int = 0
    updated: int = 0
    unchanged: int = 0
    removed: int = 0
    moved: int = 0
    total: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


ON_CPU, ON_GPU = 8, 64  # pictures encoded at a time; on a CPU more are slower and take more memory
PREDICTED, SCORES = "predicted_labels", "label_scores"  # columns of the labels a model predicts
SCORE_DIGITS = 4  # digits of a stored label score
Labeller = Callable[..., Sequence[Mapping[str, float]]]
"""``predict_labels`` of a model: pictures to labels with their scores, best first."""


class BatchEncoder:
    """Encodes the pictures of a batch, and lets go of them; ``batch_size`` None suits the device."""

    def __init__(
        self,
        model: Model,
        batch_size: int | None,
        shared: SharedFeatures | None = None,
        labeller: Labeller | None = None,
        scorer: PairScoring | None = None,
    ) -> None:
        on_cpu = PICTURES if getattr(model, "backend", "torch") == "onnx" else ON_CPU
        own = on_cpu if getattr(model, "device", "cpu") == "cpu" else ON_GPU
        self.model, self.batch_size = model, batch_size or own
        self.shared, self.labeller, self.scorer = shared, labeller, scorer

    def __call__(self, works: list[Work]) -> None:
        """Fill in the vectors, and what else is made of the pictures."""
        pictures: Sequence[Any] = [work.picture for work in works]
        if self.shared is not None:
            pictures = self.shared.items(works)
        rows = self.model.encode_image(pictures, batch_size=self.batch_size)
        if self.labeller is not None:
            for work, found in zip(works, self.labeller(pictures, batch_size=self.batch_size), strict=True):
                scores = [round(score, SCORE_DIGITS) for score in found.values()]
                columns = {PREDICTED: list(found), SCORES: scores}
                work.item = replace(work.item, metadata={**work.item.metadata, **columns})
                work.texts = [replace(text, metadata={**text.metadata, **columns}) for text in work.texts]
        if self.scorer is not None:
            for work, local in zip(works, self.scorer.image_features(pictures), strict=True):
                work.local = local
        for work, vector in zip(works, rows, strict=True):
            work.vector, work.picture = vector, None


class SharedFeatures:
    """The feature cache as an index uses it: cells that are known are read, others are computed and added.

    Those of a reduced picture are not added: training reads the whole one. The cache is a convenience here: where it
    cannot be written, the index is made without it.
    """

    def __init__(self, cache: CellCache, content: Callable[[str], str]) -> None:
        self.cache, self.content, self.writing = cache, content, True
        self.note = ""

    @staticmethod
    def of(model: Any, content: Callable[[str], str]) -> SharedFeatures | None:
        """The cache of a model whose image encoder has a frozen backbone, else None; ``content`` reads a file's key."""
        opening = getattr(model, "cell_cache", None)
        cache = None if opening is None else opening()
        return None if cache is None else SharedFeatures(cache, content)

    def cells_of(self, key: str) -> NDArray[Any] | None:
        """The cells of a picture that some command has computed."""
        try:
            return self.cache.find(key)
        except DataError:  # it was cleared meanwhile
            return None

    def items(self, works: Sequence[Work]) -> Sequence[StoredImage]:
        """Cells in the place of pictures; what is cells already stays."""
        found: dict[int, Any] = {n: work.picture for n, work in enumerate(works)}
        pictures = [n for n, picture in found.items() if isinstance(picture, Image.Image)]
        for reduced in (False, True):
            some = [n for n in pictures if works[n].reduced is reduced]
            if some:
                keys = [self.content(works[n].key) for n in some]
                found.update(zip(some, self._cells(keys, [found[n] for n in some], not reduced), strict=True))
        return list(found.values())

    def _cells(self, keys: list[str], pictures: list[StoredImage], store: bool) -> NDArray[np.float16]:
        try:
            return self.cache.compute(keys, pictures, store=store and self.writing)
        except StorageError as error:
            self.writing, self.note = False, f"features are not cached: {error}"
            return self.cache.compute(keys, pictures, store=False)
