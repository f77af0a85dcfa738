"""What the search half and evaluation ask of a model. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # opening an index must not cost the memory of torch
    import torch

    from diptych.data.captions import StoredImage
    from diptych.data.text import TextInput
    from diptych.model.scores import Scores

Rows = NDArray[np.float32]
Local = NDArray[np.float16]
"""The local features (L, D) of one item."""


class Model(Protocol):
    """A model as indexes, searches and the service see it: vectors of images and of texts, in numpy."""

    @property
    def dim(self) -> int:
        """Length of an encoded vector."""

    def fingerprint(self) -> str:
        """A string that two models share exactly when they score alike."""

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Rows:
        """Rows (N, dim) for a list or store of images."""

    def encode_text(self, texts: Any, *, batch_size: int | None = None) -> Rows:
        """Rows (M, dim) for a list or store of texts."""


class OpenedModel(Model, Protocol):
    """A model that was opened by its name or folder: it also says what runs it, where, and how precisely."""

    @property
    def backend(self) -> str:
        """``torch`` or ``onnx``."""

    @property
    def device(self) -> str:
        """The name of the device: ``cpu``, ``cuda:0``."""

    @property
    def precision(self) -> str:
        """``no``, ``bf16`` or ``fp16``."""


class PairScoring(Protocol):
    """What looks at both sides of a pair together: the ``pairs`` of a model that has a pair scorer."""

    def image_features(self, images: Any) -> list[Local]:
        """The local features of each image."""

    def scores(self, images: Sequence[Local], texts: Sequence[str]) -> Rows:
        """Scores (N, M) of images, given by their local features, against texts."""


class CellCache(Protocol):
    """Outputs of a frozen image backbone that commands share: the ``cell_cache()`` of a model that has one."""

    cells: Callable[[Sequence[StoredImage]], Rows]
    """Computes the cells (n, R, C) of pictures."""

    def find(self, key: str) -> Local | None:
        """The cells of the picture with this content key, None where they were never computed."""

    def compute(
        self, keys: Sequence[str], pictures: Sequence[StoredImage], *, store: bool = True
    ) -> NDArray[np.float16]:
        """The cells of pictures, computed now and, with ``store``, added to the cache."""


def pairs_of(model: Any) -> PairScoring | None:
    """The pair scorer of a model, None where it has none."""
    found: PairScoring | None = getattr(model, "pairs", None)
    return found


def text_input_of(model: Any) -> TextInput | None:
    """How a model reads texts, None where it does not say."""
    found: TextInput | None = getattr(model, "text_input", None)
    return found


def picture_side(model: Any) -> int | None:
    """Pixels that the ``image_input`` of a model resizes the short side of a picture to; None where it has none."""
    found: int | None = getattr(getattr(model, "image_input", None), "side", None)
    return found


class Scorer(Protocol):
    """A model as evaluation sees it: scores of images against texts, tile by tile, and a name for its weights."""

    def fingerprint(self) -> str:
        """A string that two models share exactly when they score alike."""

    def scores(
        self,
        images: Any,
        texts: Any,
        *,
        image_batch_size: int | None = ...,
        text_batch_size: int | None = ...,
        device: torch.device | str | None = ...,
        show_progress: bool = ...,
    ) -> Scores:
        """Scores (N, M) of a store of images against a store of texts."""
