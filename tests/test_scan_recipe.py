"""SCAN through the command line: both directions, and their ensemble."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import diptych, refused
from small import precomputed

from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.evaluation.retrieval import evaluate_scores
from diptych.interaction.scan import SCAN
from diptych.model.retriever import Retriever
from diptych.recipes import RECIPES
from diptych.recipes.scan import Settings, scorer
from diptych.settings import from_json
from diptych.tables import papers, preset, tables_of

FLAGS = ["--dim", 16, "--batch_size", 12, "--min_count", 1, "--word_dim", 8, "--epochs", 2]
FLAGS += ["--all_negatives_epochs", 1, "--learning_rate", 0.01]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for direction in ("text", "image"):
        where = ["--data", data, "--output_dir", folder / direction]
        diptych("train", "scan", *where, "--direction", direction, *FLAGS)
    return [folder / "text", folder / "image"]


def test_the_ensemble_is_the_mean_of_both_directions(data: Path, runs: list[Path], tmp_path: Path) -> None:
    held_out = training_splits(open_captions(str(data)))[1]
    matrices = []
    for run in runs:
        scores = Retriever.from_pretrained(run).scores(held_out.images, held_out.texts)
        assert scores.kind == "scan"
        matrices.append(scores.tile(slice(None), slice(None)))
    assert not torch.allclose(*matrices)
    diptych("evaluate", *runs, "--output", tmp_path / "both.json")
    expected = evaluate_scores(torch.stack(matrices).mean(0), held_out)
    assert f'"rsum": {expected.metrics["rsum"]}' in json.dumps(
        json.loads((tmp_path / "both.json").read_text())
    )
    half = ["--compute_precision", "bf16", "--bootstrap", 0, "--score_matrix", tmp_path / "s.npy"]
    diptych("evaluate", *runs, *half, "--output", tmp_path / "half.json")  # refined where halves decide
    assert f'"rsum": {expected.metrics["rsum"]}' in (tmp_path / "half.json").read_text()


@pytest.mark.parametrize(
    ("direction", "expected"), [("text", (9.0, "mean", 6.0)), ("image", (4.0, "lse", 5.0))]
)
def test_each_direction_has_its_published_numbers(
    data: Path, direction: str, expected: tuple[object]
) -> None:
    captions = training_splits(open_captions(str(data)))[0]
    recipe = RECIPES["scan"]
    small = {"dim": 16, "min_count": 1, "word_dim": 8, "direction": direction}
    scorer = recipe.build(recipe.settings(**small), captions).retriever.scorer
    assert isinstance(scorer, SCAN)
    assert (scorer.sharpness, scorer.pooling, scorer.lse_sharpness) == expected
    given = {"sharpness": 2.0, "pooling": "lse", "lse_sharpness": 20.0}
    scorer = recipe.build(recipe.settings(**small, **given), captions).retriever.scorer
    assert isinstance(scorer, SCAN)
    assert (scorer.sharpness, scorer.pooling, scorer.lse_sharpness) == (2.0, "lse", 20.0)


def test_rows_of_the_tables_have_the_numbers_of_their_data() -> None:
    """Its page of code sharpens COCO's relevances by 20 where regions attend, Flickr30K's by 5."""
    found = set()
    for row in (row for paper in papers() for table in tables_of(paper).values() for row in table.rows):
        if row.recipe != "scan" or not row.preset:
            continue
        for data in ("f30k", "coco"):
            values = {**preset("scan", row.preset.format(data=data)), **row.switches}
            settings: Settings = from_json(Settings, values)
            made = scorer(settings)
            found.add((row.name, data, made.pooling, made.lse_sharpness, settings.epochs))
    assert found == {
        ("SCAN, text", "f30k", "mean", 6.0, 30),
        ("SCAN, text", "coco", "mean", 6.0, 20),
        ("SCAN, image", "f30k", "lse", 5.0, 30),
        ("SCAN, image", "coco", "lse", 20.0, 20),
    }


def test_what_scan_cannot_read_is_said(data: Path, tmp_path: Path) -> None:
    run = ["--data", data, "--output_dir", tmp_path / "run"]
    assert "--text_encoder gru" in refused("train", "scan", *run, "--text_encoder", "gru")
    assert "--direction" in refused("train", "scan", *run, "--direction", "both")
