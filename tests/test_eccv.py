"""Many-to-many judgements: mAP@R by its formula, the ECCV Caption and CxC files, the package as an oracle."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.data.captions import Captions
from diptych.errors import DataError, MissingExtra, SettingsError
from diptych.evaluation import judgements as module
from diptych.evaluation.judgements import (
    Judgements,
    coco_ids,
    judge_lists,
    judge_scores,
    load_judgements,
    top_lists,
)
from diptych.evaluation.metrics import retrieval_metrics
from diptych.evaluation.retrieval import evaluate_scores
from diptych.model.scores import EmbeddingScores, MatrixScores

packaged = pytest.mark.skipif(
    importlib.util.find_spec("eccv_caption") is None, reason="needs the extra eccv (eccv-caption)"
)


def average_precision(ranked: list[int], relevant: set[int]) -> tuple[float, float, float]:
    """mAP@R, R-Precision and R@1 of one query, from the equations."""
    size, total, found = len(relevant), 0.0, 0
    for place in range(size):
        if ranked[place] in relevant:
            found += 1
            total += found / (place + 1)
    return total / size, found / size, float(ranked[0] in relevant)


@settings(max_examples=60)
@given(st.integers(2, 40), st.data())
def test_judged_lists_follow_the_equations(gallery: int, data: st.DataObject) -> None:
    ranked = data.draw(st.permutations(range(gallery)))
    relevant = data.draw(st.sets(st.integers(0, gallery - 1), min_size=1))
    judged = judge_lists({7: ranked}, {7: relevant})
    expected = [100 * value for value in average_precision(ranked, relevant)]
    assert [judged.values[n][0] for n in ("map@r", "r_precision", "recall@1")] == pytest.approx(expected)
    for k in (5, 10):
        assert judged.values[f"recall@{k}"][0] == 100 * bool(set(ranked[:k]) & relevant)


def test_by_hand_and_not_average_precision_over_what_was_found() -> None:
    # R = 3, hits at places 1 and 3: (1/1 + 2/3) / 3, where a divisor of the two found would give 5/6
    judged = judge_lists({0: [5, 9, 6, 7]}, {0: {5, 6, 8}})
    assert judged.values["map@r"][0] == pytest.approx(100 * 5 / 9)
    assert judged.values["r_precision"][0] == pytest.approx(200 / 3)


def test_a_list_shorter_than_r_is_refused() -> None:
    with pytest.raises(DataError, match=r"\b2\b.*\b3\b"):
        judge_lists({0: [1, 2]}, {0: {1, 2, 3}})
    with pytest.raises(DataError, match=r"\b4\b"):
        judge_lists({0: [1, 2]}, {4: {1}})
    with pytest.raises(DataError, match=r"\b0\b"):
        judge_lists({0: [1, 2]}, {0: set()})


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 4), st.integers(0, 10_000), st.data())
def test_top_lists_are_a_stable_sort(
    images: int, texts: int, levels: int, seed: int, data: st.DataObject
) -> None:
    matrix = np.random.default_rng(seed).integers(0, levels, size=(images, texts)).astype(float)
    for dim, table in ((1, matrix), (0, matrix.T)):
        depth = data.draw(st.integers(1, table.shape[1]))
        queries = data.draw(st.lists(st.integers(0, len(table) - 1), min_size=1))
        found, values = top_lists(MatrixScores(matrix), torch.tensor(queries), depth, dim)
        expected = np.argsort(-table[queries], axis=1, kind="stable")[:, :depth]
        assert np.array_equal(found, expected)
        assert np.array_equal(values, np.take_along_axis(table[queries], expected, axis=1))


def test_scores_are_judged_by_id() -> None:
    scores = MatrixScores(np.array([[0.9, 0.1, 0.5], [0.2, 0.8, 0.7]]))
    judgements = Judgements("mine", {20: frozenset({300, 100})}, {300: frozenset({20, 10})})
    judged = judge_scores(scores, judgements, np.array([10, 20]), np.array([100, 200, 300]))
    assert judged["image_to_text"].values["map@r"].tolist() == [25.0]  # image 20 ranks 200, 300, 100
    assert judged["text_to_image"].values["r_precision"].tolist() == [100.0]
    with pytest.raises(DataError, match=r"\b1\b"):
        judge_scores(scores, judgements, np.array([10, 21]), np.array([100, 200, 300]))


@packaged
def test_the_published_counts() -> None:
    counts = {}
    for name in ("eccv", "cxc", "coco"):
        judgements = load_judgements(name)
        sides = (judgements.image_to_text, judgements.text_to_image)
        counts[name] = [(len(side), sum(map(len, side.values()))) for side in sides]
        assert (judgements.images, judgements.texts) == (5000, 25000)
    assert counts["eccv"] == [(1261, 22550), (1332, 11279)]
    assert [queries for queries, _ in counts["cxc"]] == [5000, 24972]
    assert counts["coco"] == [(5000, 25000), (25000, 25000)]
    sizes = [len(items) for items in load_judgements("eccv").image_to_text.values()]
    assert (min(sizes), max(sizes)) == (6, 48)


class Nothing:
    """An image store of a given length whose images are never read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("not read")

    def content_key(self, index: int) -> str:
        return str(index)


@pytest.fixture(scope="module")
def coco() -> Captions:
    """The COCO test split by its ids, with texts out of order: nothing may lean on positions."""
    owner = {text: next(iter(images)) for text, images in load_judgements("coco").text_to_image.items()}
    rng = np.random.default_rng(0)
    texts, images = rng.permutation(list(owner)), rng.permutation(list(set(owner.values())))
    row = {image: number for number, image in enumerate(images.tolist())}
    image_of = np.array([row[owner[text]] for text in texts.tolist()])
    names = [f"COCO_val2014_{image:012d}.jpg" for image in images]
    return Captions(
        Nothing(5000), ["a text"] * 25000, image_of, names, ["test"] * 5000, text_ids=[str(t) for t in texts]
    )


@pytest.fixture(scope="module")
def scores(coco: Captions) -> EmbeddingScores:
    rng = torch.Generator().manual_seed(0)
    image = torch.randn(5000, 16, generator=rng)
    text = image[torch.from_numpy(coco.image_of)] + 0.5 * torch.randn(25000, 16, generator=rng)
    return EmbeddingScores(image, text)


def ranking(kind: str, scores: EmbeddingScores) -> EmbeddingScores:
    """The scores of a model that knows something, of one that knows nothing, and of one with few levels."""
    if kind == "noisy":
        return scores
    rng = torch.Generator().manual_seed(1)
    if kind == "random":
        return EmbeddingScores(torch.randn(5000, 8, generator=rng), torch.randn(25000, 8, generator=rng))
    # clusters: every pair scores 0 or 1, so that nearly all places are decided by the tie rule
    return EmbeddingScores(
        torch.eye(40)[torch.arange(5000) % 40], torch.eye(40)[torch.randint(40, (25000,), generator=rng)]
    )


@packaged
@pytest.mark.parametrize("kind", ["noisy", "random", "clusters"])
def test_the_package_gives_the_same_numbers(coco: Captions, scores: EmbeddingScores, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ujson and tqdm are optional there
        from eccv_caption._metrics import compute_eccv_metrics, compute_r_at_k
    image_ids, text_ids = coco_ids(coco)
    scores = ranking(kind, scores)
    matrix = scores.tile(slice(None), slice(None)).numpy()
    for name in ("eccv", "cxc"):
        whole = load_judgements(name)
        some = [dict(list(side.items())[:300]) for side in (whole.image_to_text, whole.text_to_image)]
        judged = judge_scores(scores, Judgements(name, *some), image_ids, text_ids)
        for direction, relevant, asked, gallery, table in (
            ("image_to_text", some[0], image_ids, text_ids, matrix),
            ("text_to_image", some[1], text_ids, image_ids, matrix.T),
        ):
            rows = {int(number): row for row, number in enumerate(asked)}
            lists = {q: gallery[np.argsort(-table[rows[q]], kind="stable")[:60]].tolist() for q in relevant}
            found = {metric: values.mean() for metric, values in judged[direction].values.items()}
            theirs = compute_eccv_metrics(lists, relevant)
            assert found["map@r"] == pytest.approx(100 * theirs["eccv_map_at_r"])
            assert found["r_precision"] == pytest.approx(100 * theirs["eccv_rprecision"])
            for k in (1, 5, 10):
                assert found[f"recall@{k}"] == pytest.approx(100 * compute_r_at_k(lists, relevant, k))


@packaged
def test_judging_the_original_pairs_is_plain_recall(coco: Captions, scores: EmbeddingScores) -> None:
    report = evaluate_scores(scores, coco, protocol="coco-5k", judgements=["coco", "eccv"], bootstrap=20)
    plain = retrieval_metrics(scores, coco.image_of)
    for direction in ("image_to_text", "text_to_image"):
        for k in (1, 5, 10):
            judged = report.metrics[f"coco_{direction}_recall@{k}"]
            assert judged == pytest.approx(plain[f"{direction}_recall@{k}"])
        low, high = report.intervals[f"eccv_{direction}_map@r"]
        assert low < report.metrics[f"eccv_{direction}_map@r"] < high
    assert "mAP@R" in str(report)
    assert "| eccv | mAP@R | R-Precision |" in report.to_markdown()


@packaged
def test_text_ids_are_found_for_folders_that_have_none(coco: Captions) -> None:
    published = np.load(module._package_folder() / "coco_test_ids.npy", allow_pickle=False)
    owner = load_judgements("coco").text_to_image
    images = [next(iter(owner[text])) for text in published[::5].tolist()]
    precomputed = Captions(
        Nothing(5000), ["a text"] * 25000, np.arange(25000) // 5, [str(i) for i in images], ["test"] * 5000
    )
    assert np.array_equal(coco_ids(precomputed)[1], published)
    with pytest.raises(DataError, match=r"\b7\b.*\b5\b"):
        coco_ids(Captions(Nothing(1), ["a"] * 5, np.zeros(5, np.int64), ["7"], ["test"]))


@packaged
def test_another_gallery_is_refused() -> None:
    small = Captions(Nothing(2), ["a", "b"], np.array([0, 1]), ["1", "2"], ["test"] * 2, text_ids=["3", "4"])
    with pytest.raises(DataError, match=r"5,000.*\b2\b"):
        evaluate_scores(np.eye(2), small, judgements=["eccv"])
    with pytest.raises(SettingsError, match="coco-5k"):
        evaluate_scores(np.eye(2), small, protocol="coco-1k", judgements=["eccv"])
    with pytest.raises(SettingsError, match="image_of"):
        evaluate_scores(np.eye(2), [0, 1], judgements=["eccv"])


def test_ids_that_are_no_numbers_are_refused() -> None:
    wrong = Captions(Nothing(1), ["a"], np.array([0]), ["dog"], ["test"], text_ids=["1"])
    with pytest.raises(DataError, match="'dog'"):
        coco_ids(wrong)


def test_missing_package_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="mine"):
        load_judgements("mine")
    with pytest.raises(DataError, match=r"original_image_to_caption\.json"):
        load_judgements("eccv", tmp_path)
    (tmp_path / "original_image_to_caption.json").write_text(json.dumps([1]))
    with pytest.raises(DataError, match=r"original_image_to_caption\.json"):
        load_judgements("eccv", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"diptych\[eccv\]"):
        load_judgements("eccv")
