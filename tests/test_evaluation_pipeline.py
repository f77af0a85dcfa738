"""The one pipeline of ``diptych evaluate``: several protocols in one go, and inputs without a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import diptych, refused, training
from small import precomputed

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.data.corrections import data_hash, file_hash, text_names
from diptych.data.formats import open_captions
from diptych.errors import DataError, SettingsError
from diptych.evaluation.compare import compare
from diptych.evaluation.evaluate import evaluate
from diptych.evaluation.protocols import EvaluationProtocol
from diptych.evaluation.report import Report
from diptych.evaluation.retrieval import evaluate_scores
from diptych.evaluation.trec import read_qrels, read_runs, write_qrels, write_run
from diptych.model.scores import MatrixScores
from diptych.runs.evaluate import detection_of
from diptych.training.checkpoint import system_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, with the data it was trained on beside it."""
    place = tmp_path_factory.mktemp("pipeline")
    data = precomputed(place / "toy_precomp", train=24, dev=8)
    diptych(*training("vse-plus-plus", data, epochs=1), "--output_dir", place / "run")
    return place / "run"


def test_the_metric_of_a_missing_plugin_is_named(run: Path) -> None:
    files = {path: path.read_text() for path in (run / "run.json", run / "last" / "progress.json")}
    (run / "run.json").write_text(json.dumps({**json.loads(files[run / "run.json"]), "recipe": "kinds"}))
    progress = json.loads(files[run / "last" / "progress.json"])
    (run / "last" / "progress.json").write_text(json.dumps({**progress, "metric": "kind_accuracy"}))
    try:
        said = diptych("evaluate", run, "--bootstrap=0").stderr
        assert "kind_accuracy chose the best epoch" in said
        assert "'kinds'" in said
        (run / "last" / "progress.json").write_text(files[run / "last" / "progress.json"])  # RSUM chose it
        assert "chose the best epoch" not in diptych("evaluate", run, "--bootstrap=0").stderr
    finally:
        for path, content in files.items():
            path.write_text(content)


def test_several_protocols_share_one_loaded_model(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    asked = ("evaluate", run, "--bootstrap=20", "--output", path)
    singles = {}
    for protocol in ("plain", "video"):
        diptych(*asked, f"--protocol={protocol}")
        singles[protocol] = Report.load(path)
    diptych(*asked, "--protocol=plain", "--protocol=video", "--protocol=four-directions")
    both = Report.load(path)
    assert [group.name for group in both.groups][:3] == [
        "plain_retrieval",
        "videos",
        "four-directions_retrieval",
    ]
    for name, value in singles["plain"].metrics.items():
        assert both.metrics[f"plain_{name}"] == both.metrics[f"four-directions_{name}"] == value
    assert both.intervals["plain_rsum"] == singles["plain"].intervals["rsum"]
    assert singles["video"].metrics.items() <= both.metrics.items()


def captions(images: int, per_image: int = 5) -> Captions:
    """Texts of numbered images, of which only the pairing counts."""
    image_of = np.arange(images).repeat(per_image)
    names = [f"i{n}" for n in range(images)]
    texts = [f"text {n}" for n in range(len(image_of))]
    return Captions(
        ArrayStore(np.zeros((images, 1, 1), np.float32)), texts, image_of, names, ["test"] * images
    )


def test_one_call_measures_a_matrix_under_several_protocols(tmp_path: Path) -> None:
    data = captions(20, 2)
    scores = np.random.default_rng(0).standard_normal((20, 40)).astype(np.float32)
    scores[data.image_of, np.arange(40)] += 2
    halves = EvaluationProtocol("halves", folds=2)
    relevant = read_qrels(_qrels(tmp_path, data), data, "texts")
    report = evaluate(scores, data, protocol=["plain", halves], judgements=[relevant], bootstrap=30)
    alone = [
        evaluate_scores(scores, data, protocol="plain", judgements=[relevant], bootstrap=30),
        evaluate_scores(scores, data, protocol=halves, bootstrap=30),
    ]
    for one, name in zip(alone, ("plain", "halves"), strict=True):
        for metric, value in one.metrics.items():
            assert report.metrics[f"{name}_{metric}"] == value
            assert report.intervals.get(f"{name}_{metric}") == one.intervals.get(metric)
    assert report.primary_metric == "plain_rsum"
    assert "halves_qrels_image_to_text_map@r" not in report.metrics  # judged on the whole gallery only
    np.save(tmp_path / "scores.npy", scores)
    assert evaluate(tmp_path / "scores.npy", data, bootstrap=0).metrics["rsum"] == alone[0].metrics["rsum"]
    rows = {row.metric: row for row in compare(report, report, draws=50).rows}
    assert rows["halves_rsum"].queries is not None  # the paired test knows the metric by its own name
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report


def _qrels(folder: Path, data: Captions) -> Path:
    write_qrels(folder / "qrels", data, "texts")
    return folder / "qrels"


@pytest.mark.parametrize("depth", [10, 100])
def test_a_run_is_written_and_read(depth: int, tmp_path: Path) -> None:
    data = captions(30, 2)
    scores = np.random.default_rng(1).standard_normal((30, 60)).astype(np.float32)
    paths = {"image_to_text": tmp_path / "i2t.run", "text_to_image": tmp_path / "t2i.run"}
    for name, path in paths.items():
        side = "images" if name == "image_to_text" else "texts"
        write_run(path, MatrixScores(scores), data, side, depth=depth)  # type: ignore[arg-type]
    assert paths["image_to_text"].read_text().splitlines()[0].split()[::3] == ["i0", "1"]
    expected = evaluate(scores, data, bootstrap=0).metrics
    found = evaluate(read_runs(data, **paths), data, bootstrap=0)
    recalls = {name: value for name, value in expected.items() if "rank" not in name or depth == 100}
    assert recalls.items() <= found.metrics.items()
    assert found.card.described()["score"] == "run"
    if depth == 100:  # one run that lists every pair tells both directions
        single = evaluate(read_runs(data, text_to_image=paths["text_to_image"]), data, bootstrap=0)
        assert single.metrics == expected


def test_judgements_of_a_file_are_those_of_the_pairs(tmp_path: Path) -> None:
    data = captions(12, 3)
    scores = np.random.default_rng(2).standard_normal((12, 36))
    relevant = read_qrels(_qrels(tmp_path, data), data, "texts")
    assert relevant.image_to_text == {n: frozenset(range(3 * n, 3 * n + 3)) for n in range(12)}
    metrics = evaluate(scores, data, judgements=[relevant], bootstrap=0).metrics
    for name in ("text_to_image_recall@5", "image_to_text_recall@1"):
        assert metrics[f"qrels_{name}"] == pytest.approx(metrics[name])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("i0#0 Q0 i9 1 0.5 x", "i9"),
        ("i0#0 Q0 i1 1 0.5", "line 1"),
        ("i0#0 Q0 i1 1 best x", "line 1"),
        ("i0#0 Q0 i1 1 nan x", "line 1"),
        ("i0#0 Q0 i1 1 inf x", "line 1"),
        ("i0#0 Q0 i1 1 0.5 x\ni0#0 Q0 i1 2 0.4 x", "line 2"),
        ("i0#0 Q0 i1 1 0.5 x", "'i0#0'"),
    ],
    ids=["unknown item", "five words", "no number", "NaN", "infinity", "twice", "too short"],
)
def test_runs_that_cannot_be_ranked(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.run").write_text(line)
    with pytest.raises(DataError, match=said):
        read_runs(captions(3, 1), text_to_image=tmp_path / "bad.run")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--protocol=plain", "--protocol=plain"), "plain"),
        (("--protocol=hashing", "--ties=strict"), "hashing"),
        (("--protocol=sts", "--data=emoji"), "sts"),
        (("--ray=auto",), "--ray"),
    ],
    ids=["twice", "ties", "data", "ray"],
)
def test_options_that_do_not_go_together(run: Path, asked: tuple[str, ...], said: str) -> None:
    assert said in refused("evaluate", run, *asked)


def test_a_single_result_gives_an_upper_bound_of_what_it_takes_to_see_a_gain(run: Path) -> None:
    shown = diptych("evaluate", run, "--bootstrap=0", "--detect=5").output
    assert "to see a gain of 5" in shown
    assert "upper bound" in shown
    assert "not counted" in shown


def test_one_image_says_nothing_of_what_it_takes() -> None:
    with pytest.raises(SettingsError, match="two images"):
        detection_of(evaluate_scores(np.ones((1, 5)), np.zeros(5, np.int64), bootstrap=0), 1.0)


def test_runs_that_differ_only_in_the_seed_are_one_system(run: Path, tmp_path: Path) -> None:
    data = run.parent / "toy_precomp"
    for name, extra in (("other", ("--seed=1",)), ("wider", ("--seed=1", "--margin=0.3"))):
        diptych(*training("vse-plus-plus", data, epochs=1), *extra, "--output_dir", tmp_path / name)
    systems = [system_of(one) for one in (run, tmp_path / "other", tmp_path / "wider", tmp_path)]
    assert systems[0] == systems[1] != systems[2]
    assert systems[3] == ""


def test_corrections_of_other_data_are_refused_and_theirs_are_on_the_card(run: Path, tmp_path: Path) -> None:
    data = run.parent / "toy_precomp"
    whole = open_captions(data)
    part = whole.split("val")
    image, text = part.image_ids[0], text_names(part)[int(np.flatnonzero(part.image_of == 1)[0])]
    file, path = tmp_path / "seen.csv", tmp_path / "report.json"
    asked = ("evaluate", run, "--bootstrap=0", "--judgements", file, "--output", path)
    for digest in (data_hash(whole), "f00d"):
        file.write_text(f"image_id,text_id,verdict,by,data\n{image},{text},matches,me,{digest}\n")
        if digest == "f00d":
            assert "f00d" in refused(*asked)
            continue
        shown = diptych(*asked).output
        report = Report.load(path)
        assert f"{file} ({file_hash(file)})" in shown
        assert report.card.judged == (f"{file} ({file_hash(file)})",)  # type: ignore[union-attr]
        names = ("text_to_image_recall@10", "seen_text_to_image_recall@10")
        plain, with_matches = (report.metrics[name] for name in names)
        assert with_matches >= plain
    with pytest.raises(DataError, match="f00d"):
        evaluate(np.zeros((8, 40)), data, split="val", judgements=[str(file)])
