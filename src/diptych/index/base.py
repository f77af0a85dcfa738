"""What every engine does alike: items, vectors and queries are checked, and hits are scored in float64."""

from __future__ import annotations

import json
import threading
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import diptych
from diptych import notebook
from diptych.errors import DataError, DiptychError, IndexFault, QueryError, SettingsError
from diptych.index.protocol import KINDS, Hits, Index, IndexInfo, Item, Kind, Precision, Vectors
from diptych.index.query.filters import Filter
from diptych.progress import counted

SHOWN = 6  # images that a notebook shows
SAMPLES = 4  # remembered: images and texts, whole and filtered


class Engine(Index):
    """An index that knows its own facts; engines add how items are stored and found."""

    path: Path | str
    _facts: Mapping[str, str]
    _dimension: int

    @classmethod
    def open(
        cls, path: Any, *, writable: bool = False, fingerprint: str | None = None, model: str = ""
    ) -> Self:
        """An existing index at a path or URL; with ``fingerprint``, one made by another model is refused by name."""
        index = cls(path, writable=writable)  # type: ignore[call-arg]
        index._check_model(fingerprint, model)
        return index

    def add(self, items: Sequence[Item], vectors: Any) -> None:
        """Add new items with their vectors (len(items), dimension); an id that is present is refused."""
        self._write_checked(items, self._checked(vectors, "the vectors to add"), replace=False)

    def update(self, items: Sequence[Item], vectors: Any) -> None:
        """Add items, replacing those whose id is present."""
        self._write_checked(items, self._checked(vectors, "the vectors to update"), replace=True)

    def search(
        self,
        vector: Any,
        k: int = 10,
        *,
        kind: Kind | None = None,
        filter: str | Filter | None = None,
        exact: bool | None = None,
    ) -> Hits:
        """The k best items for one vector (dimension,)."""
        return self.search_many(np.asarray(vector).reshape(1, -1), k, kind=kind, filter=filter, exact=exact)[
            0
        ]

    def file(self, item: Item) -> Path | None:
        """The file of an item here, None when it has none or when its path would leave the collection's root."""
        root = self._root(item.collection) if item.path else ""
        if not root:
            return None
        try:
            folder = Path(root).resolve()
            path = (folder / item.path).resolve()
            return path if path.is_relative_to(folder) and path.is_file() else None
        except (
            OSError,
            ValueError,
            RuntimeError,
        ):
            # no path of a file system: too long, a NUL, links in a circle
            return None

    def __len__(self) -> int:
        return self.count()

    def __repr__(self) -> str:
        facts = f"{self._dimension} dimensions, model '{self._facts['model'] or 'unnamed'}'"
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _write(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        """Store items in one durable step; without ``replace``, an id that is present is refused."""

    @abstractmethod
    def _root(self, collection: int) -> str:
        """The folder of a collection, empty without one."""

    def _write_checked(self, items: Sequence[Item], rows: Vectors, replace: bool) -> None:
        check_items(items, len(rows))
        if items:
            self._write(items, rows, replace)

    def _checked(self, vectors: Any, what: str) -> Vectors:
        """Rows (n, dimension) of finite numbers that can be scored, or an error that says what else they are."""
        given = np.asarray(vectors)
        if given.dtype.kind not in "fiub":
            raise DataError(f"{what} are of type {given.dtype}, not real numbers: give an array of floats.")
        rows: Vectors = np.ascontiguousarray(given, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self._dimension:
            raise IndexFault(
                f"the shape of {what} is {'×'.join(map(str, rows.shape))}, but {self.path} holds vectors of "
                f"{self._dimension} dimensions: encode with the model it was made with, "
                f"'{self._facts['model'] or 'unnamed'}'."
            )
        # squared lengths: where they fit a float32, so does every score
        finite = np.isfinite(np.einsum("nd,nd->n", rows, rows))
        if not finite.all():
            bad = int(np.argmin(finite))
            holds = "numbers too large to score" if np.isfinite(rows[bad]).all() else "NaN or infinity"
            raise DataError(f"row {bad} of {what} holds {holds}: check the model and its input.")
        return rows

    def _check_model(self, fingerprint: str | None, model: str) -> None:
        """Close and raise when ``fingerprint`` is that of another model."""
        if fingerprint is not None and fingerprint != self._facts["fingerprint"]:
            self.close()
            theirs = (self._facts["model"], self._facts["fingerprint"])
            raise other_model(str(self.path), theirs, (model, fingerprint))

    def _info(self, engine: str, **rest: Any) -> IndexInfo:
        precision: Precision = self._facts["precision"]  # type: ignore[assignment]
        facts: dict[str, Any] = {
            name: self._facts[name] for name in ("model", "fingerprint", "version", "created")
        }
        return IndexInfo(
            path=str(self.path),
            engine=engine,
            dimension=self._dimension,
            precision=precision,
            **facts,
            **rest,
        )

    def _check_present(self, ids: Sequence[str], found: Container[str]) -> None:
        absent = next((id for id in ids if id not in found), None)
        if absent is not None:
            raise QueryError(f"'{absent}' is not in the index {self.path}: check the id.")

    def _already(self, id: str) -> IndexFault:
        return IndexFault(f"'{id}' is already in {self.path}: update it, or delete it first.")

    def _no_graph(self, kind: Kind | None) -> IndexFault:
        what = f"{kind} items" if kind else "images and texts together"
        return IndexFault(f"{self.path} has no approximate index of {what}: build one, or search exactly.")


class Samples:
    """Remembers samples of the newest state of an index; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[Any, ...], Vectors] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], Vectors]) -> Vectors:
        """The sample of a key that begins with the generation, made if it is not remembered."""
        with self._lock:
            if key in self._kept:
                return self._kept[key]
        made = make()
        with self._lock:
            newest = [one for one in self._kept.items() if one[0][0] == key[0]][1 - SAMPLES :]
            self._kept = {**dict(newest), key: made}
        return made


def new_facts(dimension: int, precision: str, model: str, fingerprint: str) -> dict[str, str]:
    """What a new index records of itself."""
    return {
        "dimension": str(dimension),
        "precision": precision,
        "model": model,
        "fingerprint": fingerprint,
        "version": diptych.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def other_model(place: str, theirs: tuple[str, str], ours: tuple[str, str]) -> IndexFault:
    """The refusal of an index of another model; each is (name, fingerprint)."""
    return IndexFault(
        f"{place} was made with the model '{theirs[0] or 'unnamed'}' (fingerprint {theirs[1] or 'none'}), not with "
        f"'{ours[0] or 'unnamed'}' (fingerprint {ours[1]}): search it with its own model, or index the collection "
        "again with this one in another place."
    )


def check_k(k: int) -> None:
    """Raise when no hit is wanted."""
    if k < 1:
        raise SettingsError(f"k, the number of hits, is out of range: it must be at least 1, not {k}.")


def check_limit(limit: int) -> None:
    """Raise when no pair is wanted."""
    if limit < 1:
        raise SettingsError(f"the number of pairs to list must be at least 1, not {limit}.")


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


def check_items(items: Sequence[Item], count: int) -> None:
    """Raise when items and their vectors do not pair up, or when ids are empty or not unique."""
    if count != len(items):
        raise DataError(f"{len(items)} items came with {count} vectors: give one vector per item.")
    seen: set[str] = set()
    for item in items:
        if not item.id or item.id in seen:
            raise DataError(f"the id '{item.id}' is empty or comes more than once: ids must be unique names.")
        if item.kind not in KINDS:
            raise DataError(f"item '{item.id}' is of kind '{item.kind}': choose {' or '.join(KINDS)}.")
        seen.add(item.id)


TIE = 2e-6  # scores of unit vectors in float32 that are closer may be equal: float64 and order of addition decide
MAX_TIES = 4096  # tied candidates beyond the margin; of more, the earliest


def rescore(stored: Vectors, query: Vectors) -> NDArray[np.float64]:
    """Dot products of rows with one query in float64, one row at a time: the same whatever the batch was."""
    result: NDArray[np.float64] = (stored.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
    return result


MAX_COLUMNS = 2_000  # largest number of columns of an index: every filter and every page reads their list
EXACT_INTEGER = 2**53  # beyond it float64 skips integers: such numbers are compared as integers


def plain(id: str, name: object, value: Any) -> Any:
    """A value as it is stored; raises when it cannot be."""
    if hasattr(value, "tolist"):  # numpy scalars and arrays, as they come out of label columns
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if value != value or abs(value) == float("inf"):
            raise DataError(f"item '{id}' has {value} in column '{name}': use null for a missing number.")
        return value
    if isinstance(value, list | tuple) and not any(isinstance(one, list | tuple | dict) for one in value):
        values = [plain(id, name, one) for one in value]
        if not any(isinstance(one, list) for one in values):  # of arrays
            return values
    raise DataError(
        f"item '{id}' has a {type(value).__name__} in column '{name}': "
        "metadata values are numbers, texts, true, false, null, or lists of these."
    )


def check_storable(id: str, metadata: Mapping[str, Any]) -> None:
    """Raise when an id or a value of metadata cannot be stored, before an item is made of them."""
    if "\x00" in id:
        raise DataError(f"the id {id!r} holds a NUL character: remove it.")
    for name, value in metadata.items():
        plain(id, name, value)


def check_column_count(count: int) -> None:
    """Raise when an index would have more columns than one can be read in a moment."""
    if count > MAX_COLUMNS:
        raise DataError(
            f"the index would have {count} metadata columns, the limit is {MAX_COLUMNS}: give items the same columns."
        )


def held_kinds(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The kinds of value in each column, from (name, kind) of values; null is none."""
    found: dict[str, set[str]] = {}
    for name, kind in pairs:
        found.setdefault(name, set()).update({kind} - {"null"})
    return found


def record(item: Item) -> tuple[Any, ...]:
    """The stored columns of an item after its slot; raises when they cannot be stored."""
    check_storable(item.id, {})
    metadata = {str(name): plain(item.id, name, value) for name, value in item.metadata.items()}
    data = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    texts = (item.id, item.kind, item.path, item.text, item.image_id, data, item.content)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"item {item.id!r} holds {error.object[error.start]!r}, which is not a character: remove it."
        ) from error
    return (*texts, item.collection)
