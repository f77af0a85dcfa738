"""Which vectors of a model uni-modal evaluation reads."""

from __future__ import annotations

from diptych.branches.heads import UniModalHeads
from diptych.model.retriever import Retriever
from diptych.objectives.soft_labels import UNI


def uni_view(model: Retriever) -> str | None:
    """The view "uni" where the model has one, else None: the towers' own vectors."""
    return UNI if UNI in model.branches else None


def name_of_view(model: Retriever) -> str:
    """What these vectors are, for the card of a report."""
    if uni_view(model) is None:
        return "the towers' own"
    return "uni-modal heads" if isinstance(model.branches[UNI], UniModalHeads) else "the encoders' own"
