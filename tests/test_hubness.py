"""Hubness re-scoring: the inverted softmax as its equation says, in float64, and as an option of evaluate."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import diptych, refused, training
from small import precomputed

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.evaluation import hubness
from diptych.evaluation.evaluate import evaluate
from diptych.evaluation.hubness import bank_of, inverted_softmax
from diptych.evaluation.prepared import PreparedScores
from diptych.evaluation.report import Report
from diptych.model.scores import EmbeddingScores, MatrixScores, MeanScores


def vectors(rng: np.random.Generator, count: int, dim: int = 3) -> np.ndarray:
    rows = rng.standard_normal((count, dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def captions(images: int, per_image: int) -> Captions:
    image_of = np.arange(images).repeat(per_image)
    texts = [f"text {n}" for n in range(len(image_of))]
    names = [f"i{n}" for n in range(images)]
    return Captions(
        ArrayStore(np.zeros((images, 1, 1), np.float32)), texts, image_of, names, ["test"] * images
    )


def oracle(
    queries: np.ndarray, gallery: np.ndarray, bank: np.ndarray, right: list[set[int]], beta: float
) -> float:
    """R@1 in percent by the equation: each probability is a loop over the bank."""
    hits = 0
    for query, own in zip(queries, right, strict=True):
        scores = []
        for item in gallery:
            below = sum(math.exp(beta * float(one @ item)) for one in bank)
            scores.append(math.exp(beta * float(query @ item)) / below)
        hits += int(np.argmax(scores)) in own
    return 100 * hits / len(queries)


@pytest.mark.parametrize("beta", [1.0, 20.0])
@pytest.mark.parametrize("chunk", [3, 1024])
def test_it_is_the_equation(beta: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubness, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    data = captions(9, 2)
    image = vectors(rng, 9)
    text = vectors(rng, 18) + 2 * image[data.image_of]
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    bank_image, bank_text = vectors(rng, 7), vectors(rng, 11)
    scores = EmbeddingScores(torch.from_numpy(image), torch.from_numpy(text))
    bank = EmbeddingScores(torch.from_numpy(bank_image), torch.from_numpy(bank_text))
    report = evaluate(inverted_softmax(PreparedScores(scores), bank, "train", beta=beta), data, bootstrap=0)
    texts_of = [set(np.flatnonzero(data.image_of == n).tolist()) for n in range(9)]
    images_of = [{int(n)} for n in data.image_of]
    found = report.metrics
    assert found["image_to_text_recall@1"] == pytest.approx(oracle(image, text, bank_image, texts_of, beta))
    assert found["text_to_image_recall@1"] == pytest.approx(oracle(text, image, bank_text, images_of, beta))
    exact = inverted_softmax(PreparedScores(scores), bank, "train", beta=beta).directions
    assert exact is not None
    tiles = [one.tile(slice(None), slice(None)).numpy() for one in exact]
    for tile, queries, axis in ((tiles[0], bank_image @ text.T, 1), (tiles[1], bank_text @ image.T, 0)):
        below = np.log(np.exp(beta * queries).sum(0)) / beta  # of each item
        assert np.abs(tile - (image @ text.T - np.expand_dims(below, 1 - axis))).max() < 1e-12
    assert report.card.described()["score"] == (
        f"dot, inverted softmax (β {beta:g}, bank train: 7 images, 11 texts)"
    )


def test_a_hub_no_longer_answers_everything() -> None:
    rng = np.random.default_rng(1)
    image = np.eye(8) + 0.3
    hub = image.mean(0) * 1.6
    image[0] = hub  # not of unit length: near to every text
    text = np.eye(8) + 0.3 + 0.01 * rng.standard_normal((8, 8))
    text[0] = hub
    data = captions(8, 1)
    scores = EmbeddingScores(torch.from_numpy(image), torch.from_numpy(text))
    plain = evaluate(scores, data, bootstrap=0).metrics["rsum"]
    again = evaluate(inverted_softmax(PreparedScores(scores), scores, "train"), data, bootstrap=0).metrics[
        "rsum"
    ]
    assert again > plain


def test_ensembles_are_rescored_and_pair_scores_are_not() -> None:
    rng = np.random.default_rng(2)
    members = [EmbeddingScores(*(torch.from_numpy(vectors(rng, n)) for n in (4, 8))) for _ in range(2)]
    mean = MeanScores(members)
    found = inverted_softmax(PreparedScores(mean), mean, "val").directions
    assert found is not None
    whole = torch.stack([one.tile(slice(None), slice(None)) for one in members]).mean(0)
    below = torch.logsumexp(20 * whole, 0) / 20  # images are the bank of the texts
    assert torch.allclose(found[0].tile(slice(None), slice(None)), whole - below)
    with pytest.raises(SettingsError, match="matrix"):
        inverted_softmax(PreparedScores(MatrixScores(np.eye(3))), mean, "val")
    with pytest.raises(SettingsError, match="-1"):
        inverted_softmax(PreparedScores(mean), mean, "val", beta=-1)


def test_a_large_bank_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    data = captions(30, 2)
    assert bank_of(data) is data
    monkeypatch.setattr(hubness, "IMAGES", 10)
    assert bank_of(data).image_ids == bank_of(data).image_ids
    assert len(bank_of(data).images) == 10
    assert len(bank_of(data).texts) == 20


def test_the_option_of_evaluate(tmp_path: Path) -> None:
    data = precomputed(tmp_path / "toy_precomp", train=24, dev=8)
    run, path = tmp_path / "run", tmp_path / "report.json"
    diptych(*training("vse-plus-plus", data, epochs=1), "--output_dir", run)
    diptych("evaluate", run, "--bootstrap=0", "--hubness=train", "--hubness_beta=5", "--output", path)
    said = Report.load(path).card.described()["score"]
    assert said == "dot, inverted softmax (β 5, bank train: 24 images, 120 texts)"
    assert "val" in refused("evaluate", run, "--hubness=dev")
    assert "--score_matrix" in refused(
        "evaluate", run, "--hubness=train", "--score_matrix", tmp_path / "s.npy"
    )
    assert "--hubness" in refused("evaluate", run, "--hubness=train", "--protocol=video")
    assert "--hubness_beta" in refused("evaluate", run, "--hubness_beta=5")
