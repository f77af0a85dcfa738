"""Golden runs and fixtures: what was recorded once comes out again, bit for bit.

``tests/golden/record.py`` made ``expected.json`` and the archives beside it. Losses, vectors and scores are compared
exactly on the kind of machine that recorded them, and up to the last digits elsewhere. What is saved is compared
exactly everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.answers import FIXTURES, of_dump
from golden.kept import differences, machine, read_expected, unpack
from golden.reach import RECIPES
from golden.runs import STEPS, outcome, train
from servers import Server

EXPECTED = read_expected()
OTHER = differences(machine(), EXPECTED["machine"])  # from the machine of the recording
RTOL = 1e-5  # between machines that round differently
ROUGH = {"coder": 1e-3, "coder-literal": 1e-3}  # m_dcl: 2e-4 apart with ATEN_CPU_CAPABILITY=default
NEEDS = {"graph": "usearch", "vectors": "pyarrow"}
FRAGILE = ("best", "final", "state", "validations", "report", "answers")  # what a last bit can change


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A present folder with the toys, a cache folder of its own, one thread."""
    unpack("toys", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIPTYCH_CACHE", "caches")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def check_saved(found: Any, expected: Any) -> None:
    lines = differences(found, expected)
    assert not lines, "\n".join(lines[:20])


def check_computed(found: dict[str, Any], expected: dict[str, Any], rtol: float = RTOL) -> None:
    """Bit for bit where the machine is that of the recording, else up to rounding, as far as that goes."""
    if not OTHER:
        return check_saved(found, expected)
    firm = [{name: part[name] for name in part if name not in FRAGILE} for part in (found, expected)]
    lines = differences(*firm, rtol=rtol)
    assert not lines, "\n".join(lines[:20])
    pytest.skip(
        f"numbers agree up to rounding, nothing more was compared: this machine is another ({'; '.join(OTHER)})"
    )


def test_every_recipe_and_fixture_is_recorded() -> None:
    assert set(EXPECTED["runs"]) == set(RECIPES)
    assert set(EXPECTED["fixtures"]) == {*FIXTURES, "postgres"}
    steps = {name: len(run["losses"]["loss"]) for name, run in EXPECTED["runs"].items()}
    assert set(steps.values()) == {STEPS}, steps


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_trains_as_ever(name: str, world: Path) -> None:
    train(name, world / "run")
    check_computed(outcome(world / "run"), EXPECTED["runs"][name], ROUGH.get(name, RTOL))


@pytest.mark.parametrize("name", list(FIXTURES))
def test_a_fixture_answers_as_ever(name: str, world: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    archive, ask = FIXTURES[name]
    for one in sorted({"models", archive}):
        unpack(one, world)
    found, expected = ask(), EXPECTED["fixtures"][name]
    check_saved(found["saved"], expected["saved"])
    check_computed(found["computed"], expected["computed"])


def test_a_resumed_run_ends_like_one_that_was_not_stopped() -> None:
    """Of the recordings: the fixture's run, resumed, and the whole run of the same recipe."""
    check_saved(EXPECTED["fixtures"]["run"]["computed"], EXPECTED["runs"]["cusa-saf"])


def test_a_restored_database_answers_as_ever(server: Server) -> None:
    found, expected = of_dump(server), EXPECTED["fixtures"]["postgres"]
    check_saved(found["saved"], expected["saved"])
    check_computed(found["computed"], expected["computed"])
