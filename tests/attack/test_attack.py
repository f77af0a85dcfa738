"""A small budget of the standing attacker: every target, a few inputs each. The long one is ``make attack``."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from random import Random

import page
import pytest
import watch
from hypothesis import given, settings
from hypothesis import strategies as st
from rivals import SERVER
from strangers import SECRET, fence
from targets import CLOSING, FILTER, TARGETS, attacked

from diptych.data.decode import extra_formats
from diptych.errors import QueryError
from diptych.index.query.filters import matches, parse_filter
from diptych.index.query.parse import parse_query

INPUTS = {
    "filters": 300,
    "like": 300,
    "queries": 300,
    "pickles": 300,
    "pictures": 150,
    "runs": 60,
    "readers": 60,
    "matlab": 4,  # a process each
    "bombs": 6,
    "hostile_folders": 210,  # a few cannot be made
    "model_calls": 10,
}
FEW = 20  # of the others
SECONDS = 10.0  # of a core; the long run allows 5, but imports before it begins
GROWTH = 500_000  # kilobytes


@pytest.mark.filterwarnings("ignore")  # of the libraries that read damaged files
@pytest.mark.parametrize(
    "name", sorted(set(TARGETS) - {"tables"})
)  # a table may end this process, if it must be
def test_a_few_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings.simplefilter("ignore")
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))  # targets set it too
    monkeypatch.setenv(SERVER, "")  # tests/test_postgres.py compares PostgreSQL with the embedded engine
    monkeypatch.setattr(extra_formats, "SVG_SECONDS", 1)
    with CLOSING:
        attack = TARGETS[name](tmp_path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(INPUTS.get(name, FEW)):
            start = sum(os.times()[:4])
            attacked(attack, Random(f"{name} {number}"))
            assert sum(os.times()[:4]) - start < SECONDS, number
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="what a process does is read from /proc")


@LINUX
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("time.sleep(60)", "waited for 0.5 s without using a core"),
        ("end = time.monotonic() + 60\nwhile time.monotonic() < end: pass", "took more than 1 s of a core"),
        ("subprocess.run(['sleep', '60'])", "waited for 0.5 s without using a core"),
        ("subprocess.run(['sh', '-c', 'while :; do :; done'])", "took more than 1 s of a core"),
        ("large = bytearray(600_000_000)\nfor _ in range(10**9): pass", "grew by"),
        (
            "end = time.process_time() + 0.7\nwhile time.process_time() < end: pass",
            None,
        ),  # and waits for no one
    ],
)
def test_the_watch_tells_a_wait_from_work(
    code: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other work on the machine delays a process, and is no finding."""
    monkeypatch.setattr(watch, "HANGS", 0.5)
    monkeypatch.setattr(watch, "SECONDS", 1.0)
    at, count = tmp_path / "at", "open(sys.argv[1], 'w', 1).write(f'7 3 {watch._memory(os.getpid())}\\n')"
    modules = f"import os, subprocess, sys, time\nsys.path.append({str(Path(watch.__file__).parent)!r})\nimport watch"
    script = f"{modules}\n{count}\n{code}"
    command = [sys.executable, "-c", script, str(at)]
    with subprocess.Popen(command, start_new_session=True) as process:
        number, refused, said = watch._watched(process, at, watch.Tally(), time.monotonic() + 120)
    assert (number, refused) == (7, 3)
    assert said is None if why is None else str(said).startswith(why)


@pytest.mark.parametrize(("found", "inputs", "status"), [([], 5, 0), (["x 1: raised"], 5, 1), ([], 4, 1)])
def test_a_run_ends_with_what_it_found(
    found: list[str], inputs: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tallies = {"some_files": watch.Tally(inputs, 2, found, 3_000_000, 0.25)}
    assert watch.report(tallies, 1.0, Namespace(least=5, docs=False)) == status
    said = capsys.readouterr().out
    assert f"| some files | {inputs} | 2 | {len(found)} | 3 | 0.2 |" in said
    assert ("FINDING x 1: raised" in said) == bool(found)
    assert ("FEWER INPUTS" in said) == (inputs < 5)


def test_a_table_replaces_the_one_of_the_page(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("a\n<!-- watch -->\n| old |\n<!-- end -->\nb\n<!-- wire -->\n<!-- end -->\n")
    page.put("watch", ["| new |", "| \\1 |"], file)
    assert (
        file.read_text()
        == "a\n<!-- watch -->\n| new |\n| \\1 |\n<!-- end -->\nb\n<!-- wire -->\n<!-- end -->\n"
    )
    for name in ("watch", "wire"):
        assert page.PAGE.read_text("utf-8").count(f"<!-- {name} -->") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a read is noticed by inotify")
@pytest.mark.parametrize(
    "trespass",
    [
        lambda folder: (folder / "thesis.tex").read_bytes(),
        lambda folder: os.open(folder / "index" / "link", os.O_RDONLY),
        lambda folder: os.utime(folder / "thesis.tex", (0, 0)),
        lambda folder: (folder / "thesis.tex").write_bytes(SECRET),
        lambda folder: os.truncate(folder / "thesis.tex", 1),
        lambda folder: (folder / "thesis.tex").unlink(),
        lambda folder: (folder / "new").touch(),
        lambda folder: os.rename(folder / "index", folder / "other"),
    ],
)
def test_the_fence_would_notice(trespass: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "link").symlink_to(tmp_path / "thesis.tex")
    with fence(tmp_path):
        (tmp_path / "index" / "own").write_bytes(b"")
        assert len(list((tmp_path / "index").iterdir())) == 2
    with pytest.raises((AssertionError, FileNotFoundError)), fence(tmp_path):
        trespass(tmp_path)


@settings(max_examples=100)
@given(st.lists(st.one_of(st.sampled_from(FILTER), st.text(max_size=8)), max_size=20))
def test_any_filter_is_read_or_refused(pieces: list[str]) -> None:
    text = " ".join(pieces)
    try:
        tree = parse_filter(text)
    except QueryError as error:
        assert error.position is None or 0 <= error.position <= len(text)  # noqa: PT017
        return
    assert matches(tree, {"price": 5, "name": "red"}) in (True, False)


@settings(max_examples=100)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_query_is_read_or_refused(text: str) -> None:
    try:
        assert parse_query(text, paths=False).terms
    except QueryError as error:
        assert error.position is None or 0 <= error.position <= len(text)  # noqa: PT017
