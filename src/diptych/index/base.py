"""What an index is: a small core that every engine must have; its capabilities have defaults (``capabilities``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from diptych import notebook
from diptych.errors import DataError, DiptychError, IndexFault, QueryError, SettingsError
from diptych.index.capabilities import Capabilities
from diptych.index.protocol import (
    KINDS,
    PRECISIONS,
    Collection,
    Hits,
    IndexInfo,
    Item,
    Kind,
    Precision,
    Vectors,
    check_items,
    check_k,
    new_facts,
    other_model,
    read_only,
)
from diptych.progress import counted

if TYPE_CHECKING:
    from diptych.index.query.filters import Filter

SHOWN = 6  # images that a notebook shows


class Index(Capabilities):
    """A searchable set of items with their vectors.

    An operation that has returned is durable. Readers see the state of the last finished operation, whole. The score
    is the dot product of the query with the stored vector, computed in float64 for the hits that are returned, so that
    it does not depend on the size of the batch a query came in.

    An engine is a subclass whose constructor takes ``(place, *, writable)``. It must have the core: what is abstract
    here, of which ``add``, ``update`` and ``search`` are made. The capabilities (samples, near-duplicates, words,
    approximate indexes, checks) have defaults; an engine replaces those that it can do better.
    """

    engine: str
    most_dimensions = 1 << 24  # of a vector, and the precisions that the engine stores
    precisions: tuple[Precision, ...] = PRECISIONS
    _writable = False
    _facts: Mapping[str, str]  # of ``new_facts``, as they were stored

    # ------------------------------------------------------------------ the core

    @staticmethod
    @abstractmethod
    def exists(place: Any) -> bool:
        """Whether there is an index to open."""

    @classmethod
    @abstractmethod
    def _make(cls, place: Any, facts: dict[str, str]) -> None:
        """Write an empty index that records these facts; one that is already there is refused."""

    @abstractmethod
    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        """Store items in one durable step; without ``replace``, an id that is present is refused."""

    @abstractmethod
    def delete(self, ids: Sequence[str]) -> int:
        """Remove items by id and say how many were there; texts of a removed image go with it."""

    @abstractmethod
    def get(self, ids: Sequence[str]) -> list[Item | None]:
        """The items of these ids, None where absent."""

    @abstractmethod
    def vectors(self, ids: Sequence[str]) -> Vectors:
        """The stored vectors (len(ids), dimension) of items that must be present."""

    @abstractmethod
    def thumbnail(self, id: str) -> bytes | None:
        """The stored JPEG of an item, if it has one."""

    @abstractmethod
    def contents(self, collection: int, kind: Kind | None = None) -> Iterator[tuple[str, str]]:
        """(id, content) of every item of a collection, for a re-index to compare."""

    @abstractmethod
    def _nearest(
        self, queries: Vectors, k: int, kind: Kind | None, filter: str | Filter | None, exact: bool | None
    ) -> list[Hits]:
        """``search_many`` of vectors that were checked."""

    @abstractmethod
    def collections(self) -> tuple[Collection, ...]:
        """Where the items came from, in the order of the numbers."""

    @abstractmethod
    def _add_collection(self, name: str, root: str) -> Collection:
        """Record a collection under a number of its own, unless another writer was quicker."""

    @abstractmethod
    def move_collection(self, number: int, name: str, root: str) -> None:
        """Give a collection another name and root; its items stay as they are."""

    @abstractmethod
    def forget_collection(self, number: int) -> None:
        """Remove the record of a collection that has no items any more; one that has is left alone."""

    @abstractmethod
    def _about(self) -> dict[str, Any]:
        """The changing fields of ``info``: size, columns, and what else is not its default."""

    @abstractmethod
    def close(self) -> None:
        """Release files and locks; idempotent."""

    # ------------------------------------------------------------------ made of the core

    @classmethod
    def create(
        cls,
        place: Any,
        dimension: int,
        *,
        model: str = "",
        fingerprint: str = "",
        precision: Precision = "float32",
    ) -> Self:
        """A new, empty index, open for writing; an index that is already there is refused."""
        if not 1 <= dimension <= cls.most_dimensions:
            raise SettingsError(
                f"an index cannot hold vectors of {dimension} dimensions: the engine {cls.engine} takes 1 to "
                f"{cls.most_dimensions}."
            )
        if precision not in cls.precisions:
            raise SettingsError(
                f"an index of the engine {cls.engine} stores {' or '.join(cls.precisions)}, not the precision "
                f"'{precision}': choose one of these, or another engine."
            )
        cls._make(place, new_facts(dimension, precision, model, fingerprint))
        return cls(place, writable=True)  # type: ignore[call-arg]

    @classmethod
    def open(
        cls, place: Any, *, writable: bool = False, fingerprint: str | None = None, model: str = ""
    ) -> Self:
        """An existing index at a path or URL; with ``fingerprint``, one made by another model is refused by name."""
        index = cls(place, writable=writable)  # type: ignore[call-arg]
        theirs = (index._facts["model"], index._facts["fingerprint"])
        if fingerprint is not None and fingerprint != theirs[1]:
            index.close()
            raise other_model(str(index.path), theirs, (model, fingerprint))
        return index

    @property
    def info(self) -> IndexInfo:
        """What the index says of itself; cheap to ask at any size."""
        named: dict[str, Any] = {
            name: self._facts[name] for name in ("precision", "model", "fingerprint", "version", "created")
        }
        named |= {"counts": {kind: self.count(kind) for kind in KINDS}, **self._about()}
        recall = {kind: self._kept_recall(kind) for kind in KINDS if kind in named.get("approximate", ())}
        return IndexInfo(
            path=str(self.path), engine=self.engine, dimension=self.dimension, collections=self.collections(),
            recall={kind: found for kind, found in recall.items() if found is not None}, **named,
        )  # fmt: skip

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._facts["dimension"])

    def add(self, items: Sequence[Item], vectors: Any) -> None:
        """Add new items with their unit vectors (len(items), dimension); an id that is present is refused."""
        self._write_checked(items, self._check_rows(vectors, "the vectors to add"), replace=False)

    def update(self, items: Sequence[Item], vectors: Any) -> None:
        """Add items, replacing those whose id is present."""
        self._write_checked(items, self._check_rows(vectors, "the vectors to update"), replace=True)

    def search(
        self,
        vector: Any,
        k: int = 10,
        *,
        kind: Kind | None = None,
        filter: str | Filter | None = None,
        exact: bool | None = None,
    ) -> Hits:
        """The k best items for one vector; ``exact`` forces or forbids the full scan (None: by size).

        A score is a dot product, and the cosine where the vector has length 1.
        """
        rows = np.asarray(vector).reshape(1, -1)
        return self.search_many(rows, k, kind=kind, filter=filter, exact=exact)[0]

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
        queries = self._check_rows(vectors, "the query")
        check_k(k)
        return self._nearest(queries, k, kind, filter, exact)

    def collection(self, name: str, root: str = "") -> Collection:
        """The collection of this name and root, recorded if it is new."""
        known = (one for one in self.collections() if (one.name, one.root) == (name, root))
        return next(known, None) or self._add_collection(name, root)

    def file(self, item: Item) -> Path | None:
        """The file of an item here, None when it has none or when its path would leave the collection's root."""
        known = self.collections() if item.path else ()
        root = next((one.root for one in known if one.number == item.collection), "")
        if not root:
            return None
        try:
            folder = Path(root).resolve()
            path = (folder / item.path).resolve()
            return path if path.is_relative_to(folder) and path.is_file() else None
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
            return None

    # ------------------------------------------------------------------ inside

    def __len__(self) -> int:
        return self.count()

    def __repr__(self) -> str:
        facts = f"{self.dimension} dimensions, model '{self._facts['model'] or 'unnamed'}'"
        try:
            held = ", ".join(counted(self.count(kind), kind) for kind in KINDS)
        except Exception:  # closed, or a database that does not answer: a repr never fails
            held = "not open"
        return f"{type(self).__name__}('{self.path}': {held}; {facts})"

    def _repr_html_(self) -> str:
        """Some pictures of the index, with what it says of itself below them."""
        try:
            items = self.sample_items("image", None, SHOWN)
        except Exception:  # closed, or a database that does not answer
            return notebook.notes([repr(self)])
        cards = [(preview_of(self, item), item.id, item.text.split("\n")[0]) for item in items]
        return notebook.gallery(cards, repr(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_writable(self) -> None:
        if not self._writable:
            raise read_only(self.path)

    def _write_checked(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        check_items(items, len(rows))
        if items:
            self._write(items, rows, replace)

    def _check_rows(self, vectors: Any, what: str) -> Vectors:
        """Rows (n, dimension) of finite numbers that can be scored, or an error that says what else they are."""
        array = np.asarray(vectors)
        if array.dtype.kind not in "fiub":
            raise DataError(f"{what} are of type {array.dtype}, not real numbers: give an array of floats.")
        rows: Vectors = np.ascontiguousarray(array, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.dimension:
            raise IndexFault(
                f"the shape of {what} is {'×'.join(map(str, rows.shape))}, but {self.path} holds vectors of "
                f"{self.dimension} dimensions: encode with the model it was made with, "
                f"'{self._facts['model'] or 'unnamed'}'."
            )
        # squared lengths: where they fit a float32, so does every score
        finite = np.isfinite(np.einsum("nd,nd->n", rows, rows))
        if not finite.all():
            bad = int(np.argmin(finite))
            holds = "numbers too large to score" if np.isfinite(rows[bad]).all() else "NaN or infinity"
            raise DataError(f"row {bad} of {what} holds {holds}: check the model and its input.")
        return rows

    def _check_present(self, ids: Sequence[str], found: Container[str]) -> None:
        absent = next((id for id in ids if id not in found), None)
        if absent is not None:
            raise QueryError(f"'{absent}' is not in the index {self.path}: check the id.")

    def _already(self, id: str) -> IndexFault:
        return IndexFault(f"'{id}' is already in {self.path}: update it, or delete it first.")

    def _no_graph(self, kind: Kind | None) -> IndexFault:
        what = f"{kind} items" if kind else "images and texts together"
        return IndexFault(f"{self.path} has no approximate index of {what}: build one, or search exactly.")


def preview_of(index: Index, item: Item) -> bytes | None:
    """A small JPEG of an item, if there is a picture to make it of."""
    from diptych.data.decode.opening import make_thumbnail, open_image

    try:
        stored, file = index.thumbnail(item.id), index.file(item)
        if stored is None and file is not None and item.kind == "image":
            return make_thumbnail(open_image(file), notebook.SIDE)
    except (DiptychError, OSError):  # an index or a picture that is gone: the item is shown without it
        return None
    return stored
