"""What an index can do beyond its core, with a default for every engine: samples, words, pairs, approximate indexes.

The recall of an approximate index: the same queries answered by it and by an exact search.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from diptych.errors import SettingsError
from diptych.index.protocol import KINDS, Hit, Hits, Item, Kind, Pair, Recall, Vectors, check_k
from diptych.index.scoring import best_pairs

if TYPE_CHECKING:
    from diptych.index.query.filters import Filter

SAMPLES = 4  # remembered: images and texts, whole and filtered
T = TypeVar("T")


class View(Protocol):
    """The items of one moment of an index, by the engine's own keys: what the capabilities are made of."""

    is_mapped: bool  # whether vectors cost nothing to read again

    def keys(self, kind: Kind | None, filter: str | Filter | None, size: int | None = None) -> Any:
        """The keys of the items that pass, as they were added; with ``size``, up to as many, evenly spread."""

    def items(self, keys: Any) -> list[Item]:
        """The items of some keys, in their order."""

    def rows(self, keys: Any) -> Vectors:
        """The stored vectors of some keys, in their order."""


class Capabilities(ABC):
    """Operations that read one moment of an index; an engine replaces those that it can do better."""

    path: Path | str

    @property
    @abstractmethod
    def generation(self) -> int:
        """A number that grows with every change."""

    @abstractmethod
    def count(self, kind: Kind | None = None, filter: str | Filter | None = None) -> int:
        """Items present, of one kind or of all; with a filter, those that pass."""

    @abstractmethod
    def _view(self, read: Callable[[View], T]) -> T:
        """What ``read`` makes of one moment of the index."""

    def search_words(
        self, text: str, k: int = 10, *, kind: Kind | None = None, filter: str | Filter | None = None
    ) -> Hits:
        """The k best items by BM25 over their texts; items without any of the words are absent."""
        check_k(k)
        return self._best_words(text, k, kind, filter)

    def _best_words(self, text: str, k: int, kind: Kind | None, filter: str | Filter | None) -> Hits:
        from diptych.index.query.words import bm25

        def read(view: View) -> list[Hit]:
            hits = []
            for one in KINDS if kind is None else (kind,):
                keys = view.keys(one, None)
                items = view.items(keys)
                allowed = set(keys if filter is None else view.keys(one, filter))
                scores = bm25([item.text for item in items], text)
                best = sorted((-score, row) for row, score in scores.items() if keys[row] in allowed)[:k]
                hits += [Hit(items[row], -score) for score, row in best]
            return sorted(hits, key=lambda hit: -hit.score)[:k]

        return Hits(tuple(self._view(read)))

    def values(self, column: str, limit: int = 50) -> list[tuple[str | bool, int]]:
        """The most frequent texts and booleans of a metadata column, and how many items have each."""
        items = self._view(lambda view: view.items(view.keys(None, None)))
        found = (item.metadata.get(column) for item in items)
        return most_frequent(Counter(value for value in found if isinstance(value, str | bool)), limit)

    def sample(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 4096
    ) -> Vectors:
        """Vectors of up to ``size`` items spread evenly over the index, the same for the same state."""
        return self._samples.get(
            (self.generation, kind, repr(filter), size),
            lambda: self._view(lambda view: view.rows(view.keys(kind, filter, size))),
        )

    def sample_items(
        self, kind: Kind | None = None, filter: str | Filter | None = None, size: int = 24
    ) -> list[Item]:
        """The items whose vectors ``sample`` gives, in the same order."""
        return self._view(lambda view: view.items(view.keys(kind, filter, size)))

    def near_duplicates(
        self,
        *,
        kind: Kind = "image",
        threshold: float | None = None,
        limit: int = 100,
        show_progress: bool = False,
    ) -> list[Pair]:
        """The ``limit`` best pairs, best first; with ``threshold``, only those that reach it."""
        if limit < 1:
            raise SettingsError(f"the number of pairs to list must be at least 1, not {limit}.")

        def read(view: View) -> list[Pair]:
            keys = np.asarray(view.keys(kind, None))
            every = None if view.is_mapped else view.rows(keys)
            scores, first, second = best_pairs(
                len(keys),
                lambda some: view.rows(keys[some]) if every is None else every[some],
                threshold,
                limit,
                show_progress,
            )
            items = [view.items(keys[side]) for side in (first, second)]
            return [Pair(*pair) for pair in zip(*items, scores.tolist(), strict=True)]

        return self._view(read)

    def build_graph(
        self,
        kind: Kind = "image",
        *,
        codes: bool | None = None,
        target_recall: float | None = None,
        show_progress: bool = False,
    ) -> None:
        """Make the approximate index of a kind, or bring it up to date; searches then use it by default.

        With ``codes`` it is a table of binary codes, otherwise a graph; None keeps what there is. Its recall is
        measured and stored. ``target_recall`` sets the search width: the smallest that reaches it on the collection.
        """
        if target_recall is not None and not 0 < target_recall <= 1:
            raise SettingsError(f"the target recall must lie between 0 and 1, not {target_recall:g}.")
        built = self._build_graph(kind, codes, show_progress)
        if (built or target_recall is not None) and self.count(kind):
            self._keep_recall(kind, widen(self, kind, target_recall))

    def _build_graph(self, kind: Kind, codes: bool | None, show_progress: bool) -> bool:
        """Whether an approximate index was built or brought up to date."""
        raise SettingsError(f"the engine of {self.path} has no approximate index: search exactly.")

    def recall(self, kind: Kind) -> Recall:
        """The recall of the approximate index of a kind as it is searched now."""
        return Exam(self, kind).recall(self.width(kind))

    def widths(self, kind: Kind) -> tuple[int, int]:
        """The usual width of a search in the approximate index of a kind, and the largest."""
        return 1, 1

    def width(self, kind: Kind) -> int:
        """The width of a search in the approximate index of a kind: as it was set, else the usual one."""
        found = self._kept_recall(kind)
        return self._trials.get(kind) or (self.widths(kind)[0] if found is None else found.width)

    def _keep_recall(self, kind: Kind, recall: Recall) -> None:
        """Store what was measured with the approximate index."""
        raise NotImplementedError

    def _kept_recall(self, kind: Kind) -> Recall | None:
        """What was stored."""
        return None

    @cached_property
    def _trials(self) -> dict[Kind, int]:
        """The widths that searches take while they are tried."""
        return {}

    def compact(self, *, show_progress: bool = False) -> int:
        """Give back the space of removed rows and forget their columns; the number of bytes freed."""
        return 0

    def verify(self, *, show_progress: bool = False) -> list[str]:
        """Read everything and compare it with its checksums: one sentence per fault."""
        return []

    @cached_property
    def _samples(self) -> Samples:
        return Samples()


def most_frequent(counts: Counter[str | bool], limit: int) -> list[tuple[str | bool, int]]:
    """The most frequent values; of equally frequent ones, the first in order, true and false as they are written."""

    def rank(one: tuple[str | bool, int]) -> tuple[int, str]:
        value, count = one
        return -count, value if isinstance(value, str) else str(value).lower()

    return sorted(counts.items(), key=rank)[:limit]


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


def spread(count: int, size: int | None) -> NDArray[np.int64]:
    """The numbers of up to ``size`` of ``count`` items at even distances; all without a size."""
    if size is None or size >= count:
        return np.arange(count)
    return np.linspace(0, count - 1, size).astype(np.int64)


K = 10
QUERIES = 200
CONFIDENCE = 1.959964  # standard deviations that a 95 % interval reaches
LESS, MORE = 4, 64  # widths tried for a target: from a quarter of the usual one to this many times it


class Exam:
    """Queries of a collection (its texts, else its items) with their exact answers; an item does not answer itself."""

    def __init__(self, index: Any, kind: Kind) -> None:
        self.index, self.kind = index, kind
        self.of: Kind = "text" if index.count("text") else kind
        self.queries: Vectors = index.sample(self.of, None, QUERIES)
        same = self.of == kind
        self.own = [item.id for item in index.sample_items(self.of, None, QUERIES)] if same else []
        self.exact = self._answers(True)

    def recall(self, width: int) -> Recall:
        """Recall@10 when a search keeps this many candidates, with its 95 % interval (Wilson's, by query)."""
        shares = []
        for found, exact in zip(self._answers(False), self.exact, strict=True):
            if exact:
                # by score: of items that tie with the last, any will do
                shares.append(sum(score >= exact[-1] for score in found) / len(exact))
        n, mean = len(shares), float(np.mean(shares)) if shares else 1.0
        z = CONFIDENCE**2 / max(1, n)
        middle = (mean + z / 2) / (1 + z)
        half = (z * mean * (1 - mean) + z * z / 4) ** 0.5 / (1 + z)
        return Recall(mean, max(0.0, middle - half), min(1.0, middle + half), n, self.of, width)

    def _answers(self, exact: bool) -> list[list[float]]:
        depth = K + bool(self.own)
        answers = self.index.search_many(self.queries, depth, kind=self.kind, exact=exact)
        own = self.own or [""] * len(answers)
        return [
            [hit.score for hit in hits if hit.item.id != id][:K]
            for hits, id in zip(answers, own, strict=True)
        ]


def widen(index: Capabilities, kind: Kind, target: float | None = None) -> Recall:
    """Measure the recall of a new approximate index; with a target, at the smallest width that reaches it."""
    if target is None:
        return index.recall(kind)
    exam, (usual, most) = Exam(index, kind), index.widths(kind)
    width = min(most, max(1, usual // LESS))
    try:
        while True:
            index._trials[kind] = width
            found = exam.recall(width)
            if found.value >= target or width >= min(most, MORE * usual):
                return found
            width = min(most, 2 * width)
    finally:
        index._trials.pop(kind, None)
