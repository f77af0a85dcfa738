"""When nothing matches: a cut-off for each query from its own scores over the collection.

A flat threshold fails because scores move with the query: one text scores everything higher than another
does. What does not match is the background, and every collection has plenty of it. With m the median of the
query's scores over (a sample of) the collection and s the spread of their lower half, where no match hides,

    s = (m − q10) / 1.2816,        strength(x) = (x − m) / s,        cut-off = m + z(N) · s,

a score matches when it stands more than z(N) spreads above the median. The best of N background items stands
high by chance alone, the higher the larger N; for a normal background it passes

    z(N) = Φ⁻¹(1 − p/N)   with probability p.

==========  =====================================================================================
``p``       ``chance``: how readily a match is claimed. Real backgrounds have heavier tails than the
            normal, so ``benchmarks/cutoff.py`` reports what a value of it costs on held-out queries.
``1.2816``  −Φ⁻¹(0.1): makes s the standard deviation when the background is normal.
==========  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from diptych.errors import SettingsError

CHANCE = 0.2  # where both errors are about equal on held-out queries of the demo (docs/search.md)
FEWEST = 20  # items below which a collection has no background to speak of
QUERIES = 300  # captions of a collection that are asked to calibrate its cut-off
FEWEST_QUERIES = 50  # below which their error rates would be guesses
TOLERABLE = 0.2  # share of either error above which a cut-off is not worth having
_NORMAL = NormalDist()
_LOWER = -_NORMAL.inv_cdf(0.1)


@dataclass(frozen=True, slots=True)
class Background:
    """Location and spread of one query's scores over a collection of ``count`` items."""

    location: float
    spread: float
    count: int

    def strength(self, score: float) -> float:
        """Spreads above the median."""
        return (score - self.location) / self.spread if self.spread > 0 else 0.0

    def cutoff(self, chance: float = CHANCE) -> float:
        """The score that the best of ``count`` normal background items passes with probability ``chance``."""
        if not 0 < chance < 1:
            raise SettingsError(f"the chance of a false match must lie between 0 and 1, not {chance}.")
        return self.location + _highest(self.count, chance) * self.spread

    def calibrated(self, calibration: Calibration) -> float:
        """The score that a calibration draws the line at, whatever the number of items."""
        return self.location + (_highest(self.count, 0.5) + calibration.excess) * self.spread


def background(scores: Any, count: int) -> Background | None:
    """The background of a query from a sample of its scores; None when there are too few to tell."""
    values = np.asarray(scores, np.float64).reshape(-1)
    if len(values) < FEWEST:
        return None
    low, median = np.quantile(values, [0.1, 0.5])
    return Background(float(median), float(median - low) / _LOWER, count)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Where captions of a collection draw the line between match and no match, and how often the line is wrong.

    ``excess`` counts spreads from where the best of N background items is expected (the median of its strength), so
    that the line moves with N. ``missed``: the caption's image is there, and nothing reaches the line. ``claimed``: it
    is not there, and something does. Each over ``queries`` captions.
    """

    excess: float
    missed: float
    claimed: float
    queries: int

    @property
    def usable(self) -> bool:
        """Whether neither error is above ``TOLERABLE``."""
        return max(self.missed, self.claimed) <= TOLERABLE

    def __str__(self) -> str:
        return (
            f"{100 * self.missed:.0f} % of what is there missed, {100 * self.claimed:.0f} % of what is not claimed, "
            f"on {self.queries} captions of this collection"
        )


def calibrate(queries: Any, own: Sequence[Sequence[int]], items: Any) -> Calibration | None:
    """Calibrate the cut-off with captions (M, D) of a collection of items (N, D); None where there is too little.

    ``own`` are the items that each caption belongs to. Each caption is asked of all items, and of all but its own. The
    line is drawn where the larger of the two error rates is smallest.
    """
    texts, rows = np.asarray(queries, np.float32), np.asarray(items, np.float32)
    if len(texts) < FEWEST_QUERIES or len(rows) < FEWEST + 1:
        return None
    typical = _highest(len(rows), 0.5)
    present, absent = np.zeros(len(texts)), np.zeros(len(texts))
    for n, (scores, out) in enumerate(zip((texts @ rows.T).astype(np.float64), own, strict=True)):
        found = background(scores, len(scores))
        assert found is not None
        present[n] = found.strength(float(scores.max())) - typical
        absent[n] = found.strength(float(np.delete(scores, list(out)).max())) - typical
    lines = np.unique(np.concatenate([present, absent]))
    missed = np.searchsorted(np.sort(present), lines, side="left") / len(present)
    claimed = 1 - np.searchsorted(np.sort(absent), lines, side="left") / len(absent)
    best = int(np.argmin(np.maximum(missed, claimed)))
    return Calibration(float(lines[best]), float(missed[best]), float(claimed[best]), len(texts))


def _highest(count: int, chance: float) -> float:
    """z(N): the strength that the best of ``count`` normal background items passes with probability ``chance``."""
    # in the lower tail, where a small chance keeps its digits
    return -_NORMAL.inv_cdf(chance / max(1, count)) if chance < max(1, count) else -math.inf
