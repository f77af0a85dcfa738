"""Words of a query and what is common to every engine's full-text search: which words count, how rankings fuse."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

MAX_WORDS = 64  # words of a text that are looked up
COMMON, COMMON_SHARE = (
    1000,
    10,
)  # a word in more than 1,000 items and a tenth of all says little, and costs most
FUSION = 60  # the constant of reciprocal rank fusion (Cormack, Clarke and Büttcher 2009)


def words_of(text: str) -> list[str]:
    """The words of a query that are looked up, each once; like FTS5's they end at an underscore too."""
    composed = unicodedata.normalize("NFC", text.lower())  # an accent of its own would end a word
    return list(dict.fromkeys(re.findall(r"[^\W_]+", composed)))[:MAX_WORDS]


def fuse(rankings: Sequence[Sequence[str]]) -> dict[str, float]:
    """Reciprocal rank fusion: Σ over rankings of 1 / (60 + rank), rank from 1, for each id."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, id in enumerate(ranking, 1):
            scores[id] = scores.get(id, 0.0) + 1.0 / (FUSION + rank)
    return scores
