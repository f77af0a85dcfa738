"""The names of ``diptych``: light to import, documented, with examples that run and inputs that are refused."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import photos, precomputed

import diptych
from diptych.recipes import RECIPES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "diptych"
PUBLIC = [name for name in diptych.__all__ if not name.startswith("__")]
FAULTS = [
    name
    for name, kind in vars(diptych.errors).items()
    if isinstance(kind, type) and kind.__module__ == "diptych.errors"
]
MADE = [name for name in PUBLIC if name not in FAULTS]
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text("utf-8"), re.M | re.S)
TINY = {"show_progress": False, "ridge_baseline": False}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name: photos, a model, its index, captions with regions, two reports."""
    folder = tmp_path_factory.mktemp("desk")
    photos(folder / "photos", 12)
    recipe = RECIPES["photos"]
    model = recipe.build(recipe.settings(image_size=64), diptych.open_captions(folder / "photos")).retriever  # type: ignore[call-arg]
    model.save_pretrained(folder / "runs" / "photos")
    diptych.index_folder(folder / "photos", model=folder / "runs" / "photos", show_progress=False).close()
    precomputed(folder / "captions")
    (folder / "parrots.jpg").write_bytes((folder / "photos" / "picture0.png").read_bytes())
    rng = np.random.default_rng(0)
    for name in ("first", "second"):
        report = diptych.evaluate_embeddings(rng.normal(size=(6, 4)), rng.normal(size=(6, 4)), bootstrap=0)
        report.save(folder / f"{name}.json")
    return folder


def test_the_names_are_those_of_the_front_door() -> None:
    wanted = "Captions Hits Report Retriever Searcher compare create_index evaluate evaluate_embeddings index_folder"
    assert f"{wanted} open_captions open_index search train".split() == MADE
    assert set(FAULTS) <= set(PUBLIC)
    assert diptych.__all__ == sorted(diptych.__all__)


def test_no_name_is_that_of_a_room() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not rooms & set(PUBLIC)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_and_dir_are_light_and_a_star_brings_everything() -> None:
    heavy = "[m for m in ('torch', 'numpy', 'PIL', 'click') if m in sys.modules]"
    assert run(f"import sys, diptych; dir(diptych); print({heavy}, 'Any' in dir(diptych))") == "[] False"
    assert (
        run("from diptych import *; import diptych; print(all(n in globals() for n in diptych.__all__))")
        == "True"
    )
    assert set(diptych.__all__) <= set(dir(diptych))
    with pytest.raises(AttributeError, match="serch"):
        diptych.serch  # noqa: B018


def test_help_describes_every_name() -> None:
    text = pydoc.plain(pydoc.render_doc(diptych))
    assert not [name for name in PUBLIC if not re.search(rf"(class |^    ){name}\(", text, re.M)]


def test_signatures() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(diptych.train)[:5] == ["recipe", "data", "output_dir", "objective", "device"]
    assert names(diptych.evaluate)[:4] == ["model", "data", "split", "protocol"]
    assert names(diptych.evaluate_embeddings)[:4] == ["images", "texts", "image_of", "protocol"]
    assert names(diptych.create_index) == ["path", "vectors", "ids", "metadata", "texts", "normalize"]
    assert names(diptych.index_folder)[:3] == ["folder", "index", "model"]
    assert names(diptych.search)[:5] == ["place", "query", "k", "filter", "kind"]
    assert names(diptych.Searcher.open)[:4] == ["place", "model", "device", "allow_urls"]
    assert names(diptych.compare)[:2] == ["a", "b"]


@pytest.mark.parametrize("name", MADE)
def test_the_example_of_a_docstring_runs(name: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doc = inspect.getdoc(getattr(diptych, name)) or ""
    assert "Example::" in doc
    example = textwrap.dedent(doc.split("Example::")[1])
    monkeypatch.chdir(desk)
    rng = np.random.default_rng(1)
    reports = [diptych.Report.load(desk / f"{one}.json") for one in ("first", "second")]
    given = {
        "diptych": diptych, "Searcher": diptych.Searcher, "Report": diptych.Report, "vectors": rng.normal(size=(2, 4)),
        "images": rng.normal(size=(2, 4)), "texts": rng.normal(size=(3, 4)), "report_a": reports[0],
        "report_b": reports[1],
    }  # fmt: skip
    if name == "train":
        example = example.replace('"photos"', '"captions"').replace("runs/photos", "runs/new")
    if name == "Searcher":
        example = example.replace("year > 2020", "split = 'train'")
    if name in ("evaluate", "Report"):
        example = example.replace('"photos"', 'diptych.open_captions("photos")').replace(', split="val"', "")
    shutil.rmtree("own.index", ignore_errors=True)
    exec(compile(example, name, "exec"), given)


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_the_scripts_of_the_docs_run(script: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    assert len([line for line in script.splitlines() if line.strip()]) <= 8
    assert not re.findall(r"from diptych\.", script)
    shutil.rmtree("own.index", ignore_errors=True)
    exec(compile(script, "python.md", "exec"), {})


def test_there_are_five_scripts() -> None:
    assert len(SCRIPTS) == 5


# training


def test_training_takes_captions_and_a_loss_of_ones_own(desk: Path, tmp_path: Path) -> None:
    seen = []

    def own(embeddings: Any, batch: Any) -> torch.Tensor:
        seen.append(len(batch.image_ids))
        return (1 - embeddings.image @ embeddings.text.T).diagonal().mean()

    small = {"dim": 16, "word_dim": 8, "epochs": 1, "batch_size": 8, **TINY}
    data = diptych.open_captions(desk / "captions")
    model = diptych.train("vse-infinity", data, tmp_path / "run", objective=own, **small)
    assert isinstance(model, diptych.Retriever)
    assert seen
    assert '"own (made in Python)"' in (tmp_path / "run" / "run.json").read_text("utf-8")


def test_a_run_tells_how_it_went(desk: Path) -> None:
    small = {"dim": 16, "word_dim": 8, "epochs": 2, "batch_size": 8, **TINY}
    run = diptych.train("vse-infinity", desk / "captions", **small).run
    assert re.fullmatch(
        r"Run\(vse-infinity on .*: \d+ steps, best validation rsum [\d.]+, epoch [12]\)", repr(run)
    )
    shown = run._repr_html_()  # type: ignore[attr-defined]
    assert shown.count("<tr>") == 3
    assert "<svg" in shown
    solved = diptych.train("ridge", desk / "captions", show_progress=False).run
    assert "closed form" in repr(solved)
    assert "closed form" in solved._repr_html_()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kept", [True, False])
def test_an_interrupted_cell_says_one_sentence_and_loses_nothing(
    desk: Path, tmp_path: Path, kept: bool
) -> None:
    seen: list[int] = []

    def interrupts(embeddings: Any, batch: Any) -> torch.Tensor:
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # what the stop button of a notebook sends
        return (1 - embeddings.image @ embeddings.text.T).diagonal().mean()

    small = {"dim": 16, "word_dim": 8, "epochs": 2, "batch_size": 8, "save_steps": 100, **TINY}
    call = partial(
        diptych.train,
        "vse-infinity",
        desk / "captions",
        tmp_path / "run" if kept else None,
        objective=interrupts,
    )
    with pytest.raises(diptych.Interrupted) as stopped:
        call(**small)
    (sentence,) = stopped.value._render_traceback_()  # all that a notebook shows
    assert "\n" not in sentence
    assert ("resume=True" in sentence) == kept
    assert len(seen) == 3
    if kept:
        model = call(**small, resume=True)
        whole = diptych.train("vse-infinity", desk / "captions", objective=interrupts, **small)
        assert model.fingerprint() == whole.fingerprint()
    else:
        with pytest.raises(diptych.SettingsError, match="output_dir"):
            call(**small, resume=True)


@pytest.mark.parametrize(
    ("recipe", "options", "sentence"),
    [
        ("rigde", {}, "did you mean ridge"),
        ("ridge", {"shrinkag": 1.0}, "did you mean shrinkage"),
        ("ridge", {"device": "tpu"}, "device 'tpu'"),
        ("ridge", {"objective": "tripet"}, "did you mean triplet"),
        ("ridge", {"seed": "one"}, "seed"),
    ],
)
def test_wrong_training_leaves_nothing(
    desk: Path, tmp_path: Path, recipe: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(diptych.SettingsError, match=sentence):
        diptych.train(recipe, desk / "captions", tmp_path / "run", **{**TINY, **options})
    assert not (tmp_path / "run").exists()


# vectors


def test_vectors_are_normalised(tmp_path: Path) -> None:
    rows = np.array([[3.0, 4.0], [0.0, 2.0]])
    with diptych.create_index(tmp_path / "own", rows) as index:
        assert np.allclose(np.linalg.norm(index.vectors(["0", "1"]), axis=1), 1)
        assert [one.name for one in index.info.collections] == ["vectors"]
        assert "2 images, 0 texts; 2 dimensions" in repr(index)
    with diptych.create_index(tmp_path / "unit", torch.eye(2), normalize=False) as index:
        assert len(index) == 2


@pytest.mark.parametrize(
    ("vectors", "options", "sentence"),
    [
        ([[1.0, float("nan")]], {}, "row 0 holds NaN"),
        ([[0.0, 0.0]], {}, "row 0 is all zeros"),
        ([[3.0, 4.0]], {"normalize": False}, "length 5"),
        ([[1.0, 0.0], [1.0]], {}, "rows of unequal length"),
        ([1.0, 0.0], {}, "shape"),
        ([["a", "b"]], {}, "not numbers"),
        (np.zeros((0, 2)), {}, "no vectors"),
        ([[1.0, 0.0]], {"ids": ["a", "b"]}, "1 vectors came with 2 ids"),
        ([[1.0, 0.0], [0.0, 1.0]], {"ids": ["a", "a"]}, "'a'"),
        ([[1.0, 0.0]], {"metadata": [{"a": object()}]}, "object in column 'a'"),
    ],
)
def test_vectors_that_are_refused_leave_nothing(
    tmp_path: Path, vectors: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(diptych.DataError, match=sentence):
        diptych.create_index(tmp_path / "own", vectors, **options)
    assert not (tmp_path / "own").exists()


def test_an_index_is_not_written_over(tmp_path: Path) -> None:
    diptych.create_index(tmp_path / "own", np.eye(2)).close()
    with pytest.raises(diptych.IndexFault, match="/own "):
        diptych.create_index(tmp_path / "own", np.eye(3))
    with diptych.open_index(tmp_path / "own") as index:
        assert len(index) == 2


def test_embeddings_are_measured_whatever_their_length() -> None:
    rng = np.random.default_rng(0)
    images, texts = rng.normal(size=(5, 4)), rng.normal(size=(10, 4))
    plain = diptych.evaluate_embeddings(images, texts, np.arange(10) // 2, bootstrap=0)
    longer = diptych.evaluate_embeddings(torch.tensor(images) * 7, texts, bootstrap=0)
    assert plain.metrics == longer.metrics
    same = diptych.evaluate_embeddings(images, images, bootstrap=0)
    assert same.metrics["rsum"] == 600
    narrow, missing, few = texts[:, :3], texts * np.nan, texts[:7]
    for wrong, sentence in ((narrow, "4 numbers and text vectors 3"), (missing, "NaN"), (few, "7 texts")):
        with pytest.raises(diptych.DataError, match=sentence):
            diptych.evaluate_embeddings(images, wrong)


# models, hits and what is shown of them


def test_encode_tells_texts_from_pictures(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    model = diptych.Retriever.from_pretrained("runs/photos")
    assert torch.equal(model.encode("two parrots"), model.encode_text("two parrots"))
    assert torch.equal(model.encode(Path("parrots.jpg")), model.encode_image("parrots.jpg"))
    assert torch.equal(model.encode("no-such-file.jpg"), model.encode_text("no-such-file.jpg"))
    for wrong in ("parrots.jpg", ["a", Path("parrots.jpg")]):
        with pytest.raises(diptych.DataError):
            model.encode(wrong)
    assert len(repr(model)) < 200
    assert "384 dimensions" in repr(model)


def test_reprs_are_short_and_notebooks_show_pictures(desk: Path) -> None:
    hits = diptych.search(desk / "photos.index", "two parrots", k=4)
    assert repr(hits).endswith("… 4 in all)")
    assert hits[0].item.content not in repr(hits[0])  # a hash for programs
    assert hits._repr_html_().count("data:image/jpeg") == 4
    captions = diptych.open_captions(desk / "photos")
    assert "12 images, 24 texts; train 12" in repr(captions)
    assert captions._repr_html_().count("data:image/jpeg") == 6
    report = diptych.Report.load(desk / "first.json")
    assert len(repr(report)) < 200
    assert "<table>" in report._repr_html_()
    comparison = diptych.compare(report, diptych.Report.load(desk / "second.json"))
    assert len(repr(comparison)) < 200
    assert "rsum" in comparison._repr_html_()


def test_what_a_notebook_shows_is_escaped() -> None:
    from diptych.index.protocol import Hit, Item

    hits = diptych.Hits((Hit(Item("<script>"), 1.0),), note="<b>")
    assert "<script>" not in hits._repr_html_()
    assert "<b>" not in hits._repr_html_().replace("<b>1.000</b>", "")


def test_an_index_without_a_model_says_so(tmp_path: Path) -> None:
    diptych.create_index(tmp_path / "own", np.eye(2)).close()
    with pytest.raises(diptych.IndexFault, match="model"):
        diptych.search(tmp_path / "own", "words")
