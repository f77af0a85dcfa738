"""Whether a model can read the words of a query: a model made for English says so where they are of another language.

Two scores of a text, both learned from lists of words and phrases by ``benchmarks/readable.py --train``, which also
chooses their thresholds (``english.npz``):

* **language**: the sum of the weights of its words and of their runs of 2 to 4 letters;
* **letters**: the same of its runs of 2 and 3 letters without accents, English words and names against random letters.

The weights of runs are found by their hash. A text of another script than Latin has no such runs: it is told at once.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.text import TextInput
from diptych.data.vocabulary import tokenize
from diptych.index.protocol import Query
from diptych.model.protocol import text_input_of

BUCKETS = 1 << 16  # hashed runs of letters
RUNS = (2, 3, 4)
RUNS_OF_LETTERS = 27**3 + 27**2  # of three, then of two
ALPHABET = "<abcdefghijklmnopqrstuvwxyz"  # < stands for the end of a word on either side
PROBES = {  # common words of other languages: a tokenizer that has them whole was made for that language too
    "German": "Entwicklung Gesellschaft gegenüber zwischen natürlich während verschiedene beispielsweise",
    "French": "également plusieurs développement pendant lorsque première entreprise toujours",
    "Spanish": "también después durante desarrollo siempre primera gobierno empresa",
    "Italian": "attraverso sviluppo società durante secondo sempre ancora perché",
    "Russian": "который также человек может время после между город",
    "Chinese": "这 们 说 时 过 对 发 样 没 开 进 问 间 现 点 实",
}
WHOLE = 0.75  # share of a language's probes that are a token of their own, from which on it counts as read

_WORD = re.compile(r"[^\W\d_]+")


def words_of(text: str) -> list[str]:
    """The words of a text, lower-cased, without digits and marks."""
    return _WORD.findall(text.lower())


def language_features(text: str) -> NDArray[np.int64]:
    """The buckets of the words of a text and of their runs of letters."""
    found = []
    for word in words_of(text):
        bounded = f"<{word}>"
        found.append(f"={word}")
        found += [bounded[start : start + n] for n in RUNS for start in range(len(bounded) - n + 1)]
    return np.array([zlib.crc32(run.encode()) % BUCKETS for run in found], dtype=np.int64)


def letter_features(text: str) -> NDArray[np.int64]:
    """The runs of three and of two letters of a text as numbers; accents are left out."""
    numbers = []
    for word in words_of(text):
        plain = unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
        places = [0, *(ALPHABET.index(letter) for letter in plain if letter in ALPHABET[1:]), 0]
        numbers += [a * 729 + b * 27 + c for a, b, c in zip(places, places[1:], places[2:], strict=False)]
        numbers += [27**3 + a * 27 + b for a, b in pairwise(places)]
    return np.array(numbers, dtype=np.int64)


class English:
    """The two scores of a text and the thresholds above which it is none in English."""

    def __init__(self, learned: Any) -> None:
        self.thresholds = learned["thresholds"]
        self._learned = [
            (
                learned[f"{name}_weights"].astype(np.float32) * learned[f"{name}_scale"],
                learned[f"{name}_bias"],
            )
            for name in ("language", "letters")
        ]

    def scores(self, text: str) -> tuple[float, ...]:
        """Language and letters; higher is less like English."""
        features = language_features(text), letter_features(text)
        return tuple(
            float(weights[found].sum() + bias) if len(found) else -np.inf
            for found, (weights, bias) in zip(features, self._learned, strict=True)
        )

    def reads(self, text: str) -> bool:
        """Whether the words of a text look like English ones or names."""
        letters = [letter for word in words_of(text) for letter in word]
        foreign = sum(not unicodedata.name(letter, "LATIN").startswith("LATIN") for letter in letters)
        if 2 * foreign > len(letters):
            return False
        return all(score <= limit for score, limit in zip(self.scores(text), self.thresholds, strict=True))


@cache
def english() -> English:
    """The learned scores."""
    with (resources.files(__package__) / "english.npz").open("rb") as file, np.load(file) as learned:
        return English(learned)


class Readable:
    """What a model reads, by its tokenizer: a fixed list of words, English, or more than that; looked up when asked."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @cached_property
    def _reads(self) -> tuple[frozenset[str], bool]:
        """The words of a vocabulary, where there is one, and whether the tokenizer is English."""
        text_input = text_input_of(self._model)
        inner = getattr(text_input, "inner", text_input)  # captions may be cleaned first
        known = frozenset(getattr(inner, "words", ()))
        return known, inner is not None and not known and only_english(inner)

    def warning(self, query: Query) -> str:
        """One sentence where the model cannot know what the words of a query mean, else nothing."""
        text = " ".join(str(term.value) for term in query.terms if term.kind == "text")
        if not words_of(text):
            return ""
        known, only = self._reads
        if known and not known & set(tokenize(text)):
            return "the model knows none of these words: use words of the captions it was trained on"
        if only and not english().reads(text):
            return "the model reads English and may not know these words: ask in English"
        return ""


def only_english(text_input: TextInput) -> bool:
    """Whether a tokenizer has the common words of no other language whole."""
    return not any(whole(text_input, probes.split()) >= WHOLE for probes in PROBES.values())


def whole(text_input: TextInput, words: Sequence[str]) -> float:
    """The share of words that are one token of their own; all that is unknown is one token."""
    ids = text_input(["", *words, " ".join(words)]).values  # the last one makes room for padding
    padding = np.bincount(ids[0]).argmax()
    used = (ids != padding).sum(axis=1)
    single = ids[1:-1][used[1:-1] == used[0] + 1]
    return len(np.unique(single.sum(axis=1))) / len(words)  # they differ in that token alone
