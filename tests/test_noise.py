"""Noise in training pairs: what it does to them, what a run says of it, and which results may be compared."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import diptych, refused, training
from small import precomputed

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.data.corrections import add_noise
from diptych.data.formats import open_captions
from diptych.errors import DataError, SettingsError
from diptych.evaluation.compare import compare
from diptych.evaluation.report import Report
from diptych.runs.show import model_at_start

IMAGES, PER = 2000, 5


@pytest.fixture(scope="module")
def pairs() -> Captions:
    rows = np.repeat(np.arange(IMAGES), PER)
    texts, ids = [f"text {n}" for n in range(len(rows))], [f"i{n}" for n in range(IMAGES)]
    return Captions(ArrayStore(np.zeros((IMAGES, 1, 2), np.float32)), texts, rows, ids, ["train"] * IMAGES)


@pytest.mark.parametrize(("unit", "lost"), [("text", 0.4**PER), ("image", 0.4)])
def test_drawn_noise_says_how_many_images_lose_all_texts(pairs: Captions, unit: str, lost: float) -> None:
    noisy, about = add_noise(pairs, f"0.4:{unit}")
    assert (about.ratio, about.unit) == (0.4, unit)
    assert about.wrong == pytest.approx(np.mean(noisy.image_of != pairs.image_of))
    assert about.wrong == pytest.approx(0.4, abs=0.005)
    keeping = {row for row, own in zip(noisy.image_of, pairs.image_of, strict=True) if row == own}
    assert about.lost == pytest.approx(1 - len(keeping) / IMAGES)
    assert about.lost == pytest.approx(lost, abs=0.006)
    assert sorted(noisy.image_of) == sorted(pairs.image_of)  # images change places
    assert noisy.texts == pairs.texts
    assert noisy.fingerprint() != pairs.fingerprint()
    again, other = add_noise(pairs, f"0.4:{unit}"), add_noise(pairs, f"0.2:{unit}")
    assert again[1] == about
    assert (again[0].image_of == noisy.image_of).all()
    assert other[1].hash != about.hash


def test_no_noise_changes_nothing(pairs: Captions) -> None:
    noisy, about = add_noise(pairs, "0:text")
    assert (about.wrong, about.lost) == (0, 0)
    assert noisy.fingerprint() == pairs.fingerprint()


def test_a_file_names_the_image_of_each_text_or_of_all_texts_of_an_image(
    pairs: Captions, tmp_path: Path
) -> None:
    rows, images = pairs.image_of.copy(), np.arange(IMAGES)
    rows[: IMAGES * 2] = np.random.default_rng(1).permutation(rows[: IMAGES * 2])
    images[:600] = np.roll(images[:600], 1)
    for name, content in (("texts.npy", rows), ("images.npy", images), ("both.npy", images[pairs.image_of])):
        np.save(tmp_path / name, content)
    noisy, about = add_noise(pairs, str(tmp_path / "texts.npy"))
    assert (noisy.image_of == rows).all()
    assert (about.unit, about.ratio) == ("text", 0.4)
    assert about.hash == hashlib.sha256((tmp_path / "texts.npy").read_bytes()).hexdigest()[:16]
    found = [add_noise(pairs, str(tmp_path / name)) for name in ("images.npy", "both.npy")]
    assert (found[0][0].image_of == found[1][0].image_of).all()
    assert [(about.unit, about.ratio, about.lost) for _, about in found] == [("image", 0.3, 0.3)] * 2


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (np.arange(7), "7 rows"),
        (np.full(IMAGES * PER, IMAGES), f"row {IMAGES}"),
        (np.full(IMAGES, -1), "row -1"),
        (np.zeros(IMAGES), "float64"),
        (np.zeros((IMAGES, 2), int), r"\(2000, 2\)"),
    ],
)
def test_a_file_of_other_data_is_refused(
    pairs: Captions, tmp_path: Path, content: np.ndarray, word: str
) -> None:
    np.save(tmp_path / "noise.npy", content)
    with pytest.raises(DataError, match=word):
        add_noise(pairs, str(tmp_path / "noise.npy"))


@pytest.mark.parametrize("noise", ["0.4", "0.4:word", "1.5:text", "noise.txt", "-0.1:text"])
def test_noise_that_is_no_noise_is_refused(pairs: Captions, noise: str) -> None:
    with pytest.raises(SettingsError, match=noise):
        add_noise(pairs, noise)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", train=30, dev=10)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for noise in ("", "0.4:text", "0.4:image", "0.2:text"):
        given = ("--noise", noise) if noise else ()
        place = folder / (noise.replace(":", "-") or "clean")
        said = diptych(*training("vse-plus-plus", data, epochs=1), *given, "--output_dir", place)
        assert ("noise in the training pairs" in said.stderr) == bool(noise)
    return {place.name: place for place in folder.iterdir()}


def test_a_run_states_its_noise_and_validates_on_clean_pairs(data: Path, runs: dict[str, Path]) -> None:
    card = json.loads((runs["0.4-text"] / "run.json").read_text())
    _, about = add_noise(open_captions(data, split="train"), "0.4:text")
    assert card["noise"] == vars(about)
    clean = json.loads((runs["clean"] / "run.json").read_text())
    assert "noise" not in clean
    noisy_pairs, noisy_validation = card["data_fingerprint"].split("-")
    assert clean["data_fingerprint"].split("-")[1] == noisy_validation
    assert clean["data_fingerprint"].split("-")[0] != noisy_pairs


def test_a_report_carries_the_noise_of_its_run(runs: dict[str, Path], tmp_path: Path) -> None:
    said = diptych("evaluate", runs["0.4-text"], "--output", tmp_path / "report.json").stdout
    report = Report.load(tmp_path / "report.json")
    (about,) = report.card.noise
    assert str(about) in said
    assert (about.given, about.unit, about.ratio) == ("0.4:text", "text", 0.4)
    report.save(tmp_path / "again.json")
    assert Report.load(tmp_path / "again.json") == report
    old = json.loads((tmp_path / "report.json").read_text())
    old["groups"][0]["card"].pop("noise")  # as earlier versions wrote it
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Report.load(tmp_path / "old.json").card == replace(report.card, noise=())


def test_compare_refuses_one_ratio_of_two_kinds_of_noise(runs: dict[str, Path], tmp_path: Path) -> None:
    reports = {name: tmp_path / f"{name}.json" for name in runs}
    for name, path in reports.items():
        diptych("evaluate", runs[name], "--output", path, "--bootstrap", 0)
    sentence = refused("compare", reports["0.4-text"], reports["0.4-image"])
    assert "40 % by text" in sentence
    assert "40 % by image" in sentence
    for other in ("0.2-text", "clean"):
        said = diptych("compare", reports["0.4-text"], reports[other], "--draws", 0).stdout
        assert "training noise of 0.4-text: 40 % by text" in said
        assert "the noise differs" in said
    assert "of clean: none" in said
    one = Report.load(reports["0.4-text"])
    assert "the noise differs" not in compare(one, one, draws=0).render()
    assert "40 % by text" in compare(one, one, draws=0).render()
    with pytest.raises(SettingsError, match="20 % by text"):  # several seeds of a side have one noise
        compare([one, Report.load(reports["0.2-text"])], one)
    clean = Report.load(reports["clean"])
    assert "noise" not in compare(clean, clean, draws=0).render()


def test_the_model_that_a_noisy_run_started_from_can_be_built_again(runs: dict[str, Path]) -> None:
    assert model_at_start(runs["0.4-text"]).fingerprint() == model_at_start(runs["0.4-text"]).fingerprint()
