"""The place where the search half opens models; nothing else of it knows what runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diptych.errors import QueryError
from diptych.index.protocol import IndexInfo
from diptych.model.protocol import OpenedModel, Rows


def open_model(place: str | Path, device: str | None = "cpu", precision: str = "no") -> OpenedModel:
    """The model of a folder, a run or a name (``hf:ID``, ``lite0+minilm``), for indexes and searches.

    ``device`` is a name (``auto``: the best there is), ``precision`` that of encoding.
    """
    from diptych.model.adapter import TorchModel
    from diptych.model.retriever import Retriever

    return TorchModel(Retriever.from_pretrained(place, device, precision))


class StoredVectors:
    """Stands for the model of an index in queries that name items alone: their vectors are stored."""

    device, precision = "cpu", "no"

    def __init__(self, info: IndexInfo) -> None:
        self._info = info

    @property
    def dim(self) -> int:
        """Length of a stored vector."""
        return self._info.dimension

    def fingerprint(self) -> str:
        """That of the model that made the index."""
        return self._info.fingerprint

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Rows:
        """Refused: nothing here encodes."""
        raise QueryError("this index was opened without its model: ask for more like one of its items.")

    encode_text = encode_image
