"""Pictures into vectors, labels and local features; features in the shared cache are not computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diptych.data.captions import StoredImage
from diptych.errors import DataError, StorageError
from diptych.index.ingest.works import Work
from diptych.model.protocol import CellCache, Model, PairScoring

ON_CPU, ON_GPU = 8, 64  # pictures encoded at a time; on a CPU more are slower and take more memory
PREDICTED, SCORES = "predicted_labels", "label_scores"  # columns of the labels a model predicts
SCORE_DIGITS = 4  # digits of a stored label score
Labeller = Callable[..., Sequence[Mapping[str, float]]]
"""``predict_labels`` of a model: pictures to labels with their scores, best first."""


class Encoder:
    """Encodes the pictures of a batch, and lets go of them; ``batch_size`` None suits the device."""

    def __init__(
        self,
        model: Model,
        batch_size: int | None,
        shared: SharedFeatures | None = None,
        labeller: Labeller | None = None,
        scorer: PairScoring | None = None,
    ) -> None:
        on_gpu = getattr(model, "device", "cpu") != "cpu"
        self.model, self.batch_size = model, batch_size or (ON_GPU if on_gpu else ON_CPU)
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

    def known(self, key: str) -> NDArray[Any] | None:
        """The cells of a picture that some command has computed."""
        try:
            return self.cache.known(key)
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
