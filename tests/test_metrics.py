"""Ranks by counting against slow loops: uneven pairings, ties under each rule, tiles, equal vectors."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from diptych.errors import DataError, SettingsError
from diptych.evaluation import metrics
from diptych.evaluation.metrics import (
    TIES,
    count_ranks,
    mean_rank,
    median_rank,
    recall_at,
    retrieval_metrics,
    rsum,
)
from diptych.model.scores import EmbeddingScores, Fold, MatrixScores, MeanScores, Where

SMALL_TILE = (16, 16)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def slow_ranks(
    scores: NDArray[np.float64], image_of: list[int], ties: str
) -> tuple[list[float], list[float]]:
    """Both directions from the definition: one query, one gallery item at a time; images with texts only."""
    images, texts = scores.shape

    def rank(values: list[float], own: set[int]) -> float:
        if ties == "index":
            order = sorted(range(len(values)), key=lambda item: (-values[item], item))
            return min(place for place, item in enumerate(order) if item in own)
        best = max(values[item] for item in own)
        above = sum(1 for item, value in enumerate(values) if item not in own and value > best)
        tied = sum(1 for item, value in enumerate(values) if item not in own and value == best)
        return above + {"strict": 0.0, "expected": 0.5, "pessimistic": 1.0}[ties] * tied

    own_texts = [{t for t in range(texts) if image_of[t] == i} for i in range(images)]
    image_to_text = [rank(scores[i].tolist(), own_texts[i]) for i in range(images) if own_texts[i]]
    text_to_image = [rank(scores[:, t].tolist(), {image_of[t]}) for t in range(texts)]
    return image_to_text, text_to_image


@st.composite
def retrievals(draw: st.DrawFn, tied: bool) -> tuple[NDArray[np.float64], list[int]]:
    """A score matrix, with many equal scores or none, and any pairing: also images with no text."""
    images, texts = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    image_of = draw(st.lists(st.integers(0, images - 1), min_size=texts, max_size=texts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if tied:
        return rng.integers(0, draw(st.integers(1, 6)), size=(images, texts)).astype(np.float64), image_of
    return rng.permutation(images * texts).reshape(images, texts).astype(np.float64), image_of


@pytest.mark.parametrize("ties", TIES)
@settings(max_examples=40)
@given(case=st.one_of(retrievals(tied=True), retrievals(tied=False)), small=st.booleans())
def test_ranks_are_those_of_the_definition(
    ties: str, case: tuple[NDArray[np.float64], list[int]], small: bool
) -> None:
    scores, image_of = case
    ranks = count_ranks(scores, image_of, SMALL_TILE if small else None)
    image_to_text, text_to_image = slow_ranks(scores, image_of, ties)
    assert ranks.image_to_text.ranks(ties).tolist() == image_to_text
    assert ranks.text_to_image.ranks(ties).tolist() == text_to_image
    assert ranks.image_to_text.queries.tolist() == sorted(set(image_of))


def test_the_oracle_tells_the_tie_rules_apart() -> None:
    scores, image_of = np.zeros((3, 6)), [2, 2, 0, 0, 1, 1]
    found = {ties: slow_ranks(scores, image_of, ties)[0] for ties in TIES}
    assert found == {
        "index": [2.0, 4.0, 0.0],
        "strict": [0.0, 0.0, 0.0],
        "expected": [2.0, 2.0, 2.0],
        "pessimistic": [4.0, 4.0, 4.0],
    }


@settings(max_examples=30)
@given(case=retrievals(tied=False), seed=st.integers(0, 1000))
def test_order_of_images_and_texts_does_not_matter_without_ties(
    case: tuple[NDArray[np.float64], list[int]], seed: int
) -> None:
    scores, image_of = case
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(scores.shape[0]), rng.permutation(scores.shape[1])
    moved = np.argsort(rows)[np.array(image_of)[columns]]
    assert retrieval_metrics(scores, image_of) == pytest.approx(
        retrieval_metrics(scores[rows][:, columns], moved)
    )


@settings(max_examples=30)
@given(case=st.one_of(retrievals(tied=True), retrievals(tied=False)), exponent=st.integers(-8, 8))
def test_an_increasing_change_of_scores_does_not_matter(
    case: tuple[NDArray[np.float64], list[int]], exponent: int
) -> None:
    scores, image_of = case
    assert retrieval_metrics(scores, image_of) == retrieval_metrics(scores * 2.0**exponent + 3, image_of)


@settings(max_examples=40)
@given(case=st.one_of(retrievals(tied=True), retrievals(tied=False)))
def test_tie_rules_are_ordered_and_agree_without_ties(case: tuple[NDArray[np.float64], list[int]]) -> None:
    for _, placement in count_ranks(*case):
        strict, index, expected, pessimistic = (
            placement.ranks(t) for t in ("strict", "index", "expected", "pessimistic")
        )
        assert (strict <= index).all()
        assert (index <= pessimistic).all()
        assert np.array_equal(expected, (strict + pessimistic) / 2)
        assert placement.tied_queries == (strict != pessimistic).sum()


def test_a_model_that_scores_everything_alike_is_not_perfect_by_default() -> None:
    image_of = np.repeat(np.arange(200), 5)
    constant = np.ones((200, 1000))
    assert retrieval_metrics(constant, image_of)["rsum"] < 30
    assert retrieval_metrics(constant, image_of, "strict")["rsum"] == 600
    assert retrieval_metrics(constant, image_of, "pessimistic")["rsum"] == 0
    assert count_ranks(constant, image_of).text_to_image.tied_queries == 1000


def repeated_vectors(
    images: int, texts: int, dim: int, seed: int
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Vectors drawn from a few distinct ones, and which of them each item has."""
    rng = np.random.default_rng(seed)
    which_image = rng.integers(0, max(1, images // 3), size=images).tolist()
    which_text = rng.integers(0, max(1, texts // 3), size=texts).tolist()
    pool = torch.Generator().manual_seed(seed)
    image, text = (torch.randn(count, dim, generator=pool) for count in (images, texts))
    return image[which_image], text[which_text], which_image, which_text


def tied_by_identity(
    image: Tensor, text: Tensor, which_image: list[int], which_text: list[int], image_of: list[int]
) -> tuple[list[int], list[int]]:
    """Ties that must exist because two items have one vector: exact scores never coincide otherwise."""
    exact = (image.double() @ text.double().T).numpy()
    own_texts = [[t for t, i in enumerate(image_of) if i == image] for image in range(len(image))]
    by_image = []
    for i, own in enumerate(own_texts):
        if own:
            best = which_text[max(own, key=lambda t, i=i: exact[i, t])]
            by_image.append(sum(which_text[t] == best for t in range(len(text)) if t not in own))
    by_text = [
        sum(which_image[i] == which_image[own] for i in range(len(image)) if i != own) for own in image_of
    ]
    return by_image, by_text


@pytest.mark.parametrize(
    ("images", "texts", "dim"),
    [(1, 1, 3), (2, 5, 33), (5, 3, 512), (17, 1, 100), (70, 131, 7), (530, 1100, 64)],
)
@pytest.mark.parametrize("device", DEVICES)
def test_equal_vectors_tie_exactly_wherever_they_stand(
    images: int, texts: int, dim: int, device: str
) -> None:
    image, text, which_image, which_text = repeated_vectors(images, texts, dim, seed=images + dim)
    image_of = np.random.default_rng(3).integers(0, images, size=texts).tolist()
    ranks = count_ranks(EmbeddingScores(image.to(device), text.to(device)), image_of)
    by_image, by_text = tied_by_identity(image, text, which_image, which_text, image_of)
    assert ranks.image_to_text.tied.tolist() == by_image
    assert ranks.text_to_image.tied.tolist() == by_text


def test_own_scores_computed_apart_would_break_ties() -> None:
    """The mutation the previous test guards against: positives from row-wise dot products."""
    image, text, which_image, which_text = repeated_vectors(530, 1100, 64, seed=1)
    image_of = np.random.default_rng(3).integers(0, 530, size=1100).tolist()
    apart = (image[image_of] * text).sum(dim=1)
    tied = (image @ text.T == apart).sum(0) - 1
    assert tied.tolist() != tied_by_identity(image, text, which_image, which_text, image_of)[1]


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_and_their_matrix_rank_alike(device: str) -> None:
    image, text = torch.randn(600, 32, device=device), torch.randn(1500, 32, device=device)
    image_of = torch.randint(0, 600, (1500,))
    scores = EmbeddingScores(image, text)
    matrix = scores.tile(slice(None), slice(None))
    for (_, one), (_, other) in zip(
        count_ranks(scores, image_of), count_ranks(matrix, image_of), strict=True
    ):
        assert np.array_equal(one.ranks(), other.ranks())


class Watched(MatrixScores):
    """A matrix that counts how often each pair was asked for."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.asked = torch.zeros(self.shape, dtype=torch.int64)

    def tile(self, images: Where, texts: Where) -> Tensor:
        rows, columns = torch.arange(self.shape[0])[images], torch.arange(self.shape[1])[texts]
        self.asked[rows[:, None], columns] += 1
        return super().tile(images, texts)


def test_each_pair_is_scored_once() -> None:
    scores = Watched(torch.randn(64, 320))
    count_ranks(scores, np.random.default_rng(0).permutation(np.arange(320) // 5), (16, 32))
    assert scores.asked.unique().tolist() == [1]


def test_tiles_not_kept_are_asked_for_again_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, image_of = torch.randn(64, 320), np.arange(320) // 5
    kept = count_ranks(matrix, image_of, (16, 32))
    monkeypatch.setattr(metrics, "KEPT_BYTES", 0)
    again = count_ranks(matrix, image_of, (16, 32))
    assert np.array_equal(kept.image_to_text.above, again.image_to_text.above)
    assert np.array_equal(kept.text_to_image.above, again.text_to_image.above)


def test_recall_and_ranks_by_hand() -> None:
    ranks = np.array([0.0, 0.0, 3.0, 9.0, 10.0])
    assert recall_at(ranks) == {1: 40.0, 5: 60.0, 10: 80.0}
    assert recall_at(ranks, [100]) == {100: 100.0}
    assert median_rank(ranks) == 4.0
    assert median_rank(np.array([0.0, 1.0])) == 1.0  # floor(0.5) + 1
    assert mean_rank(ranks) == pytest.approx(5.4)


def test_the_flat_dict() -> None:
    found = retrieval_metrics(np.eye(4), range(4))
    assert list(found) == [
        *(f"image_to_text_{m}" for m in ("recall@1", "recall@5", "recall@10", "median_rank", "mean_rank")),
        *(f"text_to_image_{m}" for m in ("recall@1", "recall@5", "recall@10", "median_rank", "mean_rank")),
        "rsum",
        "mean_recall",
    ]
    assert found["rsum"] == rsum(found) == 600
    assert found["mean_recall"] == 100


def test_an_image_without_texts_is_no_query_but_stands_in_the_gallery() -> None:
    scores = np.array([[1.0, 0.0], [2.0, 3.0], [5.0, 4.0]])
    ranks = count_ranks(scores, [0, 1])
    assert ranks.image_to_text.queries.tolist() == [0, 1]
    assert ranks.text_to_image.above.tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_every_kind_of_number_is_ranked(dtype: torch.dtype) -> None:
    matrix = torch.arange(12).reshape(3, 4).to(dtype)
    assert count_ranks(matrix, [0, 1, 2, 2]).text_to_image.above.tolist() == [2, 1, 0, 0]


def test_infinite_scores_are_ordinary() -> None:
    scores = np.array([[np.inf, -np.inf], [-np.inf, np.inf]])
    assert retrieval_metrics(scores, [0, 1])["rsum"] == 600


def test_nan_is_an_error_with_its_place() -> None:
    matrix = torch.zeros(40, 50)
    matrix[33, 17] = torch.nan
    with pytest.raises(DataError, match=r"\b33\b.*\b17\b"):
        count_ranks(matrix, np.arange(50) % 40, SMALL_TILE)
    with pytest.raises(DataError, match=r"\b2\b"):
        EmbeddingScores(torch.zeros(2, 3), torch.tensor([[0.0] * 3, [0.0] * 3, [torch.nan, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("scores", "image_of", "message"),
    [
        (torch.zeros(2, 3), [0, 1], r"\b2\b.*\b3\b"),
        (torch.zeros(2, 3), [0, 1, 2], r"\b2\b"),
        (torch.zeros(2, 3), [0, -1, 1], "-1"),
        (torch.zeros(2, 3), [0.0, 1.0, 1.0], "float64"),
        (torch.zeros(2, 0), [], r"\b2\b.*\b0\b"),
        (torch.zeros(6), [0], r"\b6\b"),
    ],
)
def test_scores_and_pairing_must_fit(scores: Tensor, image_of: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        count_ranks(scores, image_of)


def test_an_unknown_tie_rule_names_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="random"):
        retrieval_metrics(torch.zeros(1, 1), [0], ties="random")


def test_vectors_must_go_together() -> None:
    with pytest.raises(DataError, match=r"\b2\b"):
        EmbeddingScores(torch.zeros(2, 3), torch.zeros(2, 4))


def test_products_ignore_reduced_precision() -> None:
    image, text = torch.randn(70, 64), torch.randn(80, 64)
    exact = EmbeddingScores(image, text).tile(slice(None), slice(None))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(EmbeddingScores(image, text).tile(slice(None), slice(None)), exact)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_ensemble_is_the_mean_of_its_members() -> None:
    one, other = torch.randn(20, 60), torch.randn(20, 60)
    image_of = np.arange(60) // 3
    mean = MeanScores([MatrixScores(one), MatrixScores(other)])
    assert torch.allclose(mean.tile(slice(None), slice(None)), (one + other) / 2)
    assert retrieval_metrics(mean, image_of) == retrieval_metrics((one + other) / 2, image_of)
    assert mean.kind == "matrix"
    with pytest.raises(DataError, match=r"\b60\b"):
        MeanScores([MatrixScores(one), MatrixScores(one[:3])])
    with pytest.raises(DataError):
        MeanScores([])


def test_a_selection_renumbers() -> None:
    matrix = torch.randn(6, 9)
    part = Fold(MatrixScores(matrix), torch.tensor([4, 1]), torch.tensor([8, 0, 3]))
    assert part.shape == (2, 3)
    assert torch.equal(part.tile(slice(None), slice(1, 3)), matrix[[4, 1]][:, [0, 3]])


def test_the_benchmark_runs_and_finds_identical_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    place = Path(__file__).parents[1] / "benchmarks" / "ranks.py"
    runpy.run_path(str(place))["main"](["--small"])
    printed = capsys.readouterr().out
    assert "stable argsort loop: identical ranks for 3,000 of 3,000 queries" in printed
    assert "500 images encoded for 500 images" in printed
