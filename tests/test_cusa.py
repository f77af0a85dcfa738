"""CUSA on VSE∞: teachers as targets, the recipe, uni-modal evaluation, and the commands as a user runs them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from commands import torchrun
from PIL import Image
from safetensors.numpy import load_file
from small import bert_folder, precomputed
from small_senteval import write_senteval

from diptych.cli import main
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.errors import DataError, SettingsError
from diptych.evaluation.report import Report
from diptych.model.retriever import Retriever
from diptych.objectives.combine import Sum
from diptych.recipes import RECIPES
from diptych.runs.train import run_recipe
from diptych.targets.teachers import Live
from diptych.training.teachers import Teachers

TINY = {"dim": 16, "batch_size": 12, "min_count": 1, "word_dim": 8, "epochs": 2}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bert_folder(tmp_path_factory.mktemp("bert") / "model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(precomputed(tmp_path_factory.mktemp("data") / "toy_precomp"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trained(data: str, folder: Path, recipe: str = "cusa-vse-infinity", **changes: Any) -> Any:
    found = RECIPES[recipe]
    return run_recipe(found, found.settings(**{**TINY, **changes}), data, folder, show_progress=False)


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "best/model.safetensors")


# --- the recipe


def test_6_without_soft_labels_the_run_is_the_hosts(data: str, bert: str, tmp_path: Path) -> None:
    host = trained(data, tmp_path / "host", "vse-infinity")
    base = trained(data, tmp_path / "base", csa=0.0, usa=0.0, text_teacher=bert)
    ours, theirs = weights(tmp_path / "base"), weights(tmp_path / "host")
    assert list(ours) == list(theirs)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    for one, other in zip(host.history, base.history, strict=True):
        assert all(other[name] == value for name, value in one.items())


def test_soft_labels_change_the_run_and_their_terms_are_logged(data: str, bert: str, tmp_path: Path) -> None:
    trained(data, tmp_path / "run", text_teacher=bert, log_steps=1)
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "csa" in line]
    assert steps
    assert all(line["csa"] > 0 and line["usa"] > 0 and "hard" in line for line in steps)
    names = set(weights(tmp_path / "run"))
    assert {"branches.uni.image_head.weight", "branches.uni.text_head.bias"} <= names
    history = json.loads((tmp_path / "run/last/progress.json").read_text())["history"]
    assert history[-1].keys() >= {"validation_rsum", "validation_text_to_text_recall@1",
                                  "validation_image_to_image_agreement"}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "members"), [({"usa": 0.0}, {"hard", "csa"}), ({"csa": 0.0}, {"hard", "usa"})]
)
def test_each_term_alone(data: str, bert: str, changes: dict[str, float], members: set[str]) -> None:
    recipe = RECIPES["cusa-vse-infinity"]
    training, _ = training_splits(open_captions(data))
    method = recipe.build(recipe.settings(**{**TINY, **changes, "text_teacher": bert}), training)
    assert isinstance(method.objective, Sum)
    assert set(method.objective.members) == members
    assert bool(method.retriever.branches) == ("usa" in members)  # no USA, no heads
    weight = {"csa": 0.6, "usa": 0.75}
    for name in members - {"hard"}:
        assert method.objective.weights[name] == pytest.approx(
            weight[name] * 12
        )  # beside a sum over 12 pairs


def test_resuming_goes_on_bit_for_bit(data: str, bert: str, tmp_path: Path) -> None:
    found = RECIPES["cusa-vse-infinity"]
    trained(data, tmp_path / "whole", text_teacher=bert, epochs=3)
    trained(data, tmp_path / "parts", text_teacher=bert, epochs=1)
    settings = found.settings(**{**TINY, "text_teacher": bert, "epochs": 3})
    run_recipe(found, settings, data, tmp_path / "parts", resume=True, show_progress=False)
    for file in ("objective", "retriever"):
        whole, parts = (load_file(tmp_path / run / f"last/{file}.safetensors") for run in ("whole", "parts"))
        assert file == "retriever" or any("temperature" in name for name in whole)
        assert all(whole[name].tobytes() == parts[name].tobytes() for name in whole)


def test_two_processes_match_one(data: str, bert: str, tmp_path: Path, cache: Path) -> None:
    changes = {
        **TINY,
        "size_augmentation": "none",
        "warmup_epoch": -1,
        "image_encoder": "grid",
        "log_steps": 1,
    }
    trained(data, tmp_path / "one", text_teacher=bert, **changes)
    for path in cache.glob("*teacher-*"):
        path.unlink()  # both processes want it: one computes, the other waits
    flags = [f"--{name}={value}" for name, value in {**changes, "text_teacher": bert}.items()]
    torchrun("train", "cusa-vse-infinity", f"--data={data}", f"--output_dir={tmp_path / 'two'}", *flags)
    one, two = (
        [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text().splitlines()]
        for run in ("one", "two")
    )
    for name in ("csa", "usa", "hard"):
        values = [[line[name] for line in lines if name in line] for lines in (one, two)]
        assert values[0]
        assert values[1] == pytest.approx(values[0], rel=2e-4)
    assert len(list(cache.glob("teacher-*.npy"))) == 3


def test_live_teachers_teach_the_same(data: str, bert: str, tmp_path: Path) -> None:
    cached = trained(data, tmp_path / "cached", text_teacher=bert)
    live = trained(data, tmp_path / "live", text_teacher=bert, teacher_mode="live")
    assert live.history[-1]["validation_rsum"] == pytest.approx(cached.history[-1]["validation_rsum"], abs=25)
    for name, value in weights(tmp_path / "cached").items():
        np.testing.assert_allclose(weights(tmp_path / "live")[name], value, atol=5e-3)


@pytest.mark.parametrize("host", ["vse-infinity", "coder", "sgr"])
def test_soft_labels_on_top_of_any_recipe(data: str, tmp_path: Path, host: str) -> None:
    small = {"queue_size": 24, "clusters": 6, "concept_size": 10, "similarity_dim": 8}
    known = RECIPES[host].settings.__dataclass_fields__
    changes = {name: value for name, value in {**TINY, **small}.items() if name in known}
    recipe = RECIPES[host]
    settings = recipe.settings(
        **{**changes, "epochs": 1, "log_steps": 1, "objective": "own + 12*csa + 9*usa"}
    )
    run_recipe(recipe, settings, data, tmp_path / "run", show_progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert all(line["csa"] > 0 and line["usa"] > 0 for line in lines if "loss" in line)
    assert Retriever.from_pretrained(tmp_path / "run").encode_text(["a dog"], view="uni").shape == (1, 16)


# --- targets


def test_teachers_fill_two_columns(data: str, bert: str, cache: Path) -> None:
    training, _ = training_splits(open_captions(data))
    columns = Teachers(text=bert).columns(training, device=CPU, show_progress=False)
    assert {name: column.of for name, column in columns.items()} == {
        "teacher_image": "image",
        "teacher_text": "text",
    }
    first = np.asarray(training.images[0]).mean(0)
    np.testing.assert_allclose(
        columns["teacher_image"].rows(np.array([0]))[0], first / np.linalg.norm(first), atol=2e-3
    )
    assert len(list(cache.glob("teacher-*.npy"))) == 2
    live = Teachers(text=bert, live=("image", "text")).columns(training, device=CPU, show_progress=False)
    assert isinstance(live["teacher_text"].values, Live)
    mixed = Teachers(text=bert, live=("text",)).columns(training, device=CPU, show_progress=False)
    assert [isinstance(column.values, Live) for column in mixed.values()] == [False, True]


def test_published_vectors_by_image_id(data: str, bert: str, tmp_path: Path) -> None:
    training, _ = training_splits(open_captions(data))
    file = tmp_path / "train_unicom.npy"
    file.write_bytes(
        pickle.dumps({name: np.full((1, 7), i + 1.0) for i, name in enumerate(training.image_ids)})
    )
    trained(data, tmp_path / "run", text_teacher=bert, image_teacher=str(file), epochs=1)
    trained(
        data,
        tmp_path / "folder",
        text_teacher=bert,
        image_teacher=str(tmp_path),
        epochs=1,
        teacher_mode="live_text",
    )
    assert weights(tmp_path / "run").keys() == weights(tmp_path / "folder").keys()
    file.write_bytes(pickle.dumps({"other": np.ones((1, 7))}))
    with pytest.raises(DataError, match=r"\b24\b.*\b24\b"):
        trained(data, tmp_path / "no", text_teacher=bert, image_teacher=str(file))
    with pytest.raises(SettingsError, match=r"train_unicom\.npy"):
        trained(data, tmp_path / "live", text_teacher=bert, image_teacher=str(file), teacher_mode="live")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_teacher": "bigru"}, "bigru"),
        ({"text_teacher": "nothing"}, "nothing"),
        ({"image_teacher": "regions"}, "regions.*lite0"),
        ({"image_teacher": "lite0"}, "stored"),
        ({"image_teacher": "nothing"}, "nothing"),
        ({"image_teacher": "missing.npy"}, r"missing\.npy"),
        ({"soft_temperature": 3.0}, r"--soft_temperature.*3\.0"),
    ],
)
def test_bad_teachers(data: str, bert: str, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((SettingsError, DataError), match=words):
        trained(data, tmp_path / "run", **{"text_teacher": bert, **changes})
    assert not (tmp_path / "run").exists()


def test_too_few_images_to_validate_have_no_neighbours(bert: str, tmp_path: Path) -> None:
    few = precomputed(tmp_path / "few_precomp", dev=2)
    trained(str(few), tmp_path / "run", text_teacher=bert, epochs=1)
    said = run("evaluate", tmp_path / "run", "--bootstrap", "0", "--output", tmp_path / "report.json")
    chose = json.loads((tmp_path / "run" / "last" / "progress.json").read_text())["metric"]
    assert Report.load(tmp_path / "report.json").primary_metric == chose == "rsum"
    assert "text → text (same image)" in said
    assert "2 images with texts have no order of neighbours: image → image needs 3." in said


# --- commands


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == 2
    return done.output


def test_teach_fills_the_cache_that_training_reads(data: str, bert: str, tmp_path: Path, cache: Path) -> None:
    output = run("teach", data, "--text_teacher", bert)
    assert "train: 24 images × 16" in output
    assert "train: 120 texts" in output
    files = {path: path.stat().st_mtime_ns for path in cache.glob("teacher-*.npy")}
    assert len(files) == 3
    assert run("teach", data, "--text_teacher", bert).count(str(cache)) == 3
    trained(data, tmp_path / "run", text_teacher=bert)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("teacher-*.npy")} == files


def test_sts_of_a_run_and_of_a_text_encoder(data: str, bert: str, tmp_path: Path) -> None:
    trained(data, tmp_path / "run", text_teacher=bert, epochs=1)
    senteval = write_senteval(tmp_path / "senteval", pairs=12)
    whole = run("evaluate", tmp_path / "run", "--protocol", "sts", "--data", senteval)
    assert "STS12 test (60 pairs)" in whole
    assert "mean of the seven test sets" in whole
    assert "uni-modal heads" in whole
    plain = run("evaluate", bert, "--protocol", "sts", "--data", senteval)
    assert "mean of the token states" in plain
    (senteval / "downstream/SICK/SICK_test_annotated.txt").unlink()
    part = run("evaluate", bert, "--protocol", "sts", "--data", senteval)
    assert "missing, so that no mean of the seven is given: SICK-R test (downstream/SICK" in part
    assert "mean of the seven test sets" not in part
    (senteval / "downstream/STS/STS12-en-test/STS.gs.MSRvid.txt").write_text("1\n")
    output = refused("evaluate", bert, "--protocol", "sts", "--data", senteval)
    assert "has 1 lines for the 12 pairs" in output
    assert "needs --data" in refused("evaluate", bert, "--protocol", "sts")
    assert "takes one model" in refused("evaluate", bert, bert, "--protocol", "sts", "--data", senteval)


def sop(folder: Path, count: int = 6) -> Path:
    """Plain pictures of two products."""
    rows = ["image_id class_id super_class_id path"]
    for i in range(count):
        name = f"chair_final/{i}.JPG"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 40, (32, 32, 3)) + (200 if i % 2 else 0)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
        rows.append(f"{i} {i % 2} 1 {name}")
    (folder / "Ebay_test.txt").write_text("\n".join(rows))
    return folder


@pytest.mark.filterwarnings("ignore:.*correlation with constant.*")
def test_four_directions_on_one_page(bert: str, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    lines = []
    for i in range(20):
        pixels = np.random.default_rng(i).integers(0, 255, (32, 32, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        split = "train" if i < 14 else "val"
        lines += [
            json.dumps({"image": f"{i}.png", "text": f"the {c} dog {i % 3}", "split": split})
            for c in ("red", "blue")
        ]
    manifest = folder / "data.jsonl"
    manifest.write_text("\n".join(lines))
    trained(
        str(manifest), tmp_path / "run", text_teacher=bert, epochs=1, image_size=32, batch_size=8,
        image_teacher_space="tokens", teacher_projection=24,
    )  # fmt: skip
    senteval, products = write_senteval(tmp_path / "senteval", pairs=12), sop(tmp_path / "sop")
    page = run(
        "evaluate", tmp_path / "run", "--protocol", "four-directions", "--bootstrap", "10", "--data", manifest,
        "--data", senteval, "--data", products, "--output", tmp_path / "report.json",
    )  # fmt: skip
    for words in ("image → text", "text → image", "text → text (same image)", "image → image (as minilm)",
                  "image → image by class", "STS-B test"):  # fmt: skip
        assert words in page
    assert len(json.loads((tmp_path / "report.json").read_text())["groups"]) == 4
    alone = run("evaluate", tmp_path / "run", "--protocol", "image-classes", "--data", products)
    assert "sop (6 images, each against the others)" in alone
    said = refused("evaluate", tmp_path / "run", "--protocol", "image-classes", "--data", senteval)
    assert f"does not read {senteval}" in said


def test_uni_modal_vectors_are_not_the_joint_ones(data: str, bert: str, tmp_path: Path) -> None:
    trained(data, tmp_path / "run", text_teacher=bert, epochs=1)
    model = Retriever.from_pretrained(tmp_path / "run")
    texts = ["the red dog runs", "a blue car"]
    assert model.encode_text(texts, view="uni").shape == (2, 16)
    assert not torch.allclose(model.encode_text(texts, view="uni"), model.encode_text(texts))
