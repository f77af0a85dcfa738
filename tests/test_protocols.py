"""Protocols and evaluation: folds, sizes, each image encoded once, ensembles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import precomputed
from torch import Tensor

from diptych.aggregators import GPO
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.regions import Regions
from diptych.errors import DataError, SettingsError
from diptych.evaluation.evaluate import evaluate
from diptych.evaluation.metrics import retrieval_metrics
from diptych.evaluation.protocols import EvaluationProtocol, protocol_named
from diptych.evaluation.retrieval import evaluate_scores
from diptych.model.retriever import Retriever, Tower
from diptych.model.scores import EmbeddingScores, Scores, vector_scores
from diptych.registries import PROTOCOLS


class Numbers:
    """An image store whose image i is the number i; counts how often each is read."""

    def __init__(self, count: int) -> None:
        self.reads = np.zeros(count, dtype=int)

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> np.ndarray:
        self.reads[index] += 1
        return np.array([index])

    def content_key(self, index: int) -> str:
        return str(index)


class Dice:
    """A model whose vectors are random but fixed by the item; counts what it encodes."""

    def __init__(self, seed: int, noise: float = 1.0) -> None:
        self.seed, self.noise = seed, noise
        self.images_encoded: list[int] = []
        self.texts_encoded: list[str] = []

    def encode_image(self, images: Numbers, *, batch_size: int = 64, show_progress: bool = False) -> Tensor:
        rows = [int(images[i][0]) for i in range(len(images))]
        self.images_encoded += rows
        return self._base(max(rows) + 1)[rows]

    def encode_text(
        self, texts: Sequence[str], *, batch_size: int = 256, show_progress: bool = False
    ) -> Tensor:
        self.texts_encoded += list(texts)
        noise = torch.randn(len(texts), 8, generator=torch.Generator().manual_seed(self.seed + 1))
        owners = [int(text.split()[0]) for text in texts]
        return torch.nn.functional.normalize(self._base(max(owners) + 1)[owners] + self.noise * noise, dim=1)

    def scores(self, images: Numbers, texts: Sequence[str], **options: Any) -> Scores:
        return vector_scores(self, images, texts, **options)

    def fingerprint(self) -> str:
        return f"dice{self.seed}"

    def _base(self, count: int) -> Tensor:
        numbers = torch.randn(count, 8, generator=torch.Generator().manual_seed(self.seed))
        return torch.nn.functional.normalize(numbers, dim=1)


def data(images: int, per_image: int = 5, split: str = "test") -> Captions:
    image_of = np.repeat(np.arange(images), per_image)
    texts = [f"{image} text {number}" for number, image in enumerate(image_of)]
    names = [f"image{i}" for i in range(images)]
    return Captions(Numbers(images), texts, image_of, names, [split] * images, name="numbers")


def test_each_image_and_text_is_encoded_once() -> None:
    model, captions = Dice(0), data(30)
    evaluate(model, captions, bootstrap=0)
    assert model.images_encoded == list(range(30))
    assert model.texts_encoded == list(captions.texts)


def test_evaluate_is_the_metrics_of_the_product() -> None:
    model, captions = Dice(0), data(30)
    report = evaluate(model, captions, bootstrap=0)
    scores = model.encode_image(Numbers(30)) @ model.encode_text(captions.texts).T
    assert report.metrics == pytest.approx(retrieval_metrics(scores, captions.image_of))
    assert report.card.images == 30
    assert report.card.texts == 150
    assert report.card.texts_per_image == (5, 5.0, 5)
    assert report.card.data_hash == captions.fingerprint()
    assert report.card.model == "dice0"
    assert (report.card.split, report.card.score, report.card.ties) == ("test", "dot", "index")
    assert set(report.speed) == {
        "images_per_second",
        "texts_per_second",
        "thousand_pairs_per_second",
        "seconds",
    }


class Prepared(list):  # type: ignore[type-arg]
    """Texts as a store: a list that also has sizes and collates."""

    def size(self, index: int) -> int:
        return len(self[index])

    def collate(self, rows: Sequence[int], rng: np.random.Generator | None = None) -> None:
        raise AssertionError("the double encodes strings")


def test_prepared_texts_take_the_place_of_strings() -> None:
    captions = data(10)
    plain = evaluate(Dice(0), captions, bootstrap=0)
    model = Dice(0)
    prepared = evaluate(model, captions, text_store=Prepared(captions.texts), bootstrap=0)
    assert prepared.metrics == plain.metrics
    with pytest.raises(DataError, match=r"\b3\b.*\b50\b"):
        evaluate(model, captions, text_store=Prepared(captions.texts[:3]))


def test_an_ensemble_ranks_by_the_mean_of_the_scores() -> None:
    captions, models = data(40), [Dice(0), Dice(1), Dice(2)]
    report = evaluate(models, captions, bootstrap=0)
    scores = [m.encode_image(Numbers(40)) @ m.encode_text(captions.texts).T for m in models]
    assert report.metrics == pytest.approx(retrieval_metrics(torch.stack(scores).mean(0), captions.image_of))
    assert report.card.model == "dice0 + dice1 + dice2"
    assert report.card.score == "dot"
    assert report.metrics["rsum"] > evaluate(models[0], captions, bootstrap=0).metrics["rsum"]
    with pytest.raises(SettingsError, match=r"\b3\b"):
        evaluate(models, captions, text_store=Prepared(captions.texts))
    with pytest.raises(SettingsError):
        evaluate([], captions)


def test_five_folds_are_five_evaluations_averaged() -> None:
    rng = torch.Generator().manual_seed(0)
    image_of = torch.arange(25000) // 5
    image = torch.randn(5000, 8, generator=rng)
    text = image[image_of] + 0.5 * torch.randn(25000, 8, generator=rng)
    report = evaluate_scores(EmbeddingScores(image, text), image_of.numpy(), protocol="coco-1k", bootstrap=50)
    folds = []
    for k in range(5):
        scores = image[1000 * k : 1000 * (k + 1)] @ text[5000 * k : 5000 * (k + 1)].T
        folds.append(retrieval_metrics(scores, image_of[:5000]))
    assert report.metrics == pytest.approx({name: np.mean([f[name] for f in folds]) for name in folds[0]})
    assert report.metrics["rsum"] == pytest.approx(
        sum(v for n, v in report.metrics.items() if "recall@" in n)
    )
    assert report.card.folds == 5
    assert report.intervals["rsum"][0] < report.metrics["rsum"] < report.intervals["rsum"][1]


def test_folds_follow_the_images_when_texts_are_shuffled() -> None:
    rng = np.random.default_rng(1)
    image_of = rng.permutation(np.repeat(np.arange(8), 3))
    scores = rng.standard_normal((8, 24))
    report = evaluate_scores(scores, image_of, protocol=EvaluationProtocol("two", folds=2), bootstrap=0)
    folds = []
    for low in (0, 4):
        texts = np.flatnonzero((image_of >= low) & (image_of < low + 4))
        folds.append(retrieval_metrics(scores[low : low + 4][:, texts], image_of[texts] - low))
    assert report.metrics == pytest.approx({name: np.mean([f[name] for f in folds]) for name in folds[0]})


def test_tied_queries_are_counted_over_all_folds() -> None:
    report = evaluate_scores(
        np.ones((4, 8)), np.arange(8) // 2, protocol=EvaluationProtocol("two", folds=2), bootstrap=0
    )
    assert report.card.tied_queries == {"image_to_text": 4, "text_to_image": 8}
    assert "tied" in report.warning


@pytest.mark.parametrize("name", ["flickr30k", "coco-5k", "coco-1k"])
def test_data_of_another_size_are_refused_before_encoding(name: str) -> None:
    model = Dice(0)
    with pytest.raises(DataError, match=rf"{name}.*\b12\b"):
        evaluate(model, data(12), protocol=name)
    assert not model.images_encoded


def test_another_number_of_texts_is_refused_with_the_correction() -> None:
    captions = data(1000, per_image=6)
    with pytest.raises(DataError, match=r"\b5\b"):
        evaluate(Dice(0), captions, protocol="flickr30k")


def test_protocols_by_name() -> None:
    found = [protocol_named(name) for name in ("plain", "flickr30k", "coco-5k", "coco-1k")]
    assert {p.name: (p.images, p.texts_per_image, p.folds) for p in found} == {
        "plain": (None, None, 1),
        "flickr30k": (1000, 5, 1),
        "coco-5k": (5000, 5, 1),
        "coco-1k": (5000, 5, 5),
    }
    with pytest.raises(SettingsError, match="coco-5k"):
        protocol_named("coco5k")
    with pytest.raises(SettingsError) as refusal:
        protocol_named("quux")
    assert all(name in str(refusal.value) for name in PROTOCOLS)
    with pytest.raises(SettingsError, match="video"):
        protocol_named("video")
    with pytest.raises(DataError, match=r"\b3\b"):
        EvaluationProtocol("odd", folds=3).check(np.arange(4), 4)


def test_scores_are_reported_with_captions_or_with_a_pairing() -> None:
    captions = data(10)
    scores = np.random.default_rng(0).standard_normal((10, 50))
    with_captions = evaluate_scores(scores, captions, model="m", bootstrap=0)
    bare = evaluate_scores(scores, captions.image_of, bootstrap=0)
    assert with_captions.metrics == bare.metrics
    assert (with_captions.card.data, with_captions.card.model) == ("numbers", "m")
    assert (bare.card.data, bare.card.model) == ("scores", "unknown")
    with pytest.raises(DataError, match=r"\b50\b"):
        evaluate_scores(scores[:9], captions)


def test_uneven_texts_per_image_are_on_the_card() -> None:
    report = evaluate_scores(np.eye(3)[:, [0, 0, 1]], [0, 0, 1], bootstrap=0)
    assert report.card.texts_per_image == (0, 1.0, 2)
    assert report.card.described()["texts per image"] == "0 to 2 (mean 1.00)"


def test_settings_are_checked_before_any_work() -> None:
    model = Dice(0)
    for wrong in ({"ties": "none"}, {"protocol": "mine"}, {"bootstrap": -1}, {"judgements": ["mine"]}):
        with pytest.raises(SettingsError):
            evaluate(model, data(5), **wrong)  # type: ignore[arg-type]
    assert not model.images_encoded


def test_scoring_may_run_elsewhere_than_encoding() -> None:
    assert evaluate(Dice(0), data(5), device="cpu", bootstrap=0).metrics["rsum"] > 0
    scores = EmbeddingScores(torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4))
    assert scores.tile(slice(None), slice(None)).dtype == torch.float64


def test_a_real_retriever_reads_each_image_once(tmp_path: Path) -> None:
    captions = open_captions(precomputed(tmp_path / "data"), split="val")
    words = build_vocabulary(captions.texts, min_count=1)
    model = Retriever(
        Tower(Regions(16, 8), GPO()),
        Tower(BiGRU(len(words), 8, 8), GPO()),
        RegionInput(16),
        WordInput(words, augment=0),
    )
    seen: list[int] = []
    model.image.encoder.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0].values)))
    report = evaluate(
        model, captions, image_batch_size=4, protocol=EvaluationProtocol("halves", folds=2), bootstrap=10
    )
    assert seen == [4, 4, 2]
    assert report.card.model == model.fingerprint()
    assert (report.card.images, report.card.texts, report.card.split) == (10, 50, "val")
