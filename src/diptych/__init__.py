"""Diptych: a workbench for image-text retrieval.

Data and models: ``open_captions`` reads a data set into ``Captions``, ``train`` gives a ``Retriever``, ``evaluate`` and
``evaluate_embeddings`` give a ``Report``, ``compare`` compares two.

Search: ``index_folder`` makes a folder of pictures searchable, ``create_index`` your own vectors, ``search`` answers
one query with ``Hits``, ``Searcher.open`` many, ``open_index`` opens an index itself.

Every error for a user is a ``DiptychError``. Importing this package imports nothing heavy: each name is imported when
it is first used. docs/python.md has an example of each task.

Example::

    hits = diptych.search("photos", "two parrots")
    print(hits[0].item.id)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from diptych.errors import (
    AddressError,
    CheckpointError,
    DataError,
    DiptychError,
    ImageError,
    IndexFault,
    Interrupted,
    MissingExtra,
    QueryError,
    RuntimeFault,
    SettingsError,
    StorageError,
    TrainingError,
    Unavailable,
    without_torch,
)

if TYPE_CHECKING:
    from diptych.data.captions import Captions
    from diptych.data.formats import open_captions
    from diptych.evaluation.evaluate import evaluate, evaluate_embeddings
    from diptych.evaluation.report import Report
    from diptych.index.engines.opening import open_index
    from diptych.index.ingest.target import create_index
    from diptych.index.places import index_folder
    from diptych.index.protocol import Hits
    from diptych.index.query.search import Searcher, search
    from diptych.model.retriever import Retriever
    from diptych.runs.compare import compare
    from diptych.runs.train import train

__version__ = "0.2.0"
# ONNX Runtime reads it when it is loaded, and would report to Microsoft
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
__all__ = [
    "AddressError",
    "Captions",
    "CheckpointError",
    "DataError",
    "DiptychError",
    "Hits",
    "ImageError",
    "IndexFault",
    "Interrupted",
    "MissingExtra",
    "QueryError",
    "Report",
    "Retriever",
    "RuntimeFault",
    "Searcher",
    "SettingsError",
    "StorageError",
    "TrainingError",
    "Unavailable",
    "__version__",
    "compare",
    "create_index",
    "evaluate",
    "evaluate_embeddings",
    "index_folder",
    "open_captions",
    "open_index",
    "search",
    "train",
]

_HOMES = {
    "Captions": "data.captions",
    "Hits": "index.protocol",
    "Report": "evaluation.report",
    "Retriever": "model.retriever",
    "Searcher": "index.query.search",
    "compare": "runs.compare",
    "create_index": "index.ingest.target",
    "evaluate": "evaluation.evaluate",
    "evaluate_embeddings": "evaluation.evaluate",
    "index_folder": "index.places",
    "open_captions": "data.formats",
    "open_index": "index.engines.opening",
    "search": "index.query.search",
    "train": "runs.train",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: importing the package itself stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'diptych' has no attribute '{name}'")
    import importlib

    try:
        return getattr(importlib.import_module(f"diptych.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        raise without_torch(error, f"diptych.{name}") from error


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]
