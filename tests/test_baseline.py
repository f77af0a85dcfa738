"""Every run says how ridge regression on the same features does, or why that is not known; and what it begins with."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import diptych, training
from dual_folders import clip_folder
from PIL import Image
from small import bert_folder, photos, precomputed

from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.recipes import RECIPES
from diptych.training.baseline import FILE, Baseline, ridge_baseline, verdict, why_not
from diptych.training.checkpoint import Progress
from diptych.training.prepare import prepare
from diptych.training.validation import Clock, spoken


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", train=40, dev=12)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("models") / "bert")


def test_a_frozen_run_is_set_beside_ridge(data: Path, bert: Path, tmp_path: Path) -> None:
    run = training("vse-infinity", data, text_encoder=str(bert), epochs=1)
    said = diptych(*run, "--no_train_text", "--output_dir", tmp_path / "run").stdout
    ridge = diptych(
        "train", "ridge", "--data", data, "--text_encoder", bert, "--output_dir", tmp_path / "ridge"
    ).stdout
    found = Baseline.load(tmp_path / "run")
    assert found is not None
    assert found.rsum is not None
    assert f"ridge regression on the same features: {found.rsum:.1f}; this run" in said
    assert f"best validation RSUM {found.rsum:.1f} (closed form)" in ridge  # the same number
    assert f"data: {data}: 40 images with 200 texts to train on, 12 images with 60 texts to validate" in said
    assert "model: vse-infinity, images by Regions, texts by TransformerText (frozen)" in said
    assert "parameters: " in said
    assert "device: cpu" in said
    assert "epoch 1: loss " in said
    (tmp_path / "run" / FILE).write_text('{"rsum": 1.5, "reason": ""}')  # found, not computed again
    again = diptych(
        "train", "vse-infinity", "--resume_from_checkpoint", tmp_path / "run", "--epochs", 2
    ).stdout
    assert "ridge regression on the same features: 1.5; this run is better by" in again


def test_frozen_encoders_are_not_called_trained(tmp_path: Path) -> None:
    model, data = clip_folder(tmp_path / "clip"), photos(tmp_path / "photos")
    frozen = ("--model", model, "--tune", "heads", "--cross_head", "--epochs", 1, "--batch_size", 6)
    said = diptych("train", "clip", "--data", data, *frozen, "--output_dir", tmp_path / "run").stdout
    assert "was not computed: the frozen text encoder reads the texts in every step" in said
    moving, every = re.search(r"parameters: ([\d,]+) trained of ([\d,]+)", said).groups()  # type: ignore[union-attr]
    assert int(moving.replace(",", "")) < int(every.replace(",", ""))


def test_a_run_that_trains_its_words_says_why_there_is_none(data: Path, tmp_path: Path) -> None:
    said = diptych(*training("vse-infinity", data, epochs=1), "--output_dir", tmp_path / "run").stdout
    assert "was not computed: the text encoder is trained, so there are no fixed text vectors." in said
    other = (*training("vse-infinity", data, epochs=1), "--no_ridge_baseline")
    assert "ridge" not in diptych(*other, "--output_dir", tmp_path / "off").stdout
    assert not (tmp_path / "off" / FILE).exists()


def test_reasons(data: Path, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions, validation = training_splits(open_captions(str(data)))
    recipe = RECIPES["vse-infinity"]
    settings = recipe.settings(text_encoder=str(bert), train_text=False)  # type: ignore[call-arg]
    method = recipe.build(settings, captions)
    ready = prepare(method.retriever, captions, show_progress=False)
    assert why_not(method, ready) == ""
    assert ridge_baseline(method, ready, prepare(method.retriever, validation)).rsum is not None
    assert why_not(replace(method, evaluators=()), ready) == "this run is not judged by recall"
    pictures = replace(ready, captions=replace(captions, images=[Image.new("RGB", (8, 8))] * 40))  # type: ignore[arg-type]
    assert "the image encoder is trained" in why_not(method, pictures)
    monkeypatch.setattr("diptych.training.baseline.MOST_BYTES", 100)
    assert "GB of 16-d features take longer than seconds" in why_not(method, ready)


def test_the_verdict() -> None:
    lines = [{"epoch": float(n), "validation_rsum": 100.0 + n} for n in range(3)]
    progress = Progress(step=3, best=102.0, best_epoch=2, history=lines)
    assert verdict(progress, None, "data") == ""
    assert "this run is better by 2.0." in verdict(progress, Baseline(100.0), "data")
    worse = verdict(progress, Baseline(110.0), "data")
    assert "does not beat it (-8.0)" in worse
    assert worse.endswith("diptych train ridge --data data")
    started = Progress(3, 102.0, 2, history=[{"epoch": -1.0, "validation_rsum": 99.0}, *lines])
    assert verdict(started, None, "data") == "training gained 3.0 on the closed form (99.0)."
    kept = Progress(3, 199.0, -1, history=[{"epoch": -1.0, "validation_rsum": 199.0}, *lines])
    assert "no epoch beat the closed form" in verdict(kept, None, "data")
    assert verdict(replace(kept, history=kept.history[:1]), None, "data") == ""


def test_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("diptych.training.validation.time.monotonic", lambda: now[0])
    clock = Clock(first=2, epochs=10)
    now[0] = 120.0
    assert clock.left(3) == ", at most 60 s left"  # two epochs took 20 s, six are left
    assert clock.left(9) == ""
    assert [spoken(s) for s in (5, 100, 3700)] == ["5 s", "2 min", "1 h 2 min"]
