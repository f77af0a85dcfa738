from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diptych.errors import SettingsError
from diptych.interaction.fusion import Fusion
from diptych.interaction.similarity import PairScorer
from diptych.model import reranking
from diptych.model.reranking import OUTSIDE, RerankedScores, candidates
from diptych.model.scores import EmbeddingScores, MatrixScores, PairScores
from diptych.types import Features, Ragged

CPU = torch.device("cpu")


def collection(count: int, dim: int, seed: int) -> Ragged:
    torch.manual_seed(seed)
    mask = torch.arange(5) < torch.randint(1, 6, (count, 1))
    return Ragged.join([Features(torch.randn(count, 5, dim), mask)])


def quick(n: int, m: int) -> EmbeddingScores:
    torch.manual_seed(9)
    return EmbeddingScores(torch.randn(n, 4), torch.randn(m, 4))


class Counting(PairScorer):
    """A scorer that remembers whom it was asked about."""

    kind = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images: Features, texts: Features) -> Tensor:
        self.calls.append((len(images.mask), len(texts.mask)))
        first, other = images.values[:, 0].mean(1), texts.values[:, 0].mean(1)
        return first[:, None] * 10 + other[None]


def brute(scores: Tensor, k: int) -> set[tuple[int, int]]:
    """The union of both directions' best k, by sorting."""
    n, m = scores.shape
    found = set()
    for i in range(n):
        found |= {(i, j) for j in sorted(range(m), key=lambda j, i=i: -float(scores[i, j]))[:k]}
    for j in range(m):
        found |= {(i, j) for i in sorted(range(n), key=lambda i, j=j: -float(scores[i, j]))[:k]}
    return found


@pytest.mark.parametrize("block", [2, 512])
@pytest.mark.parametrize(("n", "m", "k"), [(6, 11, 2), (5, 3, 1), (4, 9, 100)])
def test_candidates_are_the_union_of_both_directions(
    n: int, m: int, k: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reranking, "BLOCK", block)
    scores = quick(n, m)
    rows, columns = candidates(scores, k)
    whole = scores.tile(slice(None), slice(None))
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == brute(whole, k)
    assert rows.tolist() == sorted(rows.tolist())
    assert len(rows) == len(set(zip(rows.tolist(), columns.tolist(), strict=True)))


def test_reranked_scores_equal_brute_force() -> None:
    torch.manual_seed(0)
    model = Fusion(6, 8, layers=2, heads=2)
    images, texts = collection(7, 6, 1), collection(12, 8, 2)
    scores = quick(7, 12)
    found = RerankedScores(scores, PairScores(model, images, texts, CPU), 3)
    with torch.no_grad():
        model.eval()
        every = model(images.take(torch.arange(7)), texts.take(torch.arange(12)))
    pairs = brute(scores.tile(slice(None), slice(None)), 3)
    expected = torch.full((7, 12), OUTSIDE)
    for i, j in pairs:
        expected[i, j] = every[i, j]
    assert torch.allclose(found.tile(slice(None), slice(None)), expected, atol=1e-5)
    rows, columns = torch.tensor([5, 0, 5]), torch.tensor([11, 2])
    assert torch.allclose(found.tile(rows, columns), expected[rows][:, columns], atol=1e-5)
    assert torch.equal(found.tile(slice(2, 4), slice(3, 9)), found.tile(slice(None), slice(None))[2:4, 3:9])
    assert found.kind == "dot, best 3 by fusion"


def test_each_pair_is_judged_once_image_by_image() -> None:
    scorer = Counting()
    scores = quick(6, 11)
    found = RerankedScores(scores, PairScores(scorer, collection(6, 4, 1), collection(11, 4, 2), CPU), 2)
    assert scorer.calls == []  # nothing before a tile is asked for
    for _ in range(2):
        found.tile(slice(0, 3), slice(None))
        found.tile(slice(3, 6), slice(None))
    assert len(scorer.calls) == 6
    assert sum(count for _, count in scorer.calls) == len(brute(scores.tile(slice(None), slice(None)), 2))


def test_a_k_above_the_gallery_means_all_of_it() -> None:
    found = RerankedScores(
        quick(3, 4), PairScores(Counting(), collection(3, 4, 1), collection(4, 4, 2), CPU), 50
    )
    assert (found.tile(slice(None), slice(None)) > OUTSIDE).all()


def test_bad_arguments_are_refused() -> None:
    images, texts = collection(3, 4, 1), collection(4, 4, 2)
    with pytest.raises(SettingsError, match="candidates"):
        RerankedScores(quick(3, 4), PairScores(Counting(), images, texts, CPU), 0)
    with pytest.raises(SettingsError, match=r"\b3\b.*\b4\b"):
        RerankedScores(MatrixScores(torch.zeros(2, 4)), PairScores(Counting(), images, texts, CPU), 2)
