"""SGR and SAF through the command line: train, evaluate alone and as an ensemble, resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import diptych, refused
from small import precomputed

from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.errors import SettingsError
from diptych.evaluation import score_matrix
from diptych.model.retriever import Retriever
from diptych.model.scores import PairScores
from diptych.recipes import RECIPES
from diptych.types import Batch, as_inputs

FLAGS = ["--dim", 16, "--similarity_dim", 8, "--batch_size", 12, "--min_count", 1, "--word_dim", 8]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("sgr", "saf"):
        diptych("train", kind, "--data", data, "--output_dir", folder / kind, "--epochs", 2, *FLAGS)
    return {kind: folder / kind for kind in ("sgr", "saf")}


def metrics(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def test_the_ensemble_is_the_mean_of_the_score_matrices(
    data: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    held_out = training_splits(open_captions(str(data)))[1]
    matrices = []
    for run in runs.values():
        scores = Retriever.from_pretrained(run).scores(held_out.images, held_out.texts)
        assert scores.kind == run.name
        matrices.append(scores.tile(slice(None), slice(None)))
        assert float(matrices[-1].min()) > 0
        assert float(matrices[-1].max()) < 1
    diptych("evaluate", runs["sgr"], runs["saf"], "--output", tmp_path / "both.json")
    from diptych.evaluation.retrieval import evaluate_scores

    expected = evaluate_scores(torch.stack(matrices).mean(0), held_out)
    found = json.dumps(metrics(tmp_path / "both.json"))
    assert f'"rsum": {expected.metrics["rsum"]}' in found


def test_a_region_too_many_is_refused(runs: dict[str, Path]) -> None:
    from diptych.errors import DataError

    model = Retriever.from_pretrained(runs["sgr"])
    with pytest.raises(DataError, match=r"\b9\b.*\b6\b"):
        model.encode_image([np.zeros((9, 16), np.float32)])


def test_a_text_encoder_without_words_is_refused(data: Path) -> None:
    captions = training_splits(open_captions(str(data)))[0]
    recipe = RECIPES["sgr"]
    with pytest.raises(SettingsError, match="--text_encoder"):
        recipe.build(recipe.settings(text_encoder="gru"), captions)  # type: ignore[call-arg]


def test_a_score_matrix_gives_the_same_report(runs: dict[str, Path], tmp_path: Path) -> None:
    diptych("evaluate", runs["sgr"], runs["saf"], "--output", tmp_path / "plain.json")
    for _ in range(2):  # computed, then read
        matrix = ["--score_matrix", tmp_path / "s.npy"]
        diptych("evaluate", runs["sgr"], runs["saf"], "--output", tmp_path / "stored.json", *matrix)
        assert rsum_of(tmp_path / "stored.json") == rsum_of(tmp_path / "plain.json")
    assert "s.npy" in refused("evaluate", runs["sgr"], "--score_matrix", tmp_path / "s.npy")


def test_half_precision_is_refined_without_a_file_too(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refine, errors = score_matrix._refine, []

    def watched(members: Any, matrix: Any, show_progress: bool) -> None:
        (rough,) = members
        exact = PairScores(rough.scorer, rough.images, rough.texts, rough.device, "no")
        expected = exact.tile(slice(None), slice(None)).numpy()
        errors.append(np.abs(matrix - expected).max())
        refine(members, matrix, show_progress)
        errors.append(np.abs(matrix - expected).max())

    monkeypatch.setattr(score_matrix, "_refine", watched)
    diptych("evaluate", runs["sgr"], "--compute_precision", "bf16", "--bootstrap", 0)
    before, after = errors
    assert after < 1e-6 < 1e-5 < before  # every pair is among the best of this small gallery
    diptych("evaluate", runs["sgr"], "--bootstrap", 0)
    assert len(errors) == 2  # float32 has nothing to refine


def test_a_dual_encoder_is_reranked_by_pair_scorers(
    data: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    quick = tmp_path / "quick"
    small = ["--dim", 16, "--batch_size", 12, "--min_count", 1, "--word_dim", 8]
    diptych("train", "vse-infinity", "--data", data, "--output_dir", quick, "--epochs", 1, *small)
    judged = ["--reranker", runs["sgr"], "--reranker", runs["saf"]]
    # with as many candidates as items the judges decide alone
    diptych("evaluate", quick, "--rerank", 100, *judged, "--output", tmp_path / "all.json")
    diptych("evaluate", runs["sgr"], runs["saf"], "--output", tmp_path / "both.json")
    assert rsum_of(tmp_path / "all.json") == pytest.approx(rsum_of(tmp_path / "both.json"))
    diptych("evaluate", quick, "--rerank", 3, *judged, "--output", tmp_path / "few.json")
    assert "--rerank" in refused("evaluate", quick, "--rerank", 3)
    assert "quick" in refused("evaluate", quick, "--rerank", 3, "--reranker", quick)


def rsum_of(path: Path) -> float:
    found = re.search(r'"rsum": ([\d.]+)', path.read_text("utf-8"))
    assert found is not None
    return float(found[1])


def test_speed_is_drawn_for_dual_encoders_pair_scorers_and_both(
    data: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    quick = tmp_path / "quick"
    small = ["--dim", 16, "--batch_size", 12, "--min_count", 1, "--word_dim", 8]
    diptych("train", "vse-infinity", "--data", data, "--output_dir", quick, "--epochs", 1, *small)
    flags = ["--most", 1000, "--count", 6, "--rerank", 3, "--output", tmp_path / "speed.png"]
    said = diptych("show", "speed", quick, runs["sgr"], runs["saf"], *flags).stdout
    lines = [line for line in said.splitlines() if line.startswith(("quick", "sgr", "saf"))]
    assert [re.split(r"\s{2,}", line)[0] for line in lines] == [
        "quick",
        "quick, top 3 by sgr + saf",
        "sgr",
        "saf",
    ]
    assert "6 images and 30 texts" in said
    for end in ("queries", "recall"):
        assert (tmp_path / f"speed-{end}.png").read_bytes()[:4] == b"\x89PNG"
    flags = ["--most", 1000, "--count", 6, "--patience", 1e-9, "--output", tmp_path / "quick.svg"]
    assert "extrapolated" in diptych("show", "speed", quick, *flags).stdout
    assert "speed.txt" in refused("show", "speed", quick, "--output", tmp_path / "speed.txt")


@pytest.mark.parametrize("kind", ["sgr", "saf"])
def test_soft_labels_reach_the_scorer_and_the_heads(kind: str, data: Path) -> None:
    captions = training_splits(open_captions(str(data)))[0]
    recipe = RECIPES[f"cusa-{kind}"]
    settings: Any = recipe.settings(dim=16, similarity_dim=8, min_count=1, word_dim=8)  # type: ignore[call-arg]
    assert (settings.csa, settings.usa) == ({"sgr": 0.6, "saf": 1.0}[kind], 0.75)
    assert settings.learning_rate * settings.final_factor == pytest.approx(1e-5)
    method = recipe.build(settings, captions)
    retriever = method.retriever.train()
    batch = Batch(
        as_inputs(retriever.image_input([captions.images[row] for row in range(6)])),
        as_inputs(retriever.text_input.prepare(captions.texts[:30:5]).collate(range(6))),
        torch.arange(6),
        torch.arange(0, 30, 5),
        {"teacher_image": torch.randn(6, 5), "teacher_text": torch.randn(6, 5)},
    )
    seen = retriever(batch)
    assert seen.scores.shape == (6, 6)
    # the heads read the global vectors
    torch.testing.assert_close(
        seen.views["uni"].image,
        F.normalize(retriever.branches["uni"].image_head(seen.image), dim=1),
        rtol=0,
        atol=1e-5,
    )
    terms = method.objective(seen, batch)
    soft = {name: value for name, value in terms.items() if "sa" in name}
    assert len(soft) == 2
    for value, reached in zip(soft.values(), ("scorer", "branches"), strict=True):
        retriever.zero_grad()
        value.backward(retain_graph=True)
        moved = {
            name.split(".")[0]
            for name, p in retriever.named_parameters()
            if p.grad is not None and p.grad.any()
        }
        assert reached in moved
        assert {"scorer", "branches"} - moved == {"scorer", "branches"} - {reached}
    bare = recipe.build(
        recipe.settings(dim=16, similarity_dim=8, min_count=1, word_dim=8, csa=0.0, usa=0.0), captions
    )  # type: ignore[call-arg]
    assert not bare.targets
    assert not bare.retriever.branches
