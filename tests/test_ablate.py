"""The commands ablate and reproduce: published and measured side by side; finished rows are reused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
from commands import CODER, TINY, diptych, flags, refused
from small import bert_folder, pictures, precomputed, texts
from small_senteval import write_senteval

from diptych.evaluation.significance import mean_and_interval
from diptych.runs.columns import counts_of
from diptych.runs.table_plan import table_data
from diptych.tables import tables_of
from diptych.training.checkpoint import read_run
from diptych.training.log import read_log

QUICK = {**TINY, "epochs": 1, "log_steps": 20}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", train=26, dev=10, testall=10)
    for part in ("ims.npy", "caps.txt"):
        (folder / f"testall_{part}").rename(folder / f"test_{part}")
    return folder


def arguments(paper: str, table: str, data: Path, folder: Path, **changes: object) -> list[object]:
    own = {**QUICK, **(CODER if paper == "coder" else {}), **changes}
    return ["ablate", paper, "--table", table, "--data", data, "--output_dir", folder, *flags(own)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(folder: Path, table: str) -> list[tuple[str, list[str], list[str]]]:
    """(name, published cells, measured cells) of each row of a saved table."""
    content = (folder / f"table-{table}.md").read_text("utf-8")
    lines = [line for line in content.splitlines() if line.startswith("|")][2:]
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert all(cells(a)[1] == "published" and cells(b)[1] == "measured" for a, b in pairs)
    return [(cells(a)[0], cells(a)[2:], cells(b)[2:]) for a, b in pairs]


def test_every_row_runs_and_is_reused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = shutil.copytree(data, tmp_path / "own" / data.name)
    known = tables_of("vse-infinity")["2"]
    command = arguments("vse-infinity", "2", data, tmp_path)
    said = diptych(*command).stdout
    assert known.title in said
    assert known.source in said
    shown = rows_of(tmp_path, "2")
    results = json.loads((tmp_path / "table-2.json").read_text())["rows"]
    for (name, published, measured), row in zip(shown, known.rows, strict=True):
        assert name == row.name
        assert published == [f"{value:.1f}" for value in row.published["coco"].values()]
        (run,) = results[name]["measured"]["coco"]
        assert measured == [f"{run[key]:.1f}" for key in known.groups[0].columns]
    runs = {row.name: tmp_path / f"toy-precomp-{end}-seed0" for row, end in zip(
        known.rows, ("none", "visual", "visual-plus-text"), strict=True)}  # fmt: skip
    for row in known.rows:
        settings = read_run(runs[row.name])["settings"]
        assert {key: settings[key] for key in row.switches} == dict(row.switches)
    # what is measured is the test split, at the epoch that validation chose
    report = diptych("evaluate", runs["none"], "--data", data, "--split", "test", "--bootstrap", 0).stdout
    assert f"{results['none']['measured']['coco'][0]['rsum']:.1f}" in report
    assert list(read_log(runs["none"] / "log.jsonl"))

    states = {path: (path / "last" / "progress.json").stat().st_mtime_ns for path in runs.values()}
    shutil.rmtree(runs["none"])  # the others are finished
    diptych(*command)
    assert rows_of(tmp_path, "2") == shown
    again = {path: (path / "last" / "progress.json").stat().st_mtime_ns for path in runs.values()}
    assert [path for path in states if states[path] != again[path]] == [runs["none"]]
    with monkeypatch.context() as patch:  # finished and measured: no model is built, no run is opened
        for name in ("start_or_resume", "evaluate_runs"):
            patch.delattr(f"diptych.runs.ablate.{name}")
        patch.setattr("diptych.runs.table_plan._check_built", None)
        diptych(*command)
    assert rows_of(tmp_path, "2") == shown
    for split in ("test", "train"):
        file = data / f"{split}_caps.txt"
        file.write_text("\n".join(reversed(file.read_text().splitlines())) + "\n")
        if split == "test":
            diptych(*command)
            assert rows_of(tmp_path, "2") != shown  # measured again
    assert "the data changed" in refused(*command)


def test_folders_of_earlier_versions_and_of_other_tables_are_found(data: Path, tmp_path: Path) -> None:
    command = arguments("vse-infinity", "2", data, tmp_path)
    diptych(*command, "--row", "none")
    (tmp_path / "toy-precomp-none-seed0").rename(tmp_path / "1-none-seed0")
    (tmp_path / "table-2.json").write_text('{"none": [{"rsum": 1.0}]}')
    diptych(*command, "--row", "none")
    assert sorted(path.name for path in tmp_path.iterdir() if (path / "run.json").exists()) == [
        "1-none-seed0"
    ]
    assert json.loads((tmp_path / "table-2.json").read_text())["earlier"] == {"none": [{"rsum": 1.0}]}
    diptych(
        *arguments("vse-infinity", "sides", data, tmp_path, size_augmentation="none"), "--row", "GPO, GPO"
    )
    assert sorted(path.name for path in tmp_path.iterdir() if (path / "run.json").exists()) == [
        "1-none-seed0"
    ]


def test_several_seeds_of_one_row(data: Path, tmp_path: Path) -> None:
    command = [*arguments("vse-infinity", "3", data, tmp_path), "--seeds", 3, "--row", "BiGRU, region"]
    diptych(*command)
    ((name, _, measured),) = rows_of(tmp_path, "3")
    assert name == "BiGRU, region"
    content = json.loads((tmp_path / "table-3.json").read_text())
    values = [run["image_to_text_recall@1"] for run in content["rows"][name]["measured"]["coco"]]
    assert len(values) == 3
    assert measured[0] == f"{mean(values):.1f} ± {4.303 * stdev(values) / 3**0.5:.1f}"
    content["rows"] = {"another row": {}}  # left by an earlier call with --row
    (tmp_path / "table-3.json").write_text(json.dumps(content))
    diptych(*command)
    assert set(json.loads((tmp_path / "table-3.json").read_text())["rows"]) == {"another row", name}
    assert sorted(path.name for path in tmp_path.iterdir() if (path / "run.json").exists()) == [
        f"toy-precomp-bigru-region-seed{seed}" for seed in range(3)
    ]
    assert not list(tmp_path.rglob("*.onnx"))  # encoders for searching are for runs that a person asked for


def test_flag_row_preset_default(data: Path, tmp_path: Path) -> None:
    """A flag wins over the row, the row over the preset; a varied setting wins over its own row."""
    command = [*arguments("coder", "3", data, tmp_path, temperature=0.2), "--row", "DCL_I"]
    said = diptych(*command, "--preset", "coco-bigru", "--concept_vectors", "glove").stdout
    assert re.search(r"^DCL_I: .* its own clusters, concept_vectors\.$", said, re.MULTILINE)
    settings = read_run(tmp_path / "toy-precomp-dcl-i-seed0")["settings"]
    assert (settings["temperature"], settings["diversity"], settings["clusters"]) == (0.2, "none", 6)
    assert settings["contrast_margin"] == 0.3
    said = diptych(
        *arguments("coder", "3", data, tmp_path / "b", diversity="entropy"), "--row", "DCL_I"
    ).stdout
    assert "DCL_I: a flag overrules its own diversity." in said


def test_rows_that_are_published_only_need_no_data(tmp_path: Path) -> None:
    said = diptych("reproduce", "coder", "--table", "f4", "--row", "IMRAM", "--output_dir", tmp_path).stdout
    assert "484.2" in said
    assert not (tmp_path / "figure-f4.svg").exists()
    assert (
        "published only"
        in diptych("reproduce", "coder", "--table", "f4", "--row", "IMRAM", "--dry_run").stdout
    )


def test_a_setting_is_varied(data: Path, tmp_path: Path) -> None:
    own = flags({**QUICK, **CODER, "concept": False, "prototypes": False})
    command = [
        "ablate",
        "coder",
        "--data",
        data,
        "--output_dir",
        tmp_path,
        "--vary",
        "epsilon=0.05,0.2",
        *own,
    ]
    said = diptych(*command, "--format", "markdown").stdout
    assert "coder, epsilon = 0.05" in said
    assert read_run(tmp_path / "toy-precomp-coder-epsilon-0-2-seed0")["settings"]["epsilon"] == 0.2
    latex = diptych(*command, "--format", "latex").stdout
    assert r"\begin{tabular}{llrrrrrrr}" in latex
    assert "epsilon = 0.05 & measured" in latex


def test_without_a_table_the_recipe_is_varied_once(data: Path, tmp_path: Path) -> None:
    """Also a recipe that one table alone has; a row that is asked for twice is one row."""
    own = ["--data", data, "--output_dir", tmp_path, *flags({**QUICK, "depth": 0})]
    said = diptych("ablate", "cookie-match", "--vary", "dim=8,16", *own, "--dry_run").stdout
    assert "measured: cookie-match, dim = 8 (data), cookie-match, dim = 16 (data)." in said
    command = [*arguments("vse-infinity", "2", data, tmp_path), "--row", "none", "--row", "none"]
    assert "measured: none (COCO 1K)." in diptych(*command, "--dry_run").stdout


def test_rows_that_differ_in_what_is_varied_have_its_values_as_names(data: Path, tmp_path: Path) -> None:
    """A row "ε = 0.1, epsilon = 0.3" would be neither; a row that sets something else too keeps its name."""
    command = ["--vary", "epsilon=0.3,0.4", "--dry_run"]
    said = diptych(*arguments("coder", "sf2", data, tmp_path), *command).stdout
    assert "measured: epsilon = 0.3 (Flickr30K), epsilon = 0.4 (Flickr30K)." in said
    said = diptych(*arguments("coder", "3", data, tmp_path), "--row", "DCL_I", *command).stdout
    assert "measured: DCL_I, epsilon = 0.3 (Flickr30K), DCL_I, epsilon = 0.4 (Flickr30K)." in said


def test_a_path_alone_is_not_read_as_another_form(data: Path, tmp_path: Path) -> None:
    """Regions are no grid: rows of grid features want their own data; a table of one form takes the path for it."""
    said = diptych(*arguments("vse-infinity", "3", data, tmp_path), "--dry_run").stdout
    assert "measured: Transformer, region (COCO 1K), BiGRU, region (COCO 1K)." in said
    assert "for want of data: --data coco-grid=PATH." in said
    table = tables_of("cusa")["12"]
    assert table_data(table, {"": "photos"}) == {"coco-pictures": "photos"}


def test_a_recipe_is_varied_on_several_data(data: Path, tmp_path: Path) -> None:
    """Without a table, data have any names, columns of their own and no protocol of a paper."""
    command = ["--vary", "dim=8,16", "--data", data, "--data", f"own-2={data}", "--dry_run", *flags(TINY)]
    for name in (["ablate", "sgr"], ["reproduce", "vse-infinity"]):
        said = diptych(*name, *command).stdout
        assert f"measured beside data: {data}, split test, protocol plain." in said
        assert f"measured beside own-2: {data}, split test, protocol plain." in said


def test_a_flag_names_a_file_for_each_data_set(data: Path, tmp_path: Path) -> None:
    """A later call on one of the data keeps the columns of the other."""
    own = {"similarity_dim": 8, "text_teacher": bert_folder(tmp_path / "bert")}
    other = precomputed(tmp_path / "other", train=25, dev=10, testall=10)
    for name, images in (("f30k", 26), ("coco", 25)):
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(0).random((images, 4), np.float32))
    command = [*arguments("cusa", "8", f"f30k={data}", tmp_path / "runs", **own), "--row", "SGR + CSA"]
    command += ["--image_teacher", tmp_path / "{data}.npy", "--split", "val"]
    diptych(*command, "--data", f"coco={other}")
    for name in ("f30k", "coco"):
        settings = read_run(tmp_path / "runs" / f"{name}-sgr-plus-csa-seed0")["settings"]
        assert settings["image_teacher"] == str(tmp_path / f"{name}.npy")
    diptych(*command)
    content = json.loads((tmp_path / "runs" / "table-8.json").read_text())
    assert set(content["columns"]) == set(content["rows"]["SGR + CSA"]["measured"]) == {"coco", "f30k"}


def test_what_differs_from_the_preset_is_said(data: Path, tmp_path: Path) -> None:
    """Of rows that take their recipe's defaults, and of the rows that a mean is made of."""
    command = arguments("coder", "2", data, tmp_path)
    said = "rows without a preset have their recipe's defaults; reproduce takes the preset paper."
    assert said in diptych(*command, "--row", "DCL", "--dry_run").stdout
    assert said not in diptych(*command, "--row", "DCL", "--preset", "f30k-bigru", "--concept_vectors", "glove",
                               "--dry_run").stdout  # fmt: skip
    table = [*arguments("vse-infinity", "5", data, tmp_path, learning_rate=0.1), "--row"]
    assert "two models: a flag overrules its own epochs, learning_rate." in diptych(
        *table, "SCAN, BUTD region, two models"
    ).stdout  # fmt: skip


def test_a_mean_of_rows_is_varied_with_them(data: Path, tmp_path: Path) -> None:
    """Noise at two ratios: the ensemble at a ratio is that of its members at that ratio."""
    command = arguments("vse-infinity", "baselines", data, tmp_path)
    command += ["--row", "SCAN", "--row", "CVSE", "--vary", "noise=0:text,0.4:text", "--concept_size", 10]
    said = diptych(*command).stdout
    for row in ("SCAN, noise = 0:text", "SCAN, noise = 0.4:text", "CVSE, noise = 0.4:text"):
        assert row in said
    runs = sorted(path.name for path in tmp_path.iterdir() if (path / "run.json").exists())
    assert len(runs) == 6
    assert (
        read_run(tmp_path / "toy-precomp-scan-text-noise-0-4-text-seed0")["settings"]["noise"] == "0.4:text"
    )


def test_a_dry_run_trains_nothing_and_estimates(data: Path, tmp_path: Path) -> None:
    said = diptych(*arguments("vse-infinity", "2", data, tmp_path / "runs"), "--seeds", 2, "--dry_run").stdout
    assert not (tmp_path / "runs").exists()
    assert re.search(r"^6 runs, about \d+\.\d\d hours .* \d+\.\d\d of CPU time", said, re.MULTILINE)
    assert said.count("vse-infinity  ") == 6
    assert "split test, protocol plain" in said


def test_column_groups(data: Path, tmp_path: Path) -> None:
    """Two data sets: columns of both, a folder for each, and the data that are missing are named."""
    table = ["reproduce", "vse-infinity", "--table", 4, "--row", "VSE++, BUTD region + BiGRU"]
    other = shutil.copytree(data, tmp_path / "other")
    given = ["--protocol", "plain", "--output_dir", tmp_path / "runs", *flags(QUICK)]
    said = diptych(*table, "--data", f"coco={data}", *given).stdout
    assert "not measured, for want of data: --data f30k=PATH." in said
    said = diptych(*table, "--data", f"coco={data}", "--data", f"f30k={other}", *given).stdout
    assert re.search(r"^Flickr30K +i2t R@1 .* RSUM$", said, re.MULTILINE)  # a block for each
    assert "for want of data" not in said
    names = [path.name for path in (tmp_path / "runs").iterdir() if (path / "run.json").exists()]
    assert sorted(names) == [f"{one}-vse-plus-plus-butd-region-plus-bigru-seed0" for one in ("coco", "f30k")]
    table[-1] = "VSE∞, BUTD region + grid + BiGRU"
    said = diptych(
        *table, "--data", f"coco={data}", "--data", f"coco-grid={other}", *given, "--dry_run"
    ).stdout
    assert f"measured beside COCO 1K: {data}, {other}, split test, protocol plain." in said


def interrupt_after(log: Path, lines: int) -> threading.Thread:
    """Ctrl-C, as soon as a log has this many lines."""

    def press() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < lines:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_and_the_same_command_again(data: Path, tmp_path: Path) -> None:
    command = arguments("vse-infinity", "2", data, tmp_path, log_steps=1, epochs=3)
    rows = ["--row", "none", "--row", "visual"]
    first, run = (tmp_path / f"toy-precomp-{name}-seed0" for name in ("none", "visual"))
    pressed = interrupt_after(run / "log.jsonl", 5)
    said = diptych(*command, *rows, status=130)
    pressed.join(5)
    assert said.stderr.splitlines()[-1] == f"stopped and saved in {run}: run the same command again to go on."
    assert not (tmp_path / "table-2.json").exists()
    written = (first / "last" / "progress.json").stat().st_mtime_ns
    diptych(*command, *rows)
    assert (first / "last" / "progress.json").stat().st_mtime_ns == written
    diptych(*arguments("vse-infinity", "2", data, tmp_path / "whole", log_steps=1, epochs=3), *rows)
    assert rows_of(tmp_path, "2") == rows_of(tmp_path / "whole", "2")


def test_intervals_of_few_runs() -> None:
    assert mean_and_interval([1.0]) == "1.0"
    assert mean_and_interval([1.0, 3.0]) == "2.0 ± 12.7"  # t = 12.706, standard error 1
    assert mean_and_interval([5.0] * 4) == "5.0 ± 0.0"
    many = [0.0] * 6 + [10.0] * 5  # 11 runs: t = 2.228
    assert mean_and_interval(many) == f"{mean(many):.1f} ± {2.228 * stdev(many) / 11**0.5:.1f}"


def test_a_mean_alone_takes_the_settings_of_its_members(data: Path, tmp_path: Path) -> None:
    diptych(*arguments("vse-infinity", "baselines", data, tmp_path), "--row", "SCAN")
    assert len([run for run in tmp_path.iterdir() if (run / "run.json").exists()]) == 2


def test_pictures_that_cannot_be_read_are_left_out_as_train_leaves_them_out(tmp_path: Path) -> None:
    """Of tables too: in the plan, the training, the measuring and the counting; --strict_images stops."""
    photos = pictures(tmp_path / "photos", 30)
    lines = [
        json.dumps({"image": path.name, "caption": f"{text} {n}", "split": ("train", "val", "test")[n % 3]})
        for n, path in enumerate(photos)
        for text in texts(2, seed=n)
    ]
    (tmp_path / "photos" / "metadata.jsonl").write_text("\n".join(lines))
    for n in (0, 2):  # of the training and the test split
        photos[n].unlink()
    photos[3].write_bytes(photos[3].read_bytes()[:80])
    command = arguments("vse-infinity", "2", tmp_path / "photos", tmp_path / "runs", image_size=32)
    command += ["--row", "none", "--batch_size", 4]
    assert "picture0.png" in refused(*command, "--strict_images")
    assert "1 run, about" in diptych(*command, "--dry_run").stdout
    assert "left out 2 of 30 pictures" in diptych(*command).stderr
    counted = counts_of(str(tmp_path / "photos"))
    assert (counted["train_images"], counted["train_texts"], counted["test_images"]) == (9, 18, 9)


def test_data_without_what_a_table_counts_are_refused(data: Path, tmp_path: Path) -> None:
    own = ["--output_dir", tmp_path / "runs"]
    assert "STS12" in refused("reproduce", "cookie", "--table", "1b", "--data", f"sts={data}", *own)
    assert "classes" in refused("reproduce", "cusa", "--table", 6, "--data", f"cub={data}", *own)
    assert not (tmp_path / "runs").exists()
    senteval = write_senteval(tmp_path / "senteval", pairs=5)
    (senteval / "downstream" / "STS" / "STSBenchmark" / "sts-test.csv").unlink()
    table = ["reproduce", "cookie", "--table", 1, "--data", f"sts={senteval}", *own, "--format", "markdown"]
    (row,) = [line for line in diptych(*table).stdout.splitlines() if line.startswith("|  | measured | 5 |")]
    assert cells(row)[3] == ""  # what is missing is no zero


def test_mistakes_are_named_before_anything_is_trained(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = arguments("vse-infinity", "2", data, tmp_path / "runs")
    assert "testall" in refused(*command, "--split", "testall")
    assert "coco-1k" in refused(*command, "--protocol", "coco-1k")
    assert "eccv" in refused(*command, "--judgements", "eccv")
    assert "labels" in refused(*arguments("labelwise", "1", data, tmp_path / "runs", dim=16))
    assert "5000" in refused(*arguments("coder", "4", data, tmp_path / "runs", clusters=5000))
    sts = ["ablate", "cusa", "--table", "hosts", "--data", f"f30k={data}", "--data", f"sts={data}"]
    assert "SentEval" in refused(*sts, "--output_dir", tmp_path / "runs", *flags(QUICK))
    folder = write_senteval(tmp_path / "senteval", pairs=5) / "downstream"
    for file in ("STS/STSBenchmark/sts-test.csv", "SICK/SICK_test_annotated.txt"):
        (folder / file).unlink()
    for file in (folder / "STS").glob("STS1*"):
        shutil.rmtree(file)
    said = refused(
        *arguments("cusa", "11", f"coco={data}", tmp_path / "runs"), "--data", f"sts={folder.parent}"
    )
    assert "none of the sets STS12" in said
    products = arguments("cusa", "10", f"coco={data}", tmp_path / "runs", similarity_dim=8)
    (tmp_path / "sop" / "chair").mkdir(parents=True)
    (tmp_path / "sop" / "Ebay_test.txt").write_text(
        "image_id class_id super_class_id path\n1 1 1 chair/1.png\n"
    )
    assert "no features" in refused(*products, "--data", f"sop={tmp_path / 'sop'}", "--row", "SGR + CSA")
    hosts = arguments("cusa", "hosts", f"f30k={data}", tmp_path / "runs")
    wrongs = [("SGR", "text", "bigru"), ("SGR + USA", "image", "lite0"), ("SGR + USA", "image", "none.npy")]
    for name, teacher, wrong in wrongs:
        said = refused(*hosts, "--row", "SGR", "--row", name, f"--{teacher}_teacher", wrong)
        assert "teach" in said
    for content, words in (
        (np.arange(7), "7 rows"),
        (np.full(130, 26), "row 26"),
        (np.full(26, -1), "row -1"),
    ):
        np.save(tmp_path / "noise.npy", content)
        assert words in refused(*command, "--noise", tmp_path / "noise.npy")
    assert "no preset 'cnn'" in refused(*command, "--preset", "cnn")
    assert "--table" in refused("ablate", "coder", "--data", data, "--output_dir", tmp_path / "runs")
    assert "named coco" in refused(*command, *("--data", f"coco={data}") * 2)
    with monkeypatch.context() as patch:
        for name in ("textblob", "textblob.taggers"):
            patch.setitem(sys.modules, name, None)
        assert "'diptych[concepts]'" in refused(*arguments("coder", "2", data, tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
    diptych(*command, "--row", "none")
    assert "--output_dir" in refused(*command, "--row", "visual", "--row", "none", "--margin", 0.3)
    assert [run.name for run in (tmp_path / "runs").glob("toy-*")] == ["toy-precomp-none-seed0"]
