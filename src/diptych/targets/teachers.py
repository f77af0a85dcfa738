"""Teachers: frozen encoders whose vectors say how alike two images, or two texts, are (CUSA's soft labels).

Any image backbone and any text transformer can teach. Its vectors are computed once and kept as one float16 matrix,
which every process of every run reads from the same file; or they are computed again for each batch (``Live``).
A file is named by the teacher's weights, its preparation of inputs and the content of the data: another teacher or
other data is another file. A killed extraction goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from diptych import ops
from diptych.cache.contents import content_name
from diptych.cache.features import cached_image_features, cells_now, compute_cells, hash_of
from diptych.cache.rows import kept_rows
from diptych.data.arrays import ArrayStore, ranges, read_items
from diptych.data.captions import ImageStore, holds_pictures
from diptych.data.images import ImageInput, as_item
from diptych.data.text import TextInput
from diptych.encoders.encoder import Backbone
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError, at_least, one_of
from diptych.parts import describe
from diptych.progress import track
from diptych.storage import cache_folder
from diptych.types import as_inputs

Space = Literal["pooled", "tokens"]
TEXT_CHUNK = 2048  # texts between two writes
TEXT_BATCH = 64
STORED_CHUNK = 1024  # images whose stored features are read at a time
PROJECTION_SEED = 0  # seed of the Gaussian matrix, the same in every run


class ImageTeacher:
    """A frozen image backbone as a teacher: pictures → unit vectors (n, dim).

    =====================  ===============================================================================
    CUSA                   argument
    =====================  ===============================================================================
    x_i                    ``space``: "pooled" is the mean of the cells (channels), "tokens" all cells end
                           to end (R · channels), as the public code takes Unicom's 49 tokens of 768
    cheap equivalent       ``project``: a fixed Gaussian projection to this number of dimensions (2,048 keeps
                           cosines to about ±0.02); 0 keeps every dimension
    =====================  ===============================================================================
    """

    def __init__(
        self, backbone: Backbone, image_input: ImageInput, space: Space = "pooled", project: int = 0
    ) -> None:
        self.backbone, self.image_input = backbone.eval().requires_grad_(False), image_input
        self.space = one_of(space, "the image teacher's space", Space)
        self.projection = Projection(project)

    def identity(self) -> str:
        """Names the weights, the preparation of pictures, the space and the projection."""
        return content_name(
            self.backbone.fingerprint(),
            json.dumps(describe(self.image_input)),
            self.space,
            self.projection.identity(),
        )

    def of_cells(self, cells: NDArray[Any]) -> NDArray[np.float32]:
        """Vectors (n, dim) of cells (n, R, C)."""
        flat = cells.mean(axis=1) if self.space == "pooled" else cells.reshape(len(cells), -1)
        return self.projection(flat)

    def chunks(
        self, store: ImageStore, start: int, folder: str | Path | None, show_progress: bool
    ) -> Iterator[tuple[NDArray[np.float32], int]]:
        """The vectors of images ``start``… in chunks worth writing, each with its number of images.

        Where a run has cached this very backbone's cells of these images, they are read instead of computed.
        """
        cells = cached_image_features(self.backbone, self.image_input, store, folder)
        if cells is not None:
            for rows in ranges(start, len(cells), STORED_CHUNK):
                yield self.of_cells(cells.rows(rows).astype(np.float32)), len(rows)
            return
        for chunk in compute_cells(
            self.backbone, self.image_input, store, start, label="image teacher", show_progress=show_progress
        ):
            yield self.of_cells(chunk.values()), chunk.images

    def check(self, store: ImageStore) -> None:
        if not holds_pictures(store):
            raise DataError(
                "the data holds stored features, which an image teacher cannot look at: use the teacher 'stored', or "
                "give a file of teacher vectors (a matrix with a row per image, or a dict {image id: vector})."
            )

    def __call__(self, items: Sequence[Any]) -> NDArray[np.float32]:
        """Vectors (n, dim) of some pictures, now."""
        return self.of_cells(cells_now(self.backbone, self.image_input, [as_item(item) for item in items]))


class StoredTeacher:
    """The stored features of the data as their own teacher: the mean of an image's regions or cells."""

    def __init__(self, project: int = 0) -> None:
        self.projection = Projection(project)

    def identity(self) -> str:
        """Names the projection; the features are the data's."""
        return content_name("stored", self.projection.identity())

    def chunks(
        self, store: ImageStore, start: int, folder: str | Path | None, show_progress: bool
    ) -> Iterator[tuple[NDArray[np.float32], int]]:
        """The vectors of images ``start``… in chunks worth writing, each with its number of images."""
        for rows in track(ranges(start, len(store), STORED_CHUNK), "image teacher", show=show_progress):
            yield self([*read_items(store, np.asarray(rows))]), len(rows)

    def check(self, store: ImageStore) -> None:
        if holds_pictures(store):
            raise DataError("the data holds pictures, not features: name an image teacher, such as lite0.")

    def __call__(self, items: Sequence[Any]) -> NDArray[np.float32]:
        """Vectors (n, dim) of the features (R, dim) or (dim,) of some images."""
        return self.projection(
            np.stack([np.atleast_2d(item).astype(np.float32).mean(axis=0) for item in items])
        )


class TextTeacher:
    """A frozen transformer as a teacher: texts → unit vectors (n, dim), the mean of the last hidden states."""

    def __init__(self, encoder: TransformerText, text_input: TextInput, project: int = 0) -> None:
        self.encoder, self.text_input = encoder.eval().requires_grad_(False), text_input
        self.projection = Projection(project)
        self._identity: str | None = None

    def identity(self) -> str:
        """Names the weights, the tokenizer and the projection; found once, for a teacher is frozen."""
        if self._identity is None:
            self._identity = content_name(
                self.encoder.fingerprint(), json.dumps(describe(self.text_input)), self.projection.identity()
            )
        return self._identity

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors (n, dim) of some texts, now; batched by length."""
        device = next(self.encoder.parameters()).device
        store = self.text_input.prepare(texts)
        order = sorted(range(len(store)), key=store.size)
        found = np.zeros((len(store), self.encoder.hidden), dtype=np.float32)
        for start in range(0, len(order), TEXT_BATCH):
            rows = order[start : start + TEXT_BATCH]
            states = self.encoder.states(as_inputs(store.collate(rows)).to(device))
            found[rows] = ops.masked_mean(states.values.float(), states.mask).cpu().numpy()
        return self.projection(found)


class Projection:
    """Unit rows, then x G / √dim with a fixed Gaussian G (D, dim), then unit rows; ``dim`` 0 leaves G out."""

    def __init__(self, dim: int = 0) -> None:
        self.dim = at_least(dim, "the width of the projection", 0)
        self._matrix: NDArray[np.float32] | None = None

    def identity(self) -> str:
        """Names the matrix."""
        return f"gaussian {self.dim} seed {PROJECTION_SEED}" if self.dim else "whole"

    def __call__(self, vectors: NDArray[Any]) -> NDArray[np.float32]:
        """(n, D) → (n, dim or D) of unit length."""
        rows = _unit(np.asarray(vectors, dtype=np.float32))
        if not self.dim:
            return rows
        if self._matrix is None:
            rng = np.random.default_rng(PROJECTION_SEED)
            self._matrix = rng.standard_normal((rows.shape[1], self.dim), dtype=np.float32)
        return _unit(rows @ self._matrix)


class Live(ArrayStore):
    """Vectors that are computed when a batch asks for them: no cache on disk, and a teacher in every step.

    ``compute`` maps row numbers to vectors (n, dim).
    """

    def __init__(self, compute: Callable[[NDArray[np.int64]], NDArray[np.float32]], count: int) -> None:
        first = compute(np.zeros(1, dtype=np.int64))
        super().__init__(np.zeros((0, first.shape[1]), dtype=np.float32))
        self.compute, self.shape = compute, (count, first.shape[1])

    def rows(self, indices: Any, *, pin_memory: bool = False) -> NDArray[Any]:
        """(len(indices), dim), computed now; a row asked for twice is computed once."""
        distinct, back = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True)
        return self.compute(distinct)[back]


def vectors_of_images(
    teacher: ImageTeacher | StoredTeacher,
    store: ImageStore,
    folder: str | Path | None = None,
    *,
    live: bool = False,
    show_progress: bool = True,
) -> ArrayStore:
    """The teacher's vector of every image, (N, dim): computed once, in float16, or ``live``, batch by batch.

    Cells that are in the cache are not computed again.
    """
    if not len(store):
        raise DataError("an image teacher needs images, and the data has none.")
    teacher.check(store)
    if not live:
        path, key = _place(
            folder, "images", teacher.identity(), hash_of(store.content_key(row) for row in range(len(store)))
        )
        rows = kept_rows(path, key, lambda start: teacher.chunks(store, start, folder, show_progress))
        return ArrayStore(rows, mapped=True)
    if isinstance(teacher, ImageTeacher):
        cells = cached_image_features(teacher.backbone, teacher.image_input, store, folder)
        if cells is not None:
            found, of_cells = cells, teacher.of_cells
            return Live(lambda rows: of_cells(found.rows(rows).astype(np.float32)), len(store))
    return Live(lambda rows: teacher([*read_items(store, rows)]), len(store))


def vectors_of_texts(
    teacher: TextTeacher,
    texts: Sequence[str],
    folder: str | Path | None = None,
    *,
    live: bool = False,
    show_progress: bool = True,
) -> ArrayStore:
    """The teacher's vector of every text, (M, dim): computed once, in float16, or ``live``, batch by batch."""
    if live:
        return Live(lambda rows: teacher([texts[i] for i in rows.tolist()]), len(texts))
    path, key = _place(folder, "texts", teacher.identity(), hash_of(texts))

    def vectors(first: int) -> Iterator[tuple[NDArray[np.float32], int]]:
        for rows in track(ranges(first, len(texts), TEXT_CHUNK), "text teacher", show=show_progress):
            yield teacher(texts[rows.start : rows.stop]), len(rows)

    return ArrayStore(kept_rows(path, key, vectors), mapped=True)


def _place(folder: str | Path | None, what: str, *parts: str) -> tuple[Path, str]:
    key = content_name("teacher", what, *parts)
    return cache_folder(folder) / f"teacher-{what}-{key}.npy", key


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-8), dtype=np.float32)
