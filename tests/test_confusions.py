"""The failure cases of label-wise retrieval, counted by confused label pair."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.errors import SettingsError
from diptych.evaluation.label_retrieval import find_confusions

NAMES = ["food", "fruit", "vegetable", "ball", "spoon"]
LABELS = np.array(
    [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=np.float32
)  # banana, carrot, ball, spoon


def test_pairs_are_counted_by_kind_and_direction():
    scores = np.eye(4, dtype=np.float32)
    scores[0, 1] = 2  # the banana finds the carrot first
    scores[3, 2] = 2  # the spoon finds the ball first
    found = find_confusions(scores, LABELS, LABELS, NAMES, {"image_to_text": 1, "text_to_image": 1})
    kinds = {(one.kind, one.missed, one.found): one for one in found.confusions}
    assert set(kinds) == {
        ("super-class", "fruit", "vegetable"),
        ("super-class", "vegetable", "fruit"),
        ("semantic", "spoon", "ball"),
        ("semantic", "ball", "spoon"),
    }
    assert kinds["super-class", "fruit", "vegetable"].counts == {"image_to_text": 1, "text_to_image": 0}
    assert kinds["super-class", "fruit", "vegetable"].examples == [("image_to_text", 0, 1)]
    assert kinds["super-class", "vegetable", "fruit"].examples == [("text_to_image", 1, 0)]
    assert found.retrieved == {"image_to_text": 4, "text_to_image": 4}
    assert found.failed == {"image_to_text": 2, "text_to_image": 2}


def test_the_counts_equal_a_loop_and_examples_are_bounded():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((20, 30)).astype(np.float32)
    images, texts = (rng.random((count, 5)) < 0.4 for count in (20, 30))
    found = find_confusions(scores, images, texts, NAMES, examples=2)
    expected: dict[tuple[str, str, str], int] = {}
    for rows, asked, gallery, depth in ((scores, images, texts, 5), (scores.T, texts, images, 3)):
        for query, row in enumerate(rows):
            for item in np.argsort(-row, kind="stable")[:depth]:
                shared = any(asked[query] & gallery[item])
                for a in range(5):
                    for b in range(5):
                        if (
                            asked[query, a]
                            and not gallery[item, a]
                            and gallery[item, b]
                            and not asked[query, b]
                        ):
                            key = ("super-class" if shared else "semantic", NAMES[a], NAMES[b])
                            expected[key] = expected.get(key, 0) + 1
    assert {(one.kind, one.missed, one.found): one.count for one in found.confusions} == expected
    assert [one.count for one in found.confusions] == sorted(expected.values(), reverse=True)
    assert max(len(one.examples) for one in found.confusions) == 2


def test_a_right_answer_and_a_poorer_one_are_no_confusion():
    labels = np.array([[1, 1, 0], [1, 0, 0]])  # the second item lacks a label and has none in its place
    found = find_confusions(np.ones((2, 2)), labels, labels, ["a", "b", "c"])
    assert found.confusions == []
    assert found.failed == {"image_to_text": 0, "text_to_image": 0}
    with pytest.raises(SettingsError):
        find_confusions(
            np.ones((2, 2)), labels, labels, ["a", "b", "c"], {"image_to_text": 0, "text_to_image": 1}
        )
