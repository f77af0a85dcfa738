"""When nothing matches: a cut-off for each query from its own scores over the collection.

A flat threshold fails because scores move with the query: "a dog" scores everything higher than a rare phrase
does. What does not match is the background, and there is plenty of it in every collection. With m the median
of the query's scores over (a sample of) the collection and s the spread of its upper half,

    s = (q90 − m) / 1.2816,        strength(x) = (x − m) / s,        cut-off = m + z · s,

a score matches when it stands more than z spreads above the median. For a normal background of N items the
best of N stands √(2 ln N) or so above it by chance, which is how z grows with the size of the collection:

    z(N) = Φ⁻¹(1 − p/N),   the level that the best of N background items passes with probability p.

=========  ======================================================================================
``p``      how often a query without a match may be said to have one; ``measure_cutoff`` reports
           what a value of ``p`` costs in queries whose match is denied
``1.2816`` Φ⁻¹(0.9): makes s the standard deviation when the background is normal
=========  ======================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.errors import SettingsError

CHANCE = 0.05  # p
FEWEST = 20  # items below which a collection has no background to speak of
_NORMAL = NormalDist()
_UPPER = _NORMAL.inv_cdf(0.9)


@dataclass(frozen=True, slots=True)
class Background:
    """Location and upper spread of one query's scores over a collection of ``count`` items."""

    location: float
    spread: float
    count: int

    def strength(self, score: float) -> float:
        """Spreads above the median."""
        return (score - self.location) / self.spread if self.spread > 0 else 0.0

    def cutoff(self, chance: float = CHANCE) -> float:
        """The score that the best of ``count`` background items passes with probability ``chance``."""
        if not 0 < chance < 1:
            raise SettingsError(f"the chance of a false match must lie between 0 and 1, not {chance}.")
        return self.location + _NORMAL.inv_cdf(1 - chance / max(1, self.count)) * self.spread


def background(scores: Any, count: int) -> Background | None:
    """The background of a query from a sample of its scores; None when there are too few to tell."""
    values = np.asarray(scores, np.float64).reshape(-1)
    if len(values) < FEWEST:
        return None
    median, high = np.quantile(values, [0.5, 0.9])
    return Background(float(median), float(high - median) / _UPPER, count)


@dataclass(frozen=True, slots=True)
class CutoffRates:
    """Error rates of the cut-off on held-out queries."""

    chance: float
    false_match: float
    false_none: float
    queries_with_match: int
    queries_without_match: int


def measure_cutoff(
    scores: Any, relevant: Sequence[Sequence[int]], chances: Sequence[float] = (0.5, 0.2, 0.1, 0.05, 0.01)
) -> list[CutoffRates]:
    """Error rates on held-out queries with known answers, for several settings of the cut-off.

    ``scores`` is (queries, items) and ``relevant`` the items that answer each query. Each query is asked
    twice: of the whole collection, where saying "nothing matches" is false, and of the collection without its
    answers, where a match is false.
    """
    matrix: NDArray[np.float64] = np.asarray(scores, np.float64)
    counts = {chance: [0, 0] for chance in chances}
    for row, answers in zip(matrix, relevant, strict=True):
        rest = np.delete(row, list(answers))
        for place, values in enumerate((row, rest)):
            found = background(values, len(values))
            if found is None:
                raise SettingsError(
                    f"a collection of {len(values)} items is too small to measure the cut-off."
                )
            for chance in chances:
                matched = bool(values.max() >= found.cutoff(chance))
                counts[chance][place] += matched != (place == 0)
    n = len(matrix)
    return [CutoffRates(c, wrong[1] / n, wrong[0] / n, n, n) for c, wrong in counts.items()]
