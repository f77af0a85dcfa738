"""Ablations: every row of every table runs, published and measured side by side; finished rows are reused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from statistics import mean, stdev

import pytest
from commands import CODER, TINY, diptych, flags, refused
from small import precomputed

from diptych.evaluation.significance import mean_and_interval
from diptych.recipes import RECIPES
from diptych.recipes.recipe import RECALLS
from diptych.training.checkpoint import read_run
from diptych.training.log import read_log

QUICK = {**TINY, "epochs": 1, "log_steps": 20}
TABLES = [(name, table) for name in ("vse-infinity", "coder") for table in RECIPES[name].tables]
BY_SIZE = [("coder", "4")]  # its rows need 20,000 pairs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", train=26, dev=10)  # 130 texts


def arguments(recipe: str, table: str, data: Path, folder: Path) -> list[object]:
    own = {**QUICK, **(CODER if recipe == "coder" else {})}
    if (recipe, table) == ("coder", "f3"):
        own["queue_size"] = 128  # not less than the largest batch of its rows
    return ["ablate", recipe, "--table", table, "--data", data, "--output_dir", folder, *flags(own)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(said: str) -> list[tuple[str, list[str], list[str]]]:
    """(name, published cells, measured cells) of each row of a printed table."""
    lines = [line for line in said.splitlines() if line.startswith("|")][2:]
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert all(cells(a)[1] == "published" and cells(b)[1] == "measured" for a, b in pairs)
    return [(cells(a)[0], cells(a)[2:], cells(b)[2:]) for a, b in pairs]


@pytest.mark.parametrize(("recipe", "table"), [pair for pair in TABLES if pair not in BY_SIZE])
def test_every_row_runs_and_is_reused(recipe: str, table: str, data: Path, tmp_path: Path) -> None:
    known = RECIPES[recipe].tables[table]
    command = arguments(recipe, table, data, tmp_path)
    said = diptych(*command).stdout
    shown = rows_of(said)
    assert [name for name, _, _ in shown] == [row.name for row in known.rows]
    assert known.title in said
    assert known.protocol in said
    results = json.loads((tmp_path / f"table-{table}.json").read_text())
    for (name, published, measured), row in zip(shown, known.rows, strict=True):
        assert published == [f"{row.published[key]:.1f}" if key in row.published else "" for key in RECALLS]
        assert measured == [f"{results[name][0][key]:.1f}" for key in RECALLS]
    runs = {path.name.split("-")[0]: path for path in tmp_path.iterdir() if path.is_dir()}
    assert len(runs) == len(known.rows)
    for number, row in enumerate(known.rows, 1):
        settings = read_run(runs[str(number)])["settings"]
        assert {key: settings[key] for key in row.changes} == dict(row.changes)
        best = max(
            line["validation_rsum"] for line in read_log(runs[str(number)] / "log.jsonl") if "best" in line
        )
        assert results[row.name][0]["rsum"] == best

    states = {path: (path / "last" / "progress.json").stat().st_mtime_ns for path in runs.values()}
    shutil.rmtree(runs["1"])  # the others are finished
    assert rows_of(diptych(*command).stdout) == shown
    again = {path: (path / "last" / "progress.json").stat().st_mtime_ns for path in runs.values()}
    assert [path for path in states if states[path] != again[path]] == [runs["1"]]


def test_more_prototypes_than_the_data_allow(tmp_path: Path, data: Path) -> None:
    command = arguments("coder", "4", data, tmp_path / "runs")
    sentence = refused(*command)
    assert "5000" in sentence
    assert "130" in sentence
    assert not (tmp_path / "runs").exists()  # refused before any row runs
    shown = RECIPES["coder"].tables["4"].rows
    assert [row.changes["clusters"] for row in shown] == [5000, 10_000, 15_000, 20_000]


def test_several_seeds_of_one_row(data: Path, tmp_path: Path) -> None:
    command = [*arguments("vse-infinity", "3", data, tmp_path), "--seeds", 3, "--row", "BiGRU"]
    (name, _, measured), *rest = rows_of(diptych(*command).stdout)
    assert (name, rest) == ("BiGRU", [])
    values = [run["rsum"] for run in json.loads((tmp_path / "table-3.json").read_text())["BiGRU"]]
    assert len(values) == 3
    (tmp_path / "table-3.json").write_text('{"another row": []}')  # left by an earlier call with --row
    diptych(*command)
    assert set(json.loads((tmp_path / "table-3.json").read_text())) == {"another row", "BiGRU"}
    assert measured[-1] == f"{mean(values):.1f} ± {4.303 * stdev(values) / 3**0.5:.1f}"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        f"2-bigru-seed{seed}" for seed in range(3)
    ]
    assert not list(
        tmp_path.rglob("*.onnx")
    )  # encoders for searching are written for runs that a person asked for


def interrupt_after(log: Path, lines: int) -> threading.Thread:
    """Ctrl-C, as soon as a log has so many lines."""

    def press() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < lines:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_and_the_same_command_again(data: Path, tmp_path: Path) -> None:
    command = [
        *arguments("vse-infinity", "3", data, tmp_path),
        "--log_steps",
        1,
        "--epochs",
        3,
        "--row",
        "BiGRU",
    ]
    whole = [
        *arguments("vse-infinity", "3", data, tmp_path / "whole"),
        "--log_steps",
        1,
        "--epochs",
        3,
        "--row",
        "BiGRU",
    ]
    pressed = interrupt_after(tmp_path / "2-bigru-seed0" / "log.jsonl", 5)
    said = diptych(*command, status=130)
    pressed.join(5)
    run = tmp_path / "2-bigru-seed0"
    assert said.stderr.splitlines()[-1] == f"stopped and saved in {run}: run the same command again to go on."
    assert not (tmp_path / "table-3.json").exists()
    assert rows_of(diptych(*command).stdout) == rows_of(diptych(*whole).stdout)


def test_intervals_of_few_runs() -> None:
    assert mean_and_interval([1.0]) == "1.0"
    assert mean_and_interval([1.0, 3.0]) == "2.0 ± 12.7"  # t = 12.706, standard error 1
    assert mean_and_interval([5.0] * 4) == "5.0 ± 0.0"
    many = [0.0] * 6 + [10.0] * 5  # 11 runs: t = 2.228
    assert mean_and_interval(many) == f"{mean(many):.1f} ± {2.228 * stdev(many) / 11**0.5:.1f}"


def test_mistakes_are_named(data: Path, tmp_path: Path) -> None:
    command = arguments("vse-infinity", "2", data, tmp_path)
    assert "nothing" in refused(*command, "--row", "nothing")
    wrong = ("ablate", "vse-infinity", "--table", 9, "--data", data, "--output_dir", tmp_path)
    assert "'9'" in refused(*wrong)
    diptych(*command, "--row", "none")
    sentence = refused(*command, "--row", "none", "--margin", 0.3)
    assert "--output_dir" in sentence
