"""Equal texts: ranks against a loop that follows the definition, and the switch on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import diptych, refused
from small import pictures

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.evaluation import metrics as equal_texts
from diptych.evaluation.compare import compare
from diptych.evaluation.metrics import right_pairs, text_groups
from diptych.evaluation.report import Report
from diptych.evaluation.retrieval import evaluate_scores


def captions(texts: list[str], image_of: list[int], images: int) -> Captions:
    return Captions(
        images=ArrayStore(np.arange(images, dtype=np.float32)[:, None]),
        texts=texts,
        image_of=np.array(image_of),
        image_ids=[str(n) for n in range(images)],
        splits=["test"] * images,
    )


def expected(scores: np.ndarray, texts: list[str], image_of: list[int]) -> dict[str, list[int]]:
    """Ranks by definition: items of another text, or of no equal text, that stand before the best right one."""
    said = [text.lower().strip(" .!") for text in texts]
    right = np.zeros(scores.shape, dtype=bool)
    for text, word in enumerate(said):
        for other, owner in enumerate(image_of):
            if said[other] == word:
                right[owner, text] = True
    found: dict[str, list[int]] = {"image_to_text": [], "text_to_image": []}
    for image in range(len(scores)):
        if right[image].any():
            best = scores[image][right[image]].max()
            found["image_to_text"].append(int((scores[image][~right[image]] > best).sum()))
    for text in range(len(texts)):
        best = scores[:, text][right[:, text]].max()
        found["text_to_image"].append(int((scores[:, text][~right[:, text]] > best).sum()))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_those_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    images, words = 12, ["A lion.", "a lion", "a cat", "A Cat!", "a dog", "one", "two", "three"]
    image_of = [*range(images - 1), *rng.integers(0, images - 1, 15).tolist()]  # the last has no text
    texts = [str(word) for word in rng.choice(words, len(image_of))]
    scores = rng.permutation(images * len(texts)).reshape(images, -1).astype(np.float32)
    report = evaluate_scores(scores, captions(texts, image_of, images), equal_texts=True, bootstrap=0)
    for direction, ranks in expected(scores, texts, image_of).items():
        for k in (1, 5, 10):
            recall = 100 * np.mean(np.array(ranks) < k)
            assert report.metrics[f"{direction}_recall@{k}"] == pytest.approx(recall)
        assert report.metrics[f"{direction}_mean_rank"] == pytest.approx(np.mean(ranks) + 1)
    plain = evaluate_scores(scores, captions(texts, image_of, images), bootstrap=0)
    assert report.metrics["rsum"] > plain.metrics["rsum"]  # a mutation that ignores equal texts gives this


def test_without_equal_texts_nothing_changes() -> None:
    rng = np.random.default_rng(0)
    scores, data = (
        rng.standard_normal((6, 12)),
        captions([f"text {n}" for n in range(12)], [*range(6)] * 2, 6),
    )
    reports = [evaluate_scores(scores, data, equal_texts=equal) for equal in (False, True)]
    assert reports[0].metrics == reports[1].metrics
    assert reports[0].intervals == reports[1].intervals
    with pytest.raises(SettingsError, match="equal_texts"):
        compare(*reports)


def test_pairs_and_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = text_groups(["A lion.", "a cat", "a  LION", "एक भालू", "एक भाल"])
    assert groups.tolist() == [0, 1, 0, 3, 4]
    image, text = right_pairs(np.array([0, 0, 1, 2, 2]), groups)
    assert set(zip(image.tolist(), text.tolist(), strict=True)) == {
        (0, 0),
        (1, 0),
        (0, 1),
        (0, 2),
        (1, 2),
        (2, 3),
        (2, 4),
    }
    monkeypatch.setattr(equal_texts, "MOST_PAIRS", 6)
    with pytest.raises(SettingsError, match=r"\b7\b"):
        right_pairs(np.array([0, 0, 1, 2, 2]), groups)
    with pytest.raises(SettingsError, match="image_of"):
        evaluate_scores(torch.eye(2), [0, 1], equal_texts=True)


def test_the_switch_of_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    for number, path in enumerate(pictures(tmp_path / "photos", 12)):
        path.with_suffix(".txt").write_text(f"a lion {number % 2}\n")
    flags = ("--dim=8", "--word_dim=8", "--min_count=1", "--image_size=32", "--batch_size=4", "--epochs=1")
    run, photos = tmp_path / "run", tmp_path / "photos"
    diptych("train", "vse-plus-plus", "--data", photos, "--output_dir", run, *flags)
    evaluate = ("evaluate", run, "--split", "train", "--bootstrap", 0)
    plain = diptych(*evaluate, "--output", tmp_path / "plain.json")
    equal = diptych(*evaluate, "--equal_texts", "--output", tmp_path / "equal.json")
    assert "counts equal texts as right" in plain.stdout
    assert "right: own pairs, and images of an equal text" in equal.stdout
    assert json.loads((tmp_path / "equal.json").read_text())
    one, other = (Report.load(tmp_path / f"{name}.json") for name in ("plain", "equal"))
    assert other.metrics["text_to_image_recall@1"] > one.metrics["text_to_image_recall@1"]
    assert "equal_texts" in refused("compare", tmp_path / "plain.json", tmp_path / "equal.json")
    assert "--equal_texts" in refused(*evaluate, "--protocol", "four-directions", "--equal_texts")


def test_ties_of_equal_texts_are_not_taken_for_a_collapse() -> None:
    same = captions(["a lion"] * 6, list(range(6)), 6)
    scores = (
        np.random.default_rng(0).standard_normal((6, 1)).repeat(6, axis=1)
    )  # one column per text, all equal
    report = evaluate_scores(scores, same, bootstrap=0)
    assert "--equal_texts" in report.warning
    assert "collapsed" not in report.warning
    other = captions([f"lion {n}" for n in range(6)], list(range(6)), 6)
    report = evaluate_scores(np.zeros((6, 6)), other, bootstrap=0)
    assert "collapsed" in report.warning
    assert "--equal_texts" not in report.warning
