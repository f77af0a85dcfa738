"""Words of a text by the rules of NLTK's ``word_tokenize``, and the vocabulary of the published BiGRU models.

The rules are written here as a scanner over the chunks between spaces, so that neither NLTK nor its downloaded Punkt
model is needed; on caption text they give the words of ``NLTKWordTokenizer``, other ones only in odd runs of marks such
as ``::a``. Of Punkt one thing reaches the words: a period that ends a sentence becomes a word of its own, unless the
word before it is a known abbreviation, or an initial or a number and the sentence goes on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.errors import DataError, SettingsError
from diptych.storage import parse_json

PAD, START, END, UNKNOWN, MASK = "<pad>", "<start>", "<end>", "<unk>", "<mask>"
MIN_COUNT = 4  # rarer words become <unk> (published rule)

ABBREVIATION = re.compile(
    r"(?:.*-)?(?:a\.m|p\.m|u\.s|u\.k|u\.n|e\.g|i\.e|d\.c|dr|mrs?|ms|st|[js]r|vs|ft|inc|ltd|co|corp|no|gen|sen"
    r"|rep|prof|rev|mt|ave)"
)
CONTRACTIONS = frozenset(["cannot", "d'ye", "gimme", "lemme", "gonna", "wanna", "gotta", "more'n"])
CLOSERS = "])}>\"'»”’"
_PIECE = re.compile(
    r"""(?P<mark>[«“‘„»”’]|`+|\.{2,}|[;@\#$%&?!*\[\](){}<>\u2012-\u2015]|--|[:,](?!\d)|[:,]$)
      | (?P<quote>"|'')
      | (?P<word>(?:(?!--|''|\.\.)[^«“‘„»”’`;@\#$%&?!*\[\](){}<>\u2012-\u2015:,"]|[:,](?=\d))+)""",
    re.VERBOSE,
)
_CLITIC = re.compile(r"(?P<stem>.*[^'])(?P<tail>'(?:s|m|d|ll|re|ve)?|n't)")
_APOSTROPHE = re.compile(r"'(\w+)")
# what may follow an apostrophe that leans on the word before, so that it opens no quotation
LEANING_ENDS = frozenset(["re", "ve", "ll", "m", "t", "s", "d", "n"])
_CONTRACTION = re.compile(r"(can|d|gim|lem|gon|wan|got|more)(not|'ye|me|na|ta|'n)")


def tokenize(text: str) -> list[str]:
    """The words of a text, lower-cased."""
    chunks = text.lower().split()
    words: list[str] = []
    for number, chunk in enumerate(chunks):
        next_chunk = chunks[number + 1] if number + 1 < len(chunks) else None
        chunk, period, closers = _final_period(chunk, next_chunk)
        _split_chunk(chunk, words, before=" " if number else "^")
        if period:
            words.append(".")
            _split_chunk(closers, words, before=".")
    return words


def build_vocabulary(texts: Iterable[str], min_count: int = MIN_COUNT) -> list[str]:
    """Words by id: four specials, the words seen ``min_count`` times or more by frequency, ``<mask>``."""
    if min_count < 1:
        raise SettingsError(f"min_count={min_count} is out of range: give at least 1.")
    counts = Counter(word for text in texts for word in tokenize(text))
    frequent = sorted((w for w, n in counts.items() if n >= min_count), key=lambda w: (-counts[w], w))
    return [PAD, START, END, UNKNOWN, *frequent, MASK]


def vocabulary_words(vocabulary: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Words by id from a list of them or from the published form {"word2idx", "idx2word", "idx"}; checked."""
    if isinstance(vocabulary, Mapping):
        word2idx = vocabulary.get("word2idx")
        if not isinstance(word2idx, Mapping) or not word2idx:
            raise DataError("this vocabulary has no 'word2idx' table: give the published JSON or a list.")
        words = sorted(word2idx, key=lambda word: int(word2idx[word]))
        if [int(word2idx[word]) for word in words] != list(range(len(words))):
            raise DataError(
                f"the ids of this vocabulary must be 0…{len(words) - 1}, each once: copy it again."
            )
    else:
        words = list(vocabulary)
    if len(set(words)) != len(words):
        twice = next(word for word, n in Counter(words).items() if n > 1)
        raise DataError(f"this vocabulary holds the word '{twice}' twice: each word needs one id.")
    if words[:4] != [PAD, START, END, UNKNOWN]:
        raise DataError(f"it starts with {words[:4]}: ids 0–3 must be {PAD}, {START}, {END}, {UNKNOWN}.")
    return words


def read_vocabulary(path: str | Path) -> list[str]:
    """Words by id from a published vocabulary file, with ``<mask>`` appended where it has none."""
    path = Path(path)
    try:
        words = vocabulary_words(parse_json(path.read_text("utf-8")))
    except FileNotFoundError as error:
        raise DataError(f"the vocabulary {path} does not exist: check the path.") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{path} is no vocabulary in JSON ({error}): convert a .pkl first.") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return words if MASK in words else [*words, MASK]


def published_form(words: Sequence[str]) -> dict[str, Any]:
    """{"word2idx", "idx2word", "idx"}: what the published code writes and reads."""
    return {
        "word2idx": {word: number for number, word in enumerate(words)},
        "idx2word": {str(number): word for number, word in enumerate(words)},
        "idx": len(words),
    }


def _final_period(chunk: str, next_chunk: str | None) -> tuple[str, bool, str]:
    """Take the sentence's period off a chunk: what is before it, whether it was there, the closers after."""
    core = chunk.rstrip(CLOSERS)
    closers = chunk[len(core) :]
    stem = core[:-1]
    if not core.endswith(".") or not stem or stem.endswith("."):
        return chunk, False, ""
    if next_chunk is not None:
        word = stem.lstrip("([{<\"'`«“‘„")
        abbreviation = ABBREVIATION.fullmatch(word) is not None
        initial = len(word) == 1 and word.isalpha()
        number = word.replace(",", "").replace(".", "").isdigit()
        if abbreviation or ((initial or number) and next_chunk[0].isalpha()):
            return chunk, False, ""
    return stem, True, closers


def _split_chunk(chunk: str, words: list[str], before: str) -> None:
    """Append the words of a chunk that comes after the character ``before`` ("^" = the start of the text)."""
    if chunk.isalpha() and chunk not in CONTRACTIONS:
        words.append(chunk)
        return
    for match in _PIECE.finditer(chunk):
        piece = match.group()
        if match.lastgroup == "quote":
            opens = before in " ([{<" or (before == "^" and piece == '"')
            words.append("``" if opens else "''")
        elif match.lastgroup == "word":
            _split_word(piece, words)
        else:
            words.append(piece)
        before = piece[-1]


def _split_word(word: str, words: list[str]) -> None:
    """Append a run of letters, digits and inner marks, its clitics and contractions cut apart."""
    apostrophe = _APOSTROPHE.match(word)
    if apostrophe and apostrophe.group(1) not in LEANING_ENDS:
        words.append("'")
        word = word[1:]
    clitic = _CLITIC.fullmatch(word)
    tail = clitic.group("tail") if clitic else ""
    word = clitic.group("stem") if clitic else word
    contraction = _CONTRACTION.fullmatch(word) if word in CONTRACTIONS else None
    words.extend(contraction.groups() if contraction else [word])
    if tail:
        words.append(tail)
