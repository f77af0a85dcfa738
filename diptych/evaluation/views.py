"""Which vectors of a model uni-modal evaluation reads."""

from __future__ import annotations

from diptych.objectives.soft_labels import UNI
from diptych.retriever import Retriever


def uni_view(model: Retriever) -> str | None:
    """The view "uni" where the model has uni-modal heads, else None: the towers' own vectors."""
    return UNI if UNI in model.branches else None
