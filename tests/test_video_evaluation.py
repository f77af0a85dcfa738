"""Video–text retrieval: the gallery of different texts, the plain one beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.evaluation.metrics import KS
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Report
from diptych.evaluation.video import VideoRetrieval, dedupe_captions
from diptych.model.scores import EmbeddingScores

TEXTS = [["a", "b", "a"], ["b", "c"], ["d"], ["a", "e", "f"]]  # "a" thrice, of two videos; "b" of two


def made() -> Captions:
    texts = [text for own in TEXTS for text in own]
    image_of = np.repeat(np.arange(4), [len(own) for own in TEXTS])
    store = ArrayStore(np.zeros((4, 2), np.float32))
    return Captions(store, texts, image_of, [f"v{n}" for n in range(4)], ["test"] * 4, name="videos")


class Vectors:
    """A model whose texts of one string have one vector."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.video = rng.normal(size=(4, 3)).astype(np.float32)
        self.text = {text: rng.normal(size=3).astype(np.float32) for own in TEXTS for text in own}

    def matrix(self, texts: list[str]) -> Any:
        return self.video @ np.stack([self.text[text] for text in texts]).T

    def scores(self, images: Any, texts: Any, *, show_progress: bool = False) -> EmbeddingScores:
        rows = np.stack([self.text[text] for text in texts])
        return EmbeddingScores(torch.from_numpy(self.video), torch.from_numpy(rows))

    def fingerprint(self) -> str:
        return "vectors"


def hgr(model: Vectors, captions: Captions) -> dict[str, float]:
    """HGR's rule as loops: unique strings, the best rank of any right one."""
    unique = list(dict.fromkeys(captions.texts))
    matrix = model.matrix(unique)
    ranks: dict[str, list[int]] = {"image_to_text": [], "text_to_image": []}
    for video, own in enumerate(TEXTS):
        order = sorted(range(len(unique)), key=lambda n: -matrix[video, n])
        ranks["image_to_text"].append(min(order.index(unique.index(text)) for text in own))
    for n, text in enumerate(unique):
        order = sorted(range(4), key=lambda v: -matrix[v, n])
        ranks["text_to_image"].append(min(order.index(v) for v, own in enumerate(TEXTS) if text in own))
    return {
        f"{name}_recall@{k}": 100 * float(np.mean([rank < k for rank in found]))
        for name, found in ranks.items()
        for k in KS
    }


def test_each_string_stands_once_with_every_video_that_lists_it() -> None:
    kept = dedupe_captions(made())
    assert [made().texts[row] for row in kept.rows] == ["a", "b", "c", "d", "e", "f"]
    pairs = set(zip(kept.image_of.tolist(), kept.text_of.tolist(), strict=True))
    assert pairs == {(0, 0), (0, 1), (1, 1), (1, 2), (2, 3), (3, 0), (3, 4), (3, 5)}
    assert len(kept.image_of) == len(pairs)


@pytest.mark.parametrize("seed", range(5))
def test_recalls_are_those_of_the_rule_and_of_all_texts(seed: int) -> None:
    model, captions = Vectors(seed), made()
    data = Prepared(captions, captions.texts)  # type: ignore[arg-type]
    group = VideoRetrieval(bootstrap=50)(model, data)  # type: ignore[arg-type]
    for name, value in hgr(model, captions).items():
        assert group.metrics[name.replace("image", "video")] == pytest.approx(value)
    plain = VideoRetrieval(dedupe_captions=False)(model, data)  # type: ignore[arg-type]
    for name, value in plain.metrics.items():
        assert group.metrics[f"all_texts_{name}"] == value
    assert group.primary == "video_rsum"
    low, high = group.intervals["video_rsum"]
    assert low <= group.metrics["video_rsum"] <= high
    assert group.card.protocol_fields()["texts in the gallery"] == 6
    shown = Report((group,)).render()
    assert "different texts" in shown
    assert "all texts" in shown
    assert "video → text" in shown


def test_a_wrong_tie_rule_is_refused() -> None:
    data = Prepared(made(), made().texts)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="best"):
        VideoRetrieval(ties="best")(Vectors(0), data)  # type: ignore[arg-type]
