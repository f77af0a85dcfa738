"""A path selects the embedded engine, a URL the remote one; everything after that is the same."""

from __future__ import annotations

from pathlib import Path

from diptych.errors import SettingsError
from diptych.index.embedded import EmbeddedIndex
from diptych.index.protocol import Index, Precision


def open_index(
    place: str | Path, *, writable: bool = False, fingerprint: str | None = None, model: str = ""
) -> Index:
    """The index at a path; with ``fingerprint``, one made by another model is refused by name.

    ``model`` is what the model with that fingerprint is called in the refusal.
    """
    return EmbeddedIndex.open(_local(place), writable=writable, fingerprint=fingerprint, model=model)


def create_index(
    place: str | Path,
    dimension: int,
    *,
    model: str = "",
    fingerprint: str = "",
    precision: Precision = "float32",
) -> Index:
    """A new, empty index, open for writing."""
    return EmbeddedIndex.create(
        _local(place), dimension, model=model, fingerprint=fingerprint, precision=precision
    )


def index_exists(place: str | Path) -> bool:
    """Whether there is an index to open."""
    return (_local(place) / "index.db").is_file()


def _local(place: str | Path) -> Path:
    if isinstance(place, str) and "://" in place:
        scheme = place.split("://", 1)[0]
        raise SettingsError(f"no index engine is known for '{scheme}://': give the path of a folder.")
    return Path(place).expanduser()
