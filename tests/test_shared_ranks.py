"""Ranks where one text belongs to several images: the rule of galleries of different texts."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.evaluation.metrics import TIES, count_ranks, count_shared_ranks


def rank_of(row: np.ndarray, own: set[int], ties: str) -> float:  # type: ignore[type-arg]
    best = max(row[n] for n in own)
    first = min(n for n in own if row[n] == best)
    above = sum(value > best for value in row)
    tied = [n for n, value in enumerate(row) if value == best and n not in own]
    before = {
        "index": sum(n < first for n in tied), "strict": 0, "expected": len(tied) / 2, "pessimistic": len(tied),
    }  # fmt: skip
    return float(above + before[ties])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", TIES)
def test_ranks_are_those_of_the_best_own_item(seed: int, ties: str) -> None:
    rng = np.random.default_rng(seed)
    images, texts = [(4, 9), (30, 70), (7, 3), (40, 40), (1, 5)][seed]
    scores = np.round(rng.normal(size=(images, texts)), 1).astype(np.float32)  # with ties
    pairs = sorted({(int(rng.integers(images)), int(rng.integers(texts))) for _ in range(2 * texts)})
    image_of, text_of = np.array(pairs).T
    ranks = count_shared_ranks(scores, image_of, text_of, tile=(16, 16))
    for placement, matrix, side, other in (
        (ranks.image_to_text, scores, image_of, text_of),
        (ranks.text_to_image, scores.T, text_of, image_of),
    ):
        assert placement.queries.tolist() == sorted(set(side.tolist()))
        expected = [
            rank_of(matrix[q], {int(o) for s, o in zip(side, other, strict=True) if s == q}, ties)
            for q in placement.queries
        ]
        assert placement.ranks(ties).tolist() == expected


def test_without_shared_texts_both_counts_agree() -> None:
    rng = np.random.default_rng(0)
    scores = np.round(rng.normal(size=(20, 50)), 1).astype(np.float32)
    image_of = rng.permutation(np.repeat(np.arange(20), [3, 2] * 10))
    plain, shared = count_ranks(scores, image_of), count_shared_ranks(scores, image_of, np.arange(50))
    for (_, a), (_, b) in zip(plain, shared, strict=True):
        assert np.array_equal(a.queries, b.queries)
        for ties in TIES:
            assert np.array_equal(a.ranks(ties), b.ranks(ties))


def test_scores_in_double_precision_are_level_with_themselves() -> None:
    scores = np.random.default_rng(0).standard_normal((6, 12))
    pairs = np.tile(np.arange(6), 2)
    shared, own = count_shared_ranks(scores, pairs, np.arange(12)), count_ranks(scores, pairs)
    for (_, one), (_, other) in zip(shared, own, strict=True):
        assert np.array_equal(one.ranks(), other.ranks())
