"""NDCG, mAP and micro-F1 against loops from their definitions, scikit-learn, and an independent NDCG."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, ndcg_score

from diptych.errors import DataError, SettingsError
from diptych.evaluation import labels as module
from diptych.evaluation.labels import (
    THRESHOLDS,
    choose_threshold,
    first_occurrences,
    judge_labels,
    label_metrics,
    micro_f1,
)
from diptych.evaluation.leading import leading
from diptych.model.scores import EmbeddingScores


def collection(images: int, texts: int, labels: int, seed: int = 0, ties: bool = False):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-3, 4, (images, texts)) / 4 if ties else rng.standard_normal((images, texts))
    rows = [(rng.random((count, labels)) < 0.3).astype(np.float32) for count in (images, texts)]
    rows[0][0] = 0  # an image that shares nothing with anything
    return scores.astype(np.float32), *rows


def slow_ndcg(scores: list[float], query: list[float], gallery: list[list[float]], depth: int) -> float:
    """Spec 6.4, one item at a time."""
    shared = [sum(a * b for a, b in zip(query, row, strict=True)) for row in gallery]
    order = sorted(range(len(gallery)), key=lambda item: (-scores[item], item))
    dcg = sum(shared[item] / math.log2(rank + 1) for rank, item in enumerate(order[:depth], 1))
    ideal = sum(
        gain / math.log2(rank + 1) for rank, gain in enumerate(sorted(shared, reverse=True)[:depth], 1)
    )
    return 100 * dcg / ideal if ideal else 0.0


def slow_ap(scores: list[float], query: list[float], gallery: list[list[float]]) -> float:
    order = sorted(range(len(gallery)), key=lambda item: (-scores[item], item))
    hits, total = 0, 0.0
    for rank, item in enumerate(order, 1):
        if any(a and b for a, b in zip(query, gallery[item], strict=True)):
            hits += 1
            total += hits / rank
    return 100 * total / hits if hits else 0.0


@pytest.mark.parametrize(("images", "texts"), [(1, 1), (7, 3), (20, 90), (90, 20)])
@pytest.mark.parametrize("depth", [1, 5, 500])
@pytest.mark.parametrize("ties", [False, True])
def test_both_directions_equal_the_definition(images, texts, depth, ties, monkeypatch):
    monkeypatch.setattr(module, "BYTES", 24 * 40 * 3)  # a few queries per block
    scores, image_labels, text_labels = collection(images, texts, 6, seed=images + depth, ties=ties)
    judged = judge_labels(scores, image_labels, text_labels, depth=depth)
    for direction, rows, asked, gallery in (
        ("image_to_text", scores, image_labels, text_labels),
        ("text_to_image", scores.T, text_labels, image_labels),
    ):
        expected = [
            (slow_ndcg(row, query, gallery.tolist(), depth), slow_ap(row, query, gallery.tolist()))
            for row, query in zip(rows.tolist(), asked.tolist(), strict=True)
        ]
        assert judged[direction].ndcg == pytest.approx([n for n, _ in expected], abs=1e-9)
        assert judged[direction].ap == pytest.approx([a for _, a in expected], abs=1e-9)
        quick = judge_labels(scores, image_labels, text_labels, depth=depth, average_precision=False)
        assert quick[direction].ndcg == pytest.approx(judged[direction].ndcg, abs=1e-9)
        assert quick[direction].ap is None


def test_the_oracle_notices_another_discount_and_a_binary_gain():
    scores, image_labels, text_labels = collection(12, 30, 6)
    judged = judge_labels(scores, image_labels, text_labels, depth=5)["image_to_text"].ndcg

    def shifted(row, query):  # log2(rank + 2), the bug of the published COCO direction
        shared = [float(np.dot(query, item)) for item in text_labels]
        order = sorted(range(30), key=lambda item: (-row[item], item))
        gains = [shared[i] for i in order[:5]], sorted(shared, reverse=True)[:5]
        sums = [sum(g / math.log2(r + 2) for r, g in enumerate(gain, 1)) for gain in gains]
        return 100 * sums[0] / sums[1] if sums[1] else 0.0

    wrong = [shifted(row, query) for row, query in zip(scores.tolist(), image_labels, strict=True)]
    assert not np.allclose(judged, wrong)
    binary = np.minimum(1, image_labels)
    binary[:, 1:] = 0
    assert not np.allclose(judged, judge_labels(scores, binary, text_labels, depth=5)["image_to_text"].ndcg)


def test_scikit_learn_agrees():
    scores, image_labels, text_labels = collection(15, 40, 8, seed=3)
    judged = judge_labels(scores, image_labels, text_labels, depth=10)["image_to_text"]
    shared = image_labels @ text_labels.T
    asked = shared.sum(1) > 0
    theirs = [
        100 * ndcg_score(shared[i : i + 1], scores[i : i + 1], k=10, ignore_ties=True) for i in range(15)
    ]
    assert judged.ndcg[asked] == pytest.approx(np.array(theirs)[asked])
    assert judged.ndcg[~asked] == pytest.approx(0)
    ap = [100 * average_precision_score(shared[i] > 0, scores[i]) for i in np.flatnonzero(asked)]
    assert judged.ap is not None
    assert judged.ap[asked] == pytest.approx(ap)
    predicted = np.random.default_rng(0).random((15, 8))
    for threshold in (0.0, 0.3, 0.5, 1.0):
        expected = 100 * f1_score(image_labels, predicted >= threshold, average="micro", zero_division=0)
        assert micro_f1(predicted, image_labels, threshold) == pytest.approx(expected)


@pytest.mark.parametrize("columns", [40, 2100, 5000])
@pytest.mark.parametrize("kind", ["normal", "equal", "few", "sorted", "zeros", "infinite"])
def test_the_first_items_are_those_of_a_stable_sort(columns, kind):
    rng = np.random.default_rng(columns)
    block = rng.standard_normal((9, columns)).astype(np.float32)
    if kind == "equal":
        block[:] = 0.5
    elif kind == "few":
        block = rng.integers(0, 3, block.shape).astype(np.float32)
    elif kind == "sorted":  # a sample of the columns misleads as much as it can
        block = np.sort(block, axis=1)
        block[:, ::7] = -9
    elif kind == "zeros":
        block = np.where(rng.random(block.shape) < 0.5, np.float32(-0.0), np.float32(0.0))
    else:
        block[:, 0], block[:, -1] = -np.inf, np.inf
    for depth in (1, 30, 500):
        take = min(depth, columns)
        expected = np.argsort(-block, axis=1, kind="stable")[:, :take]
        assert np.array_equal(leading(torch.from_numpy(block), take).numpy(), expected)
        assert np.array_equal(leading(torch.from_numpy(block).double(), take).numpy(), expected)


def test_a_vector_model_and_a_matrix_agree_in_any_order_of_the_items():
    torch.manual_seed(0)
    image, text = torch.rand(30, 4), torch.rand(50, 4)
    labels = (torch.rand(80, 5) < 0.4).int()
    whole = label_metrics(EmbeddingScores(image, text), labels[:30], labels[30:], depth=20)
    again = label_metrics(image.double() @ text.double().T, labels[:30], labels[30:], depth=20)
    assert whole == pytest.approx(again)
    rows, columns = torch.randperm(30), torch.randperm(50)
    mixed = label_metrics(
        EmbeddingScores(image[rows], text[columns]), labels[:30][rows], labels[30:][columns], depth=20
    )
    assert mixed == pytest.approx(whole)
    both = [whole["image_to_text_ndcg@20"], whole["text_to_image_ndcg@20"]]
    assert whole["ndcg"] == pytest.approx(sum(both) / 2)


@pytest.mark.parametrize("threads", [1, 2])
def test_vectors_with_ties_equal_the_definition_in_small_blocks(threads, monkeypatch):
    """Products with the texts in rows, several workers, many blocks: the order of equal items stays theirs."""
    monkeypatch.setattr(module, "MOST_QUERIES", 7)
    rng = np.random.default_rng(threads)
    image = torch.from_numpy(rng.integers(0, 2, (70, 5)).astype(np.float32))
    text = image[rng.integers(0, 70, 90)]
    labels = (rng.random((70, 9)) < 0.3).astype(np.float32)
    text_labels = (rng.random((90, 9)) < 0.3).astype(np.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        judged = judge_labels(EmbeddingScores(image, text), labels, text_labels, depth=12)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    scores = (image.double() @ text.double().T).numpy()
    for direction, rows, asked, gallery in (
        ("image_to_text", scores, labels, text_labels),
        ("text_to_image", scores.T, text_labels, labels),
    ):
        expected = [
            slow_ndcg(row, query, gallery.tolist(), 12)
            for row, query in zip(rows.tolist(), asked.tolist(), strict=True)
        ]
        assert judged[direction].ndcg == pytest.approx(expected, abs=1e-9)


def test_equal_tag_sets_are_one_item_of_the_gallery_and_one_query():
    texts = ["sky sea", "dog", "sky sea", "cat", "dog"]
    first = first_occurrences(texts)
    assert first.tolist() == [0, 1, 3]
    scores, image_labels, text_labels = collection(4, 5, 3, seed=9)
    merged = judge_labels(scores, image_labels, text_labels, distinct_texts=first)
    alone = judge_labels(scores[:, first], image_labels, text_labels[first])
    assert merged["image_to_text"].ndcg == pytest.approx(alone["image_to_text"].ndcg)
    assert merged["text_to_image"].ndcg == pytest.approx(alone["text_to_image"].ndcg)
    assert merged["text_to_image"].ap == pytest.approx(alone["text_to_image"].ap)
    every = judge_labels(scores, image_labels, text_labels)
    assert len(merged["text_to_image"].ndcg) == 3 < len(every["text_to_image"].ndcg)
    assert not np.allclose(merged["image_to_text"].ndcg, every["image_to_text"].ndcg)


def test_the_threshold_is_the_best_of_the_grid():
    assert THRESHOLDS[0] == 0.05
    assert THRESHOLDS[-1] == 0.95
    assert len(THRESHOLDS) == 19
    rng = np.random.default_rng(5)
    for _ in range(5):
        predicted, truth = rng.random((40, 6)), (rng.random((40, 6)) < 0.3).astype(int)
        predicted = 0.5 * predicted + 0.3 * truth
        predicted[0] = 0.3  # on a threshold: a label is predicted from it on
        found = {t: micro_f1(predicted, truth, t) for t in THRESHOLDS}
        best = max(found.values())
        threshold, f1 = choose_threshold(predicted, truth)
        assert f1 == pytest.approx(best)
        assert threshold == min(t for t, value in found.items() if value == best)
    assert micro_f1(np.zeros((2, 2)), np.zeros((2, 2)), 0.5) == 0.0


def test_wrong_shapes_and_values_get_one_sentence():
    scores, image_labels, text_labels = collection(4, 6, 3)
    with pytest.raises(DataError, match=r"\b5\b"):
        judge_labels(scores, image_labels, text_labels[:5])
    with pytest.raises(DataError, match=r"\b3\b"):
        judge_labels(scores, image_labels, text_labels[:, :2])
    with pytest.raises(DataError, match="0 and 1"):
        judge_labels(scores, 2 * image_labels, text_labels)
    with pytest.raises(SettingsError, match=r"\b1\b"):
        judge_labels(scores, image_labels, text_labels, depth=0)
    with pytest.raises(DataError, match=r"\b4\b"):
        micro_f1(np.zeros((4, 2)), image_labels, 0.5)
    with pytest.raises(DataError, match=r"\b4\b"):
        micro_f1(np.zeros(4), image_labels, 0.5)
    with pytest.raises(SettingsError):
        choose_threshold(image_labels, image_labels, [])
    scores[1, 2] = np.nan
    with pytest.raises(DataError, match=r"\b1\b"):
        judge_labels(scores, image_labels, text_labels)


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    place = Path(__file__).parents[1] / "benchmarks" / "ndcg.py"
    runpy.run_path(str(place))["main"](["--small"])
    assert "times as long" in capsys.readouterr().out
