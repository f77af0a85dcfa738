"""SCAN's pair scorer: scores and gradients against loops written from docs/methods-baselines.md, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.errors import DataError, SettingsError
from diptych.interaction import similarity_scorer
from diptych.interaction.scan import SCAN, Direction, Pooling
from diptych.parts import describe, rebuild
from diptych.types import Features

DIM = 6
BOTH: list[Direction] = ["text", "image"]
POOLINGS: list[Pooling] = ["mean", "lse"]
LAMBDAS = {"text": (9.0, 6.0), "image": (4.0, 5.0)}


def sets(sizes: list[int], seed: int) -> Features:
    made = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    values = torch.randn(*mask.shape, DIM, generator=made, dtype=torch.float64)
    return Features(values, mask)


def scorer_of(direction: Direction, pooling: Pooling) -> SCAN:
    sharpness, lse = LAMBDAS[direction]
    return SCAN(DIM, direction, sharpness, pooling, lse)


def unit(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum().sqrt() + 1e-8)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / torch.clamp(a.pow(2).sum().sqrt() * b.pow(2).sum().sqrt(), min=1e-8)


def slow_score(image: Tensor, text: Tensor, direction: str, pooling: str, mutation: str = "") -> Tensor:
    """One image (R, D) and one text (W, D), element by element, as the page writes it."""
    regions, words = [unit(x) for x in image], [unit(x) for x in text]
    first, second = LAMBDAS[direction]
    slope = 0.0 if mutation == "clipped at 0" else 0.1
    s = [[torch.where(v @ e > 0, v @ e, slope * (v @ e)) for e in words] for v in regions]
    over_words = (direction == "text") != (mutation == "other axis")
    for r in range(len(regions)):
        if over_words:
            length = torch.stack(s[r]).pow(2).sum().sqrt() + 1e-8
            s[r] = [x / length for x in s[r]]
    if not over_words:
        lengths = [torch.stack([row[c] for row in s]).pow(2).sum().sqrt() + 1e-8 for c in range(len(words))]
        s = [[x / lengths[c] for c, x in enumerate(row)] for row in s]
    relevance = []
    if direction == "text":
        for c, e in enumerate(words):
            w = torch.softmax(first * torch.stack([row[c] for row in s]), dim=0)
            relevance.append(cosine(e, sum((a * v for a, v in zip(w, regions, strict=True)), 0 * e)))
    else:
        for r, v in enumerate(regions):
            w = torch.softmax(first * torch.stack(s[r]), dim=0)
            relevance.append(cosine(v, sum((a * e for a, e in zip(w, words, strict=True)), 0 * v)))
    found = torch.stack(relevance)
    if pooling == "mean":
        return found.mean()
    return torch.log(torch.exp(second * found).sum()) / (1.0 if mutation == "no root" else second)


def slow(images: Features, texts: Features, direction: str, pooling: str, mutation: str = "") -> Tensor:
    return torch.stack(
        [
            torch.stack(
                [
                    slow_score(i[valid], t[own], direction, pooling, mutation)
                    for t, own in zip(texts.values, texts.mask, strict=True)
                ]
            )
            for i, valid in zip(images.values, images.mask, strict=True)
        ]
    )


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("recompute", [False, True])
def test_scores_and_gradients_equal_the_page(
    direction: Direction, pooling: Pooling, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recompute:
        monkeypatch.setattr(similarity_scorer, "TRAINING_BYTES", 0)
        monkeypatch.setattr("diptych.interaction.scan.CPU_ELEMENTS", 12)  # many small tiles
    images, texts = sets([3, 1, 4], 0), sets([2, 5, 1, 3], 1)
    weights = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found, gradients = [], []
    for compute in (scorer_of(direction, pooling), lambda i, t: slow(i, t, direction, pooling)):
        leaves = [side.values.clone().requires_grad_() for side in (images, texts)]
        scores = compute(Features(leaves[0], images.mask), Features(leaves[1], texts.mask))
        found.append(scores.detach())
        gradients.append(torch.autograd.grad((scores * weights).sum(), leaves))
    assert (found[0] - found[1]).abs().max() < 1e-12
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("mutation", ["clipped at 0", "other axis", "no root"])
def test_the_oracle_notices_a_mutation(direction: Direction, mutation: str) -> None:
    images, texts = sets([3, 4], 0), sets([2, 5], 1)
    found = scorer_of(direction, "lse")(images, texts)
    assert (found - slow(images, texts, direction, "lse", mutation)).abs().max() > 1e-4


@pytest.mark.parametrize("direction", BOTH)
def test_padding_is_neutral(direction: Direction) -> None:
    scorer = scorer_of(direction, "lse").eval()
    images, texts = sets([3, 1, 4], 0), sets([2, 5, 1], 1)
    dirty = [
        Features(side.values.masked_fill(~side.mask[..., None], torch.nan), side.mask)
        for side in (images, texts)
    ]
    leaf = dirty[1].values.requires_grad_()
    scores = scorer(dirty[0], Features(leaf, texts.mask))
    assert torch.equal(scores, scorer(images, texts))
    scores.sum().backward()
    assert torch.isfinite(leaf.grad[texts.mask]).all()
    assert (leaf.grad[~texts.mask] == 0).all()


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_matched_pairs_score_as_in_the_matrix(direction: Direction, pooling: Pooling) -> None:
    scorer = scorer_of(direction, pooling).eval()
    images, texts = (side.map(float_) for side in (sets([3, 1, 4], 0), sets([2, 5, 1], 1)))
    whole = scorer(images, texts)
    assert torch.allclose(scorer.pairs(images, texts), whole.diagonal(), atol=1e-6)


def float_(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() else values


@pytest.mark.parametrize("direction", BOTH)
def test_half_precision_stays_near(direction: Direction) -> None:
    scorer = scorer_of(direction, "mean").eval()
    images, texts = (side.map(float_) for side in (sets([3, 1, 4], 0), sets([2, 5, 1], 1)))
    with torch.no_grad():
        exact = scorer(images, texts)
        with torch.autocast("cpu", torch.bfloat16):
            rough = scorer(images, texts)
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().max() < 0.03


def test_a_scorer_travels_and_refuses_what_it_cannot_read() -> None:
    scorer = rebuild(describe(SCAN(DIM, "image", 4.0, "lse", 20.0)))
    assert (scorer.direction, scorer.pooling, scorer.lse_sharpness) == ("image", "lse", 20.0)
    with pytest.raises(DataError, match=r"\(2, 3, 5\)"):
        scorer(Features.whole(torch.zeros(2, 3, 5)), sets([2], 0))
    wrong: list[dict[str, Any]] = [{"direction": "both"}, {"pooling": "max"}, {"lse_sharpness": 0.0}]
    for arguments in wrong:
        with pytest.raises(SettingsError):
            SCAN(DIM, **arguments)
