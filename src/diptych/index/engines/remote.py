"""What the engines on servers decide alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from diptych.index.base import Index
from diptych.index.protocol import Collection
from diptych.index.query.filters import Filter, parse_filter


class RemoteIndex(Index):
    """An index on a server. Safe to share between threads.

    A server that goes away makes requests fail with ``Unavailable``; the first one after it is back works again.
    """

    path: str

    @abstractmethod
    def _collections(self) -> tuple[Collection, ...]:
        """Where the items came from."""

    def _root(self, collection: int) -> str:
        return {one.number: one.root for one in self._collections()}.get(collection, "")

    @staticmethod
    def _parsed(filter: str | Filter, columns: Mapping[str, Sequence[str]]) -> Filter:
        """A filter as a tree, checked against the columns that the index has now."""
        return parse_filter(filter, columns) if isinstance(filter, str) else filter
