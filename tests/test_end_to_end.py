"""From data to search through the command line: train, evaluate, index, search, compare, extract, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import diptych, process, refused, training, wait_for_steps
from safetensors.torch import load_file
from small import pictures, precomputed

from diptych.data.formats import open_captions
from diptych.evaluation.compare import compare
from diptych.evaluation.report import Report
from diptych.evaluation.retrieval import evaluate_scores
from diptych.index.engines.opening import open_index
from diptych.model.retriever import Retriever
from diptych.training.log import read_log

RECIPES = ["vse-infinity", "vse-plus-plus", "coder"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", train=30, dev=10)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for recipe in RECIPES:
        said = diptych(*training(recipe, data, learning_rate=5e-3), "--output_dir", folder / recipe).stdout
        assert f"diptych evaluate {folder / recipe}" in said
        assert f"{folder / recipe / 'best'}" in said
    return {recipe: folder / recipe for recipe in RECIPES}


def scores_of(run: Path, data: Path, split: str = "val") -> torch.Tensor:
    model, captions = Retriever.from_pretrained(run), open_captions(data, split=split)
    return model.similarity(model.encode_image(captions.images), model.encode_text(captions.texts))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_report_is_that_of_the_best_epoch(
    recipe: str, runs: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    said = diptych("evaluate", runs[recipe], "--output", tmp_path / "report.json").stdout
    report = Report.load(tmp_path / "report.json")
    best = max(line["validation_rsum"] for line in read_log(runs[recipe] / "log.jsonl") if "best" in line)
    assert report.metrics["rsum"] == pytest.approx(best)
    assert f"{best:.1f}" in said
    card = report.card
    assert (card.split, card.images, card.texts, card.folds, card.ties) == ("val", 10, 50, 1, "index")
    assert card.model == Retriever.from_pretrained(runs[recipe]).fingerprint()
    assert card.model in said
    assert card.data_hash in said
    assert set(report.speed) == {
        "from_features",
        "images_per_second",
        "texts_per_second",
        "thousand_pairs_per_second",
        "seconds",
    }
    low, high = report.intervals["rsum"]
    assert low <= report.metrics["rsum"] <= high
    by_hand = evaluate_scores(scores_of(runs[recipe], data), open_captions(data, split="val"), bootstrap=0)
    assert by_hand.metrics == pytest.approx(dict(report.metrics))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_index_holds_the_model_s_own_vectors(
    recipe: str, runs: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    place = tmp_path / "toy.index"
    said = diptych("index", runs[recipe], data, "--index", place).stdout
    assert "40 images, 200 texts (40 added" in said
    model, captions = Retriever.from_pretrained(runs[recipe]), open_captions(data)
    images, texts = model.encode_image(captions.images).numpy(), model.encode_text(captions.texts).numpy()
    with open_index(place) as index:
        assert index.info.fingerprint == model.fingerprint()
        assert index.info.dimension == model.dim
        np.testing.assert_allclose(index.vectors(captions.image_ids), images, atol=1e-6)
        own = [f"{captions.image_ids[image]}#text{n % 5}" for n, image in enumerate(captions.image_of)]
        np.testing.assert_allclose(index.vectors(own), texts, atol=1e-6)
    query = captions.texts[7]
    found = json.loads(diptych("search", place, f'"{query}"', "-k", 5, "--all", "--json").stdout)["hits"]
    scores = (model.encode_text(query) @ torch.from_numpy(images).T)[0]
    expected = scores.topk(5)
    assert [hit["score"] for hit in found] == pytest.approx(expected.values.tolist(), abs=1e-5)
    best = captions.image_ids[int(expected.indices[0])]
    assert found[0]["id"] == best
    again = diptych("index", runs[recipe], data, "--index", place).stdout
    assert "0 added, 0 updated, 40 unchanged" in again


def test_an_ensemble_is_the_mean_of_the_scores(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    pair = [runs["vse-infinity"], runs["coder"]]
    diptych("evaluate", *pair, "--output", tmp_path / "both.json", "--bootstrap", 0)
    both = Report.load(tmp_path / "both.json")
    mean = torch.stack([scores_of(run, data) for run in pair]).mean(dim=0)
    expected = evaluate_scores(mean, open_captions(data, split="val"), bootstrap=0)
    assert dict(both.metrics) == pytest.approx(dict(expected.metrics))
    assert all(Retriever.from_pretrained(run).fingerprint() in both.card.model for run in pair)


def test_two_reports_side_by_side(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    diptych("evaluate", runs["vse-infinity"], "--output", a)
    diptych("evaluate", runs["vse-plus-plus"], "--output", b)
    diptych("evaluate", runs["vse-plus-plus"], "--split", "train", "--output", c)
    lines = diptych("compare", a, b, "--draws", 500).stdout.splitlines()
    assert lines[0].split() == ["metric", "vse-infinity", "vse-plus-plus", "difference", "p"]  # by folder
    rsum = next(line for line in lines if line.startswith("rsum"))
    change = Report.load(b).metrics["rsum"] - Report.load(a).metrics["rsum"]
    found = compare(Report.load(a), Report.load(b), draws=500).rows
    told = next(row.queries for row in found if row.metric == "rsum")
    assert told is not None
    assert f"{change:+.1f} ({told.low:+.1f} to {told.high:+.1f})" in rsum
    assert "split" in refused("compare", a, c)
    assert (
        diptych("compare", runs["vse-infinity"], runs["vse-plus-plus"], "--draws", 500).stdout.splitlines()
        == lines
    )


def test_several_seeds_on_each_side(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    paths, folders = [tmp_path / f"{name}.json" for name in ("a1", "a2", "b1", "b2")], []
    for recipe in ("vse-infinity", "vse-plus-plus"):
        folders += [runs[recipe], tmp_path / recipe]
        diptych(*training(recipe, data, learning_rate=5e-3, seed=1), "--output_dir", folders[-1])
    for path, folder in zip(paths, folders, strict=True):
        diptych("evaluate", folder, "--output", path, "--bootstrap", 0)
    said = diptych("compare", *paths[:2], "--with", *paths[2:], "--draws", 200).stdout
    assert "(2 seeds)" in said
    assert "other seeds" in said
    assert f"{folders[0]}, {folders[1]}" in said
    reports = [Report.load(path) for path in paths]
    row = next(line for line in said.splitlines() if line.startswith("rsum")).split()
    assert float(row[1]) == pytest.approx(sum(one.metrics["rsum"] for one in reports[:2]) / 2, abs=0.06)
    assert "a1.json" in refused("compare", paths[0], "--with", paths[0])
    assert "--with" in refused("compare", paths[0], "--with")


def test_pictures_are_trained_on_indexed_and_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    photos, run, place = tmp_path / "photos", tmp_path / "run", tmp_path / "photos.index"
    for number, path in enumerate(pictures(photos, 12)):
        path.with_suffix(".txt").write_text(f"picture {number} of a dog\nthe dog {number}\n", "utf-8")
    diptych(*training("vse-infinity", photos, image_size=64, batch_size=4, epochs=1), "--output_dir", run)
    assert list((tmp_path / "cache").rglob("*.f16"))  # the frozen backbone ran once
    diptych("index", run, photos)
    picture = photos / "picture3.png"
    found = diptych("search", place, picture, "-k", 3, "--all", "--paths").stdout.splitlines()
    assert len(found) == 3
    assert Path(found[0]).resolve() == picture
    texts = json.loads(diptych("search", place, picture, "--kind", "text", "-k", 4, "--all", "--json").stdout)
    assert [hit["kind"] for hit in texts["hits"]] == ["text"] * 4
    model, captions = Retriever.from_pretrained(run), open_captions(photos)
    scores = (model.encode_image(picture) @ model.encode_text(captions.texts).T)[0]
    assert texts["hits"][0]["score"] == pytest.approx(float(scores.max()), abs=1e-5)


def test_extracted_features_are_a_data_set(tmp_path: Path) -> None:
    photos, features, run = tmp_path / "photos", tmp_path / "features", tmp_path / "run"
    for number, path in enumerate(pictures(photos, 12)):
        path.with_suffix(".txt").write_text(f"picture {number}\nthe dog {number}\n", "utf-8")
    (photos / "broken.png").write_bytes(b"no picture")
    arguments = ("extract", photos, "--output_dir", features, "--image_size", 64)
    said = diptych(*arguments).stdout
    assert "broken.png" in said
    array = np.load(features / "train_ims.npy", mmap_mode="r")
    assert (array.dtype, len(array)) == (np.float16, 12)
    written = (features / "train_ims.npy").stat().st_mtime_ns
    diptych(*arguments)
    assert (features / "train_ims.npy").stat().st_mtime_ns == written  # a second call has nothing to do
    assert "ok: 0 errors" in diptych("data", "check", features).stdout
    diptych(
        *training("vse-infinity", features, batch_size=4, epochs=1, image_encoder="grid"),
        "--output_dir",
        run,
    )
    diptych("evaluate", run)


def test_data_check_says_what_is_wrong_and_ends_so(data: Path, tmp_path: Path) -> None:
    said = diptych("data", "check", data).stdout
    assert "precomputed" in said
    assert "ok: 0 errors" in said
    bad = precomputed(tmp_path / "bad_precomp")
    (bad / "train_ims.npy").unlink()
    with (bad / "dev_caps.txt").open("ab") as file:
        file.write(b"caf\xe9\n")
    said = diptych("data", "check", bad, status=1).stdout
    assert "train_ims.npy" in said
    assert "dev_caps.txt:51: " in said
    assert "UTF-8" in said
    assert "precomputed" in diptych("data", "formats").stdout


@pytest.mark.parametrize("recipe", ["vse-infinity", "coder"])
def test_mixed_precision_trains_close_to_full(recipe: str, data: Path, tmp_path: Path) -> None:
    for precision in ("no", "bf16"):  # two epochs: prototypes take part in the second
        diptych(*training(recipe, data, precision=precision), "--output_dir", tmp_path / precision)
    full, mixed = ([loss for _, loss in losses(tmp_path / precision)] for precision in ("no", "bf16"))
    assert mixed != full
    assert mixed == pytest.approx(full, rel=0.2)


# --- interrupted runs


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_log(run / "log.jsonl") if "loss" in line]


def test_coder_goes_on_bit_for_bit_after_kill(data: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    arguments = training(
        "coder", data, epochs=4, save_steps=5
    )  # 12 steps an epoch, prototypes from the second
    diptych(*arguments, "--output_dir", whole)

    killed = process(*arguments, "--output_dir", broken)
    wait_for_steps(broken, 17)
    killed.kill()
    killed.communicate()
    at = json.loads((broken / "last" / "progress.json").read_text())["step"]
    assert at <= 38, "killed too late for ten more steps"

    diptych("train", "coder", "--resume_from_checkpoint", broken)  # knows its data and settings
    assert losses(broken) == losses(whole)
    assert len(losses(whole)) == 48
    for name in ("retriever", "twin", "objective", "optimizer", "random-0"):
        a, b = (load_file(run / "last" / f"{name}.safetensors") for run in (whole, broken))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    state: dict[str, Any] = load_file(whole / "last" / "objective.safetensors")
    assert any("queue" in key for key in state)
    assert any("centroids" in key for key in state)


def test_a_run_killed_before_its_first_save_starts_anew(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    diptych(*training("vse-infinity", data, epochs=1), "--output_dir", run)
    expected = losses(run)
    for path in (run / "last").iterdir():
        path.unlink()
    (run / "last").rmdir()
    diptych(*training("vse-infinity", data, epochs=1), "--output_dir", run)
    assert losses(run) == expected
