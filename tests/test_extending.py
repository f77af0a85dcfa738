"""The guide, run as written: parts in files of their own train, save, load, evaluate, index and search."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import free_port, need_a_gpu_each
from small import WORDS, precomputed

from diptych.evaluation.report import Report
from diptych.recipes import RECIPES
from diptych.training.log import read_log

ROOT = Path(__file__).parent.parent
GUIDE = "".join(
    (ROOT / "docs" / name).read_text("utf-8") for name in ("extending.md", "extending-targets.md")
)
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, re.DOTALL))
PLUGINS = "my_reader,my_recipe,my_mix"
KINDS, REGIONS, WIDTH = 3, 4, 8


@pytest.fixture(scope="module", autouse=True)
def own_recipes() -> Iterator[None]:
    """Recipes that the examples add are gone afterwards: other files count ours."""
    yield
    RECIPES.added.clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of the guide, and data in the format of its reader."""
    folder = tmp_path_factory.mktemp("extending")
    for name, content in FILES.items():
        (folder / name).write_text(content, "utf-8")
    shutil.copy(ROOT / "docs" / "one_file_engine.py", folder)
    metadata = folder / "one_file_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: one-file-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[diptych.engines]\nonefile = one_file_engine:OneFileIndex\n")
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((len(WORDS), WIDTH)).astype(np.float32)
    regions, texts, image_of, kinds = [], [], [], []
    for image in range(36):
        chosen = rng.choice(len(WORDS), REGIONS)
        chosen[0] = image % KINDS  # the first region and word tell the kind
        regions.append(codes[chosen] + 0.05 * rng.standard_normal((REGIONS, WIDTH)))
        for _ in range(2):
            texts.append(" ".join(WORDS[w] for w in rng.permutation(chosen)))
            image_of.append(image)
        kinds.append(image % KINDS)
    splits = ["train"] * 24 + ["val"] * 12
    np.savez(
        folder / "toy.npz",
        regions=np.array(regions, np.float32), texts=texts, image_of=image_of, kind=kinds, splits=splits,
    )  # fmt: skip
    return folder


def run(folder: Path, *args: object, processes: int = 1, plugins: str = PLUGINS) -> str:
    """A command in a fresh process, or several under torchrun."""
    launch = ["-m", "diptych"]
    if processes > 1:
        need_a_gpu_each(processes)
        several = [f"--nproc_per_node={processes}", f"--master_port={free_port()}"]
        launch = ["-m", "torch.distributed.run", *several, *launch]
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    environment = {**os.environ, "DIPTYCH_PLUGINS": plugins, "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
                   "TMPDIR": str(folder)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launch, *map(str, args)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SETTINGS = ("--epochs=3", "--batch_size=12", "--log_steps=1", "--learning_rate=0.02", "--decay_epoch=9")


@pytest.fixture(scope="module")
def runs(place: Path) -> dict[int, Path]:
    """The recipe of the guide, trained by one process and by two."""
    for processes in (1, 2):
        run(
            place,
            "train",
            "kinds",
            "--data=toy.npz",
            f"--output_dir=run{processes}",
            *SETTINGS,
            processes=processes,
        )
    return {processes: place / f"run{processes}" for processes in (1, 2)}


def test_the_saved_model_names_every_part_of_the_guide(runs: dict[int, Path]) -> None:
    parts = {
        name: file.removesuffix(".py")
        for file, content in FILES.items()
        for name in re.findall(r"^@part\nclass (\w+)", content, re.MULTILINE)
    }
    assert len(parts) >= 4
    saved = (runs[1] / "best" / "config.json").read_text("utf-8")
    for name, module in parts.items():
        assert f'"{name}"' in saved
        assert f'"{module}"' in saved


def test_two_processes_train_as_one(runs: dict[int, Path]) -> None:
    logs = {
        n: [line for line in read_log(folder / "log.jsonl") if "loss" in line] for n, folder in runs.items()
    }
    assert len(logs[1]) == len(logs[2]) == 12
    for one, two in zip(logs[1], logs[2], strict=True):
        for name in ("loss", "pairs", "kinds"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
    assert logs[1][-1]["loss"] < logs[1][0]["loss"]


def test_its_own_metric_chose_the_epoch(runs: dict[int, Path]) -> None:
    for folder in runs.values():
        progress = json.loads((folder / "last" / "progress.json").read_text())
        assert progress["metric"] == "kind_accuracy"
        seen = [line["validation_kind_accuracy"] for line in progress["history"]]
        assert progress["best"] == max(seen)
        assert progress["best_epoch"] == seen.index(max(seen))


def test_it_is_evaluated_by_its_own_metric_and_scorer(place: Path, runs: dict[int, Path]) -> None:
    reports = {}
    for n, folder in runs.items():
        said = run(place, "evaluate", folder, "--data=toy.npz", f"--output=report{n}.json", "--bootstrap=0")
        assert said.index("kind_accuracy") < said.index("RSUM")
        reports[n] = Report.load(place / f"report{n}.json")
        assert reports[n].primary_metric == "kind_accuracy"
        assert reports[n].groups[1].card.described()["score"] == "best-regions"
    assert reports[1].metrics == pytest.approx(reports[2].metrics)


def test_it_is_indexed_and_searched_in_an_engine_of_its_own(place: Path, runs: dict[int, Path]) -> None:
    run(place, "index", runs[1], "toy.npz", "--index=onefile://kinds.db")
    found = json.loads(run(place, "search", "onefile://kinds.db", "a red dog", "-k", 3, "--all", "--json"))
    assert len(found["hits"]) == 3


def test_a_model_with_unknown_parts_names_their_module(place: Path, runs: dict[int, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from diptych import Retriever; Retriever.from_pretrained({str(runs[1])!r})"],
        cwd=ROOT, env={**os.environ, "DIPTYCH_PLUGINS": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert "DIPTYCH_PLUGINS=my_" in done.stderr


def test_the_mix_of_two_papers_trains(place: Path) -> None:
    data = precomputed(place / "toy_precomp")
    small = ("--dim=8", "--word_dim=4", "--min_count=1", "--epochs=1", "--batch_size=12", "--log_steps=1")
    run(place, "train", "mix", f"--data={data}", "--output_dir=mixed", *small)
    line = next(line for line in read_log(place / "mixed" / "log.jsonl") if "loss" in line)
    assert line["loss"] == pytest.approx(line["hinge"] + line["dcl"])


def test_missing_targets_and_unknown_views_are_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    from diptych.errors import DataError, SettingsError
    from diptych.model.retriever import Retriever
    from diptych.targets.columns import Column

    column = Column(np.array([0.0, np.nan, 1.0]), "image")
    with pytest.raises(DataError, match=r"toy.*\b1\b"):
        column.check("kind", "toy", 3, 5)
    monkeypatch.setenv("DIPTYCH_PLUGINS", PLUGINS)
    import my_recipe  # type: ignore[import-not-found]  # noqa: F401

    model = Retriever.from_pretrained(place / "run1")
    with pytest.raises(SettingsError, match="'uni'"):
        model.encode_image(np.zeros((2, WIDTH), np.float32), view="uni")
    assert model.encode_image(np.zeros((2, WIDTH), np.float32), view="kind").shape == (1, KINDS)
    assert model.dim == 16
