"""Check a claimed number: each protocol that people confuse is named, and a number of none is said to be of none.

The claims come from a slow program of its own, which sorts lists: it shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import diptych, refused
from numpy.typing import NDArray
from small import precomputed

from diptych.data.formats import open_captions
from diptych.errors import DataError
from diptych.evaluation.score_matrix import read_scores
from diptych.model.scores import MatrixScores
from diptych.runs.judge import Subject, judge, readings

IMAGES, TEXTS, FOLD = 60, 5, 20
Matrix = NDArray[np.float32]
OWNER = np.repeat(np.arange(IMAGES), TEXTS)
FIRST_TEXTS = "all 60 images, first text only"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("judge") / "toy_precomp", train=4, dev=2, testall=IMAGES)


def vectors(noise: float = 1.2) -> tuple[Matrix, Matrix]:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((IMAGES, 8)).astype(np.float32)
    return images, images[OWNER] + noise * rng.standard_normal((len(OWNER), 8)).astype(np.float32)


def scores(digits: int = 6, noise: float = 1.2) -> Matrix:
    images, texts = vectors(noise)
    return np.round(images @ texts.T, digits)


def recalls(matrix: Matrix, owner: NDArray[np.int64], ties: float = 0.0) -> list[float]:
    """R@1 and R@5 of images and of texts; a tied item stands before (+), behind (−) or by its index (0)."""
    found = []
    for lists, right in (
        (matrix, [set(np.flatnonzero(owner == image)) for image in range(len(matrix))]),
        (matrix.T, [{image} for image in owner]),
    ):
        ranks = []
        for values, own in zip(lists, right, strict=True):
            if not own:
                continue
            keys = [(-float(v), -ties * (item not in own), item) for item, v in enumerate(values)]
            order = [key[2] for key in sorted(keys)]
            ranks.append(min(order.index(item) for item in own))
        found += [100 * float(np.mean(np.array(ranks) < k)) for k in (1, 5)]
    return found


def in_folds(matrix: Matrix) -> list[float]:
    parts = [recalls(matrix[at : at + FOLD, TEXTS * at : TEXTS * (at + FOLD)], OWNER[: TEXTS * FOLD])
             for at in range(0, IMAGES, FOLD)]  # fmt: skip
    return list(np.mean(parts, axis=0))


def copies(matrix: Matrix) -> list[float]:
    """Every text has a copy of its image of its own; copies of an image are no wrong answers."""
    repeated = matrix[OWNER]
    texts = [100 * np.mean([(row > row[own]).sum() < k for own, row in enumerate(repeated)]) for k in (1, 5)]
    images = [
        100 * np.mean([(row > row[own]).sum() < k for own, row in enumerate(repeated.T)]) for k in (1, 5)
    ]
    return [*texts, *images]


def ones(matrix: Matrix) -> list[float]:
    return recalls(matrix[:, :IMAGES], np.arange(IMAGES))


PLANTED: dict[str, Callable[[Matrix], list[float]]] = {
    "all 60 images": lambda s: recalls(s, OWNER),
    "the first 20 images": lambda s: recalls(s[:FOLD, : FOLD * TEXTS], OWNER[: FOLD * TEXTS]),
    "3 folds of 20 images": in_folds,
    FIRST_TEXTS: lambda s: recalls(s[:, ::TEXTS], np.arange(IMAGES)),
    "all 60 images, 1 text per image assumed": ones,
    "all 60 images, images repeated 5 times": copies,
    "all 60 images, transposed": lambda s: [*recalls(s, OWNER)[2:], *recalls(s, OWNER)[:2]],
    "all 60 images, ties broken for the model": lambda s: recalls(s, OWNER, -1.0),
    "all 60 images, ties broken against the model": lambda s: recalls(s, OWNER, 1.0),
}
METRICS = [f"{way}_recall@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5)]


def claims(numbers: list[float]) -> list[str]:
    return [f"{name}={number:.2f}" for name, number in zip(METRICS, numbers, strict=True)]


def given(path: Path, data: Path, numbers: list[float]) -> list[str]:
    found = judge([path], str(data), split="testall", claimed=claims(numbers), fold=FOLD)
    return [reading.name for reading, _ in found.given_by]


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_protocol_is_named(name: str, data: Path, tmp_path: Path) -> None:
    matrix = scores(0 if "ties" in name else 6)
    np.save(tmp_path / "scores.npy", matrix)
    assert given(tmp_path / "scores.npy", data, PLANTED[name](matrix)) == [name]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (lambda s: s.T, "transposed"),
        (lambda s: s[OWNER], "copies are left out"),
        (lambda s: s[:FOLD, : FOLD * TEXTS], "the first 20 images only"),
        (lambda s: s[:, ::TEXTS], "one text of each image"),
    ],
    ids=["transposed", "repeated", "a fold", "first texts"],
)
def test_what_a_file_holds_is_seen_by_its_shape(
    written: Callable[[Matrix], Matrix], said: str, data: Path, tmp_path: Path
) -> None:
    matrix = scores()
    np.save(tmp_path / "scores.npy", written(matrix))
    shown = diptych(
        "judge", tmp_path / "scores.npy", "--data", data, "--split=testall", f"--fold={FOLD}"
    ).output
    assert said in shown
    names = {"the first 20 images only": "the first 20 images", "one text of each image": FIRST_TEXTS}
    expected = PLANTED[names.get(said, "all 60 images")]
    assert f"{expected(matrix)[0]:.1f}" in shown.splitlines()[1]


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (np.argsort([str(number) for number in range(IMAGES)], kind="stable"), "rows sorted by id"),
        (np.arange(IMAGES)[::-1], "row order lost: the order that fits best"),
    ],
    ids=["sorted", "reversed"],
)
def test_a_lost_order_of_rows_is_named(
    order: NDArray[np.int64], said: str, data: Path, tmp_path: Path
) -> None:
    matrix = scores(noise=0.7)
    np.save(tmp_path / "scores.npy", matrix[order])
    assert given(tmp_path / "scores.npy", data, recalls(matrix, OWNER)) == [f"all 60 images, {said}"]


def test_five_texts_assumed_where_an_image_has_six() -> None:
    rng = np.random.default_rng(3)
    owner = np.repeat(np.arange(20), 6)
    matrix = (rng.standard_normal((20, 120)) + 2 * (owner == np.arange(20)[:, None])).astype(np.float32)
    subject = Subject(MatrixScores(torch.from_numpy(matrix)), owner, [f"i{row}" for row in range(20)])
    found = {reading.name: reading for reading in readings(subject)}
    metrics = found["all 20 images, 5 texts per image assumed"].metrics
    expected = recalls(matrix[:, :100], np.repeat(np.arange(20), 5))
    assert [metrics[name] for name in METRICS] == pytest.approx(expected)
    assert metrics != found["all 20 images"].metrics


def test_folds_without_a_text_are_left_out() -> None:
    owner = np.repeat(np.arange(10, 20), 2)  # the first ten images have none
    matrix = np.random.default_rng(3).standard_normal((20, 20)).astype(np.float32)
    subject = Subject(MatrixScores(torch.from_numpy(matrix)), owner, [f"i{row}" for row in range(20)])
    assert {reading.name.split(",")[0] for reading in readings(subject, 10)} == {"all 20 images"}


def test_a_number_of_no_protocol_is_said_to_be_of_none(data: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "scores.npy", scores())
    asked = ("judge", tmp_path / "scores.npy", "--data", data, "--split=testall", "--fold=20")
    shown = diptych(*asked, "--claimed=image_to_text_recall@1=33.21").output
    assert "none of these" in shown
    assert "nearest to 33.21" in shown
    assert "none of these" in diptych(*asked, "--claimed=rsum=512.3", "--claimed=1.23").output
    assert "% of the numbers" in diptych(*asked, "--claimed=33.2").output  # a bare number may match by chance


def test_vectors_and_runs_give_the_same_numbers(data: Path, tmp_path: Path) -> None:
    images, texts = vectors()
    images, texts = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (images, texts))
    for name, array in (("images", images), ("texts", texts), ("scores", images @ texts.T)):
        np.save(tmp_path / f"{name}.npy", array)
    asked = ("--data", data, "--split=testall", f"--fold={FOLD}")
    matrix = diptych("judge", tmp_path / "scores.npy", *asked, "--trec", tmp_path / "trec").output
    assert diptych("judge", tmp_path / "images.npy", tmp_path / "texts.npy", *asked).output == matrix
    runs = [tmp_path / "trec" / f"{way}.run" for way in ("text_to_image", "image_to_text")]
    assert diptych("judge", *runs, *asked).output == matrix
    for run in runs:
        kept = [line for line in run.read_text().splitlines() if int(line.split()[3]) <= 20]
        run.write_text("\n".join(kept))
    read = diptych("judge", *runs, *asked).output
    assert read.splitlines()[1].split() == matrix.splitlines()[1].split()
    assert "do not list every pair" in read
    diptych("judge", *runs, *asked, "--trec", tmp_path / "again")  # what no run lists is not written
    assert "inf" not in (tmp_path / "again" / "text_to_image.run").read_text()
    assert len((tmp_path / "trec" / "text_to_image.qrels").read_text().splitlines()) == len(OWNER)


def test_bad_scores_are_refused(data: Path, tmp_path: Path) -> None:
    asked = ("--data", data, "--split=testall")
    path = tmp_path / "scores.npy"
    for value in (np.nan, np.inf):
        matrix = scores()
        matrix[3, 7] = value
        np.save(path, matrix)
        assert "row 3, column 7" in refused("judge", path, *asked)
    np.save(path, scores()[:50])
    assert "50 × 300" in refused("judge", path, *asked)
    np.save(path, scores()[OWNER] + np.arange(len(OWNER))[:, None].astype(np.float32))
    assert "300 × 300" in refused("judge", path, *asked)  # rows of an image that differ are no copies
    assert "abc" in refused("judge", path, *asked, "--claimed=abc")
    np.save(path, scores())
    assert "no_metric" in refused("judge", path, *asked, "--claimed=no_metric=3")
    assert "3 files" in refused("judge", path, path, path, *asked)
    name = open_captions(data, split="testall").image_ids[0]
    (tmp_path / "bad.run").write_text(f"{name} Q0 nobody 1 0.5 x\n")
    assert "nobody" in refused("judge", tmp_path / "bad.run", *asked)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PK\x03\x04" + bytes(90), b"\x93NUMPY\x02\x00\x28\x23\x00\x00" + b"(" * 8999 + b"\n", b"a number",
        b"several",
    ],
    ids=["empty", "no archive", "brackets", "a number", "several"],
)  # fmt: skip
def test_files_that_hold_no_scores(content: bytes, tmp_path: Path) -> None:
    """The end of an empty file was taken for an interruption; the others ended in Python errors."""
    file = tmp_path / "scores.npy"
    file.write_bytes(content)
    if content == b"a number":
        np.save(file, np.float32(1))
    if content == b"several":
        with file.open("wb") as handle:
            np.savez(handle, a=np.ones(3), b=np.ones(3))
    with pytest.raises(DataError, match=r"scores\.npy"):
        read_scores(file)
