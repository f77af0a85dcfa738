"""The place where the search half opens models; nothing else of it knows what runs them."""

from __future__ import annotations

from pathlib import Path

from diptych.model.protocol import OpenedModel


def open_model(place: str | Path, device: str | None = "cpu", precision: str = "no") -> OpenedModel:
    """The model of a folder, a run or a name (``hf:ID``, ``lite0+minilm``), for indexes and searches.

    ``device`` is a name (``auto``: the best there is), ``precision`` that of encoding.
    """
    from diptych.model.adapter import TorchModel
    from diptych.model.retriever import Retriever

    return TorchModel(Retriever.from_pretrained(place, device, precision))
