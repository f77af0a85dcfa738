"""What evaluation, the index and the service ask of a model; ``Retriever`` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # opening an index must not cost the memory of torch
    import torch

    from diptych.model.scores import Scores


class Model(Protocol):
    """A model that encodes images and texts, and scores them against each other."""

    @property
    def dim(self) -> int:
        """Length of an encoded vector."""
        ...

    def fingerprint(self) -> str:
        """A string that two models share exactly when they score alike."""
        ...

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Any:
        """Rows (N, dim) for a list or store of images."""
        ...

    def encode_text(self, texts: Any, *, batch_size: int | None = None) -> Any:
        """Rows (M, dim) for a list or store of texts."""
        ...


class Scorer(Protocol):
    """A model as evaluation sees it: scores of images against texts, tile by tile, and a name for its weights."""

    def fingerprint(self) -> str:
        """A string that two models share exactly when they score alike."""
        ...

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
        ...
