"""The recall of an approximate index: the same queries answered by it and by an exact search."""

from __future__ import annotations

from typing import Any

import numpy as np

from diptych.index.protocol import Hits, Kind, Recall, Vectors

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
        return [_others(hits, id) for hits, id in zip(answers, own, strict=True)]


def measure(index: Any, kind: Kind) -> Recall:
    """The recall of the approximate index of a kind as it is searched now."""
    return Exam(index, kind).recall(index.width(kind))


def widen(index: Any, kind: Kind, target: float | None = None) -> Recall:
    """Measure the recall of a new approximate index; with a target, at the smallest width that reaches it."""
    exam, (usual, most) = Exam(index, kind), index.widths(kind)
    if target is None:
        return exam.recall(index.width(kind))
    width = min(most, max(1, usual // LESS))
    while True:
        with index.searched_at(kind, width):
            found = exam.recall(width)
        if found.value >= target or width >= min(most, MORE * usual):
            return found
        width = min(most, 2 * width)


def _others(hits: Hits, id: str) -> list[float]:
    return [hit.score for hit in hits if hit.item.id != id][:K]
