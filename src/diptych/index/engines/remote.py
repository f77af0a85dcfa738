"""What the engines on servers decide alike: what they say, and what they keep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from diptych.index.base import Index
from diptych.index.protocol import KINDS, Collection, Recall
from diptych.index.query.filters import Filter, parse_filter

ABSENT = "there is no index at {}: index a collection there first."
TAKEN = "{} is already an index: open it, or choose another name."
OTHER = "{} is {} of something else: choose another name for the index."
FAILED = "{} answered with an error ({}): check the index with 'diptych index verify'."
SILENT = "the {} does not answer ({}): start it or check the URL, then try again."
INCOMPLETE = (
    "{} is incomplete ({}): restore the whole index again, or index the collection again under another name."
)


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

    def _recalls(self, kinds: Iterable[str]) -> dict[str, Recall]:
        """What was measured of the approximate indexes of some kinds."""
        found = {kind: self._kept_recall(kind) for kind in KINDS if kind in kinds}
        return {kind: recall for kind, recall in found.items() if recall is not None}

    @staticmethod
    def _parsed(filter: str | Filter, columns: Mapping[str, Sequence[str]]) -> Filter:
        """A filter as a tree, checked against the columns that the index has now."""
        return parse_filter(filter, columns) if isinstance(filter, str) else filter
