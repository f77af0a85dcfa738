"""Diptych: a workbench for image-text retrieval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["Captions", "Retriever", "__version__", "evaluate", "open_captions", "open_index"]

if TYPE_CHECKING:
    from diptych.data.captions import Captions
    from diptych.data.formats import open_captions
    from diptych.evaluation.retrieval import evaluate
    from diptych.index.engines.opening import open_index
    from diptych.model.retriever import Retriever

_HOMES = {
    "Captions": "diptych.data.captions",
    "open_captions": "diptych.data.formats",
    "evaluate": "diptych.evaluation.retrieval",
    "open_index": "diptych.index.engines.opening",
    "Retriever": "diptych.model.retriever",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: importing the package itself stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'diptych' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
