"""What every index engine is: items in, hits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from diptych import notebook
from diptych.index.query.filters import Filter

Kind = Literal["image", "text"]
KINDS: tuple[Kind, ...] = ("image", "text")
Precision = Literal["float32", "float16", "binary"]
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "binary")
Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Item:
    """One image or text of a collection.

    ``id`` is stable and unique in the index (a relative path, a data set's own id). ``collection`` is the
    number of the collection it came from, under whose root ``path`` lies (relative, with forward slashes;
    empty when there is no file). ``text`` is the text itself, or the texts of an image, one a line.
    ``image_id`` links a text to its image. ``metadata`` holds the columns filters read; ``content`` changes
    when the file or text changes. ``thumbnail`` is a small JPEG stored beside the item; it is written by
    ``add`` and read by ``Index.thumbnail``, never by a search.
    """

    id: str
    kind: Kind = "image"
    path: str = ""
    text: str = ""
    image_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    content: str = ""
    collection: int = 0
    thumbnail: bytes | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """An item and its score; ``details`` says what a fused or re-ranked score was made of."""

    item: Item
    score: float
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hits(Sequence[Hit]):
    """The best items of one query, best first.

    Of equal scores the images come first, and each kind in the order in which its items were added.
    ``exact`` says whether every candidate was scored. ``cutoff``, where the query layer computed one, is the
    score below which an item of this collection does not match this query; ``strength`` is the best score on
    the same scale in units of the background's spread, so ``matched`` is False when nothing in the collection
    matches. ``note`` says how reliable the cut-off is, or why there is none; ``warning`` says that the model may not
    know the words of the query. ``preview`` gives a small JPEG of an item, which notebooks show.

    Example::

        hits = diptych.search("photos.index", "two parrots")
        print(len(hits), hits.ids[:3], hits[0].score)
    """

    hits: tuple[Hit, ...] = ()
    exact: bool = True
    cutoff: float | None = None
    strength: float | None = None
    note: str = ""
    warning: str = ""
    preview: Callable[[Item], bytes | None] | None = field(default=None, compare=False)

    @property
    def matched(self) -> bool:
        """Whether at least one hit reaches the cut-off (True for any hit when none was computed)."""
        return bool(self.matches)

    @property
    def matches(self) -> tuple[Hit, ...]:
        """The hits that reach the cut-off or have every word of a hybrid query; all when none was computed."""
        cutoff = self.cutoff
        if cutoff is None:
            return self.hits
        return tuple(
            hit
            for hit in self.hits
            if hit.details.get("similarity", hit.score) >= cutoff or hit.details.get("words", 0) >= 1
        )

    @property
    def ids(self) -> list[str]:
        """The ids, best first."""
        return [hit.item.id for hit in self.hits]

    @property
    def scores(self) -> list[float]:
        """The scores, best first."""
        return [hit.score for hit in self.hits]

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, index: Any) -> Any:
        return self.hits[index]

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __repr__(self) -> str:
        return f"Hits({_few([f'{hit.item.id} {hit.score:.3f}' for hit in self.hits])})"

    def _repr_html_(self) -> str:
        look = self.preview or (lambda item: item.thumbnail)
        return notebook.gallery(
            [
                (
                    look(hit.item),
                    f"{hit.score:.3f}",
                    hit.item.id if hit.item.kind == "image" else hit.item.text,
                )
                for hit in self.hits
            ],
            " ".join(f"{sentence}." for sentence in (self.warning, self.note) if sentence),
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], *([f"… {len(names)} in all"] if len(names) > 3 else [])]) or "none"


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a query: a text, an image (path, picture or array), the address of one, or an item's id."""

    value: Any
    kind: Literal["text", "image", "url", "item"] = "text"
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Query:
    """A weighted sum of terms: its vector is unit(Σ weight · unit(encode(term)))."""

    terms: tuple[Term, ...]

    @property
    def text(self) -> str:
        """The words of the terms that pull (weight above 0), which full-text search reads."""
        return " ".join(str(t.value) for t in self.terms if t.kind == "text" and t.weight > 0)


@dataclass(frozen=True, slots=True)
class Collection:
    """Where items came from: a name, and the folder their paths are relative to (empty for none)."""

    number: int
    name: str
    root: str = ""


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """What an index says of itself; cheap to ask at any size."""

    path: str
    engine: str
    dimension: int
    precision: Precision
    model: str
    fingerprint: str
    version: str
    created: str
    counts: Mapping[str, int]
    deleted: int
    size: int
    columns: Mapping[str, tuple[str, ...]]
    collections: tuple[Collection, ...]
    approximate: Mapping[str, int]
    coded: tuple[str, ...] = ()  # kinds whose approximate index is a table of binary codes

    def __len__(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """Two items whose vectors nearly agree."""

    first: Item
    second: Item
    score: float


class Index(Protocol):
    """A searchable set of items with their vectors.

    An operation that has returned is durable. Readers see the state of the last finished operation, whole.
    The score is the dot product of the query with the stored vector, computed in float64 for the hits that
    are returned, so that it does not depend on the size of the batch a query came in.
    """

    @property
    def info(self) -> IndexInfo:
        """What the index says of itself."""
        ...

    @property
    def generation(self) -> int:
        """A number that grows with every change."""
        ...

    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        """Items present, of one kind or of all; with a filter, those that pass."""
        ...

    def __len__(self) -> int: ...

    def add(self, items: Sequence[Item], vectors: Any) -> None:
        """Add new items with their vectors (len(items), dimension); an id that is present is refused."""
        ...

    def update(self, items: Sequence[Item], vectors: Any) -> None:
        """Add items, replacing those whose id is present."""
        ...

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items by id and say how many were there; texts of a removed image go with it."""
        ...

    def get(self, ids: Sequence[str]) -> list[Item | None]:
        """The items of these ids, None where absent."""
        ...

    def vectors(self, ids: Sequence[str]) -> Vectors:
        """The stored vectors (len(ids), dimension) of items that must be present."""
        ...

    def thumbnail(self, id: str) -> bytes | None:
        """The stored JPEG of an item, if it has one."""
        ...

    def file(self, item: Item) -> Path | None:
        """The file of an item, None when it has none or when its path would leave the collection's root."""
        ...

    def search(
        self,
        vector: Any,
        k: int = 10,
        *,
        kind: Kind | None = None,
        filter: str | Filter | None = None,
        exact: bool | None = None,
    ) -> Hits:
        """The k best items for one vector; ``exact`` forces or forbids the full scan (None: by size)."""
        ...

    def search_many(
        self,
        vectors: Any,
        k: int = 10,
        *,
        kind: Kind | None = None,
        filter: str | Filter | None = None,
        exact: bool | None = None,
    ) -> list[Hits]:
        """``search`` for each row of (queries, dimension), in one pass over the vectors."""
        ...

    def search_words(
        self, text: str, k: int = 10, *, kind: Kind | None = None, filter: str | Filter | None = None
    ) -> Hits:
        """The k best items by BM25 over their texts; items without any of the words are absent."""
        ...

    def values(self, column: str, limit: int = 50) -> list[tuple[str | bool, int]]:
        """The most frequent texts and booleans of a metadata column, and how many items have each."""
        ...

    def sample(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 4096
    ) -> Vectors:
        """Vectors of up to ``size`` items spread evenly over the index, the same for the same state."""
        ...

    def sample_items(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 24
    ) -> list[Item]:
        """The items whose vectors ``sample`` gives, in the same order."""
        ...

    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        """(id, content) of every item of a collection, for a re-index to compare."""
        ...

    def near_duplicates(
        self,
        *,
        kind: Kind = "image",
        threshold: float | None = None,
        limit: int = 100,
        show_progress: bool = False,
    ) -> list[Pair]:
        """The ``limit`` best pairs, best first; with ``threshold``, only those that reach it."""
        ...

    def collection(self, name: str, root: str = "") -> Collection:
        """The collection of this name and root, recorded if it is new."""
        ...

    def move_collection(self, number: int, name: str, root: str) -> None:
        """Give a collection another name and root; its items stay as they are."""
        ...

    def forget_collection(self, number: int) -> None:
        """Remove the record of a collection that has no items any more; one that has is left alone."""
        ...

    def build_graph(
        self, kind: Kind = "image", *, codes: bool | None = None, show_progress: bool = False
    ) -> None:
        """Make the approximate index of a kind, or bring it up to date; searches then use it by default.

        With ``codes`` it is a table of binary codes, otherwise a graph; None keeps what there is.
        """
        ...

    def compact(self, *, show_progress: bool = False) -> int:
        """Give back the space of removed rows and forget their columns; the number of bytes freed."""
        ...

    def verify(self, *, show_progress: bool = False) -> list[str]:
        """Read everything and compare it with its checksums: one sentence per fault."""
        ...

    def close(self) -> None:
        """Release files and locks; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
