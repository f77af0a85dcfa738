"""The vocabulary of every index: items, hits, queries, and what of them can be stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import diptych
from diptych import notebook
from diptych.errors import DataError, IndexFault, SettingsError
from diptych.storage import MISREAD, parse_json

Kind = Literal["image", "text"]
KINDS: tuple[Kind, ...] = ("image", "text")
Precision = Literal["float32", "float16", "binary"]
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "binary")
METADATA_KINDS = ("number", "text", "boolean", "list", "null")  # of values, as ``kind_of`` names them
Vectors = NDArray[np.float32]
MAX_WIDTH = 1_000_000  # candidates of a search in an approximate index, at most
MAX_COLUMNS = 2_000  # largest number of columns of an index: every filter and every page reads their list
EXACT_INTEGER = 2**53  # beyond it float64 skips integers: such numbers are compared as integers


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
    content: str = field(default="", repr=False)
    collection: int = 0
    thumbnail: bytes | None = field(default=None, repr=False)


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


def next_collection(known: Sequence[Collection], name: str, root: str) -> Collection:
    """The collection of this name and root among those that are known, else one with the number after theirs."""
    same = (one for one in known if (one.name, one.root) == (name, root))
    return next(same, Collection(max((one.number for one in known), default=-1) + 1, name, root))


@dataclass(frozen=True, slots=True)
class Recall:
    """How much of the exact answers an approximate index gives: recall@10 with its 95 % interval.

    ``queries`` items of the kind ``of`` were asked; ``width`` is how many candidates a search kept.
    """

    value: float
    low: float
    high: float
    queries: int
    of: str
    width: int

    def __str__(self) -> str:
        asked = f"{self.queries} {self.of}{'s' if self.queries != 1 else ''}"
        return (
            f"recall@10 {self.value:.3f} ({self.low:.3f}–{self.high:.3f}), {asked} asked, width {self.width}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str | None) -> Recall | None:
        """What ``to_json`` wrote; None for anything else."""
        try:
            found = parse_json(text or "")
            recall = Recall(**found) if isinstance(found, dict) else None
        except MISREAD:
            return None
        if recall is None or type(recall.width) is not int or not 1 <= recall.width <= MAX_WIDTH:
            return None
        shares = (recall.value, recall.low, recall.high)
        sound = all(isinstance(one, int | float) and 0 <= one <= 1 for one in shares)
        return recall if sound and type(recall.queries) is int and recall.of in KINDS else None


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
    deleted: int = 0
    size: int = 0
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    collections: tuple[Collection, ...] = ()
    approximate: Mapping[str, int] = field(default_factory=dict)
    coded: tuple[str, ...] = ()  # kinds whose approximate index is a table of binary codes
    recall: Mapping[str, Recall] = field(default_factory=dict)  # of approximate indexes, when they were built

    def __len__(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """Two items whose vectors nearly agree."""

    first: Item
    second: Item
    score: float


def check_k(k: int) -> None:
    """Raise when no hit is wanted."""
    if k < 1:
        raise SettingsError(f"k, the number of hits, is out of range: it must be at least 1, not {k}.")


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


def kind_of(value: Any) -> str:
    """The kind of a metadata value: number, text, boolean, list, or null."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "list"


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


def held_kinds(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The kinds of value in each column, from (name, kind) of values; null is none."""
    found: dict[str, set[str]] = {}
    for name, kind in pairs:
        found.setdefault(name, set()).update({kind} - {"null"})
    return found


def grown_columns(known: Mapping[str, Iterable[str]], held: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The columns that new items bring or bring new kinds of value to, with all their kinds.

    Raises when an index would have more columns than can be read in a moment.
    """
    count = len(held.keys() | known.keys())
    if count > max(MAX_COLUMNS, len(known)):
        raise DataError(
            f"the index would have {count} metadata columns, the limit is {MAX_COLUMNS}: give items the same columns."
        )
    whole = {name: kinds.union(known.get(name, ())) for name, kinds in held.items()}
    return {n: sorted(kinds) for n, kinds in whole.items() if n not in known or kinds != set(known[n])}


def record(item: Item) -> tuple[Any, ...]:
    """The stored columns of an item after its slot; raises when they cannot be stored."""
    if "\x00" in item.id:
        raise DataError(f"the id {item.id!r} holds a NUL character: remove it.")
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


def halves(vectors: Vectors) -> NDArray[np.float16]:
    """Vectors in float16; raises for a value that it cannot hold."""
    with np.errstate(over="ignore"):
        found = vectors.astype("<f2")
    if not np.isfinite(found).all():
        raise SettingsError(
            f"a vector has the value {np.abs(vectors).max():g}, beyond float16: store this index as float32."
        )
    return found


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
        f"'{ours[0] or 'unnamed'}' (fingerprint {ours[1]}): use its own model, or index the collection with "
        "this one into another place (--index)."
    )


def read_only(place: str | Path) -> IndexFault:
    """The refusal to change an index that was opened for reading."""
    return IndexFault(f"{place} is open for reading only: open it with writable=True to change it.")


def is_closed(place: str | Path) -> IndexFault:
    """The refusal to use an index that was closed."""
    return IndexFault(f"the index {place} is closed: open it again.")


def other_format(place: str | Path, theirs: object, ours: object) -> IndexFault:
    """The refusal of an index of another version's format."""
    return IndexFault(
        f"{place} has index format {theirs}, this version reads {ours}: update diptych, or index the collection again."
    )


# what engines on servers say alike
ABSENT = "there is no index at {}: index a collection there first."
TAKEN = "{} is already an index: open it, or choose another name."
OTHER = "{} is {} of something else: choose another name for the index."
FAILED = "{} answered with an error ({}): check the index with 'diptych index verify'."
SILENT = "the {} does not answer ({}): start it or check the URL, then try again."
INCOMPLETE = (
    "{} is incomplete ({}): restore the whole index again, or index the collection again under another name."
)
