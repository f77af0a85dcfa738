"""Words of texts and queries, and BM25 for an engine without it, as SQLite's FTS5 computes it.

PostgreSQL's own ``ts_rank`` does not know how rare a word is, and its dictionaries stem by other rules: a
hybrid search would answer differently there. Here FTS5's tokenizer cuts the texts, and the score is FTS5's::

    score(text) = Σ over words  idf · f · (k1 + 1) / (f + k1 · (1 − b + b · length / average))
    idf         = ln((N − n + ½) / (n + ½)), at least 1e-6

with f the times the word is in the text, n the texts that have it, N all texts of the kind.
"""

from __future__ import annotations

import hashlib
import math
import re
import sqlite3
import threading
import unicodedata
from collections import Counter
from collections.abc import Sequence

MAX_WORDS = 64  # words of a text that are looked up
# a word in more than COMMON items and more than one in COMMON_SHARE of them says little, and costs most
COMMON, COMMON_SHARE = 1000, 10
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


K1, B, LEAST_IDF = 1.2, 0.75, 1e-6  # FTS5's constants
LONGEST = 200  # bytes of a word kept as it is: a database's index holds no longer ones


class Tokenizer:
    """Cuts texts into words in a SQLite database in memory; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.execute(
            "CREATE VIRTUAL TABLE texts USING fts5(text, tokenize='porter unicode61 remove_diacritics 2')"
        )
        self._db.execute("CREATE VIRTUAL TABLE words USING fts5vocab(texts, 'instance')")

    def words(self, texts: Sequence[str]) -> list[Counter[str]]:
        """How often each word is in each text."""
        counts: list[Counter[str]] = [Counter() for _ in texts]
        with self._lock:
            self._db.execute("BEGIN")
            try:
                self._db.executemany("INSERT INTO texts(rowid, text) VALUES (?, ?)", enumerate(texts))
                for row, word, count in self._db.execute(
                    "SELECT doc, term, count(*) FROM words GROUP BY doc, term"
                ):
                    counts[row][_stored_form(word)] = count
            finally:
                self._db.execute("ROLLBACK")
        return counts

    def query(self, text: str) -> dict[str, int]:
        """The words to look up for a query, in order, and how often each counts."""
        found: Counter[str] = Counter()
        for counts in self.words(words_of(text)):
            found.update(counts)
        return dict(found)


def bm25(texts: Sequence[str], query: str) -> dict[int, float]:
    """The scores of the texts that have a word of a query, by number; common words are left out while others remain."""
    tokenizer = Tokenizer()
    wanted, held = tokenizer.query(query), tokenizer.words(texts)
    lengths = [sum(counts.values()) for counts in held]
    average = sum(lengths) / max(1, len(held))
    found = {word: [n for n, counts in enumerate(held) if word in counts] for word in wanted}
    most = max(COMMON, len(held) // COMMON_SHARE)
    telling = [word for word in wanted if len(found[word]) <= most] or list(wanted)
    scores: dict[int, float] = {}
    for word in telling:
        hits = len(found[word])
        idf = max(math.log((len(held) - hits + 0.5) / (hits + 0.5)), LEAST_IDF)
        for n in found[word]:
            count = held[n][word]
            part = count * (K1 + 1) / (count + K1 * (1 - B + B * lengths[n] / average))
            scores[n] = scores.get(n, 0.0) + wanted[word] * idf * part
    return scores


def _stored_form(word: str) -> str:
    data = word.encode()
    return word if len(data) <= LONGEST else f"#{hashlib.blake2b(data, digest_size=16).hexdigest()}"
