"""A path selects the embedded engine, a URL the remote one; everything after that is the same."""

from __future__ import annotations

import re
from pathlib import Path

from diptych.errors import SettingsError
from diptych.index.embedded.index import EmbeddedIndex
from diptych.index.protocol import Index, Precision


def open_index(
    place: str | Path, *, writable: bool = False, fingerprint: str | None = None, model: str = ""
) -> Index:
    """The index at a path or URL; with ``fingerprint``, one made by another model is refused by name.

    ``model`` is what the model with that fingerprint is called in the refusal.
    """
    if (url := _database_url(place)) is not None:
        from diptych.index.postgres.index import PostgresIndex

        return PostgresIndex.open(url, writable=writable, fingerprint=fingerprint, model=model)
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
    if (url := _database_url(place)) is not None:
        from diptych.index.postgres.index import PostgresIndex

        return PostgresIndex.create(url, dimension, model=model, fingerprint=fingerprint, precision=precision)
    return EmbeddedIndex.create(
        _local(place), dimension, model=model, fingerprint=fingerprint, precision=precision
    )


def index_exists(place: str | Path) -> bool:
    """Whether there is an index to open."""
    if (url := _database_url(place)) is not None:
        from diptych.index.postgres.index import PostgresIndex

        return PostgresIndex.exists(url)
    return (_local(place) / "index.db").is_file()


def shown(place: str | Path) -> str:
    """A place as messages show it: a database's URL without the password."""
    if (url := _database_url(place)) is None:
        return str(place)
    return re.sub(r"(?<=[?&]password=)[^&]*", "", re.sub(r"(://[^:@/]*):[^@/]*@", r"\1@", url, count=1))


def _database_url(place: str | Path) -> str | None:
    """The place when it is a PostgreSQL database, whose driver is imported only then."""
    if isinstance(place, str) and place.startswith(("postgresql://", "postgres://")):
        return place
    return None


def _local(place: str | Path) -> Path:
    if isinstance(place, str) and "://" in place:
        scheme = place.split("://", 1)[0]
        raise SettingsError(
            f"no index engine is known for '{scheme}://': give the path of a folder, or a postgresql:// URL."
        )
    return Path(place).expanduser()
