"""A path selects the embedded engine, the scheme of a URL another one; everything after that is the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from diptych.index.base import Index
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.registries import ENGINES
from diptych.storage import expanded


def open_index(
    place: str | Path, *, writable: bool = False, fingerprint: str | None = None, model: str = ""
) -> Index:
    """The index at a path or URL; with ``fingerprint``, one made by another model is refused by name.

    ``model`` is what the model with that fingerprint is called in the refusal.

    Example::

        with diptych.open_index("photos.index") as index:
            print(len(index), index.info.model)
    """
    engine, where = _engine(place)
    opened: Index = engine.open(where, writable=writable, fingerprint=fingerprint, model=model)
    return opened


def empty_index(place: str | Path, dimension: int, **facts: str) -> Index:
    """A new, empty index, open for writing; ``facts`` are the further arguments of ``Index.create``."""
    engine, where = _engine(place)
    made: Index = engine.create(where, dimension, **facts)
    return made


def index_exists(place: str | Path) -> bool:
    """Whether there is an index to open."""
    engine, where = _engine(place)
    return bool(engine.exists(where))


def without_password(place: str | Path) -> str:
    """A place as messages show it: a database's URL without the password."""
    if _scheme(place) is None:
        return str(place)
    hidden = re.sub(r"(://[^:@/]*):[^@/]*@", r"\1@", str(place), count=1)
    return re.sub(r"(?<=[?&]password=)[^&]*", "", hidden)


def _engine(place: str | Path) -> tuple[Any, str | Path]:
    scheme = _scheme(place)
    if scheme is None:
        return EmbeddedIndex, expanded(place)
    return ENGINES.find(scheme), str(place)


def _scheme(place: str | Path) -> str | None:
    return place.split("://", 1)[0] if isinstance(place, str) and "://" in place else None
