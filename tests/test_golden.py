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
from golden.kept import differences, machine, read_expected, unpack
from golden.reach import RECIPES
from golden.runs import STEPS, outcome, train

EXPECTED = read_expected()
OTHER = differences(
    machine(), EXPECTED["machine"], exact=True
)  # what differs from the machine of the recording


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A present folder with the toys, a cache folder of its own, one thread."""
    unpack("toys", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def check(found: Any, expected: Any) -> None:
    lines = differences(found, expected, exact=not OTHER)
    assert not lines, "\n".join(lines[:20])


def test_every_recipe_is_recorded() -> None:
    assert set(EXPECTED["runs"]) == set(RECIPES)


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_trains_as_ever(name: str, world: Path) -> None:
    train(name, world / "run")
    found, expected = outcome(world / "run"), EXPECTED["runs"][name]
    assert len(found["losses"]["loss"]) == STEPS
    parts = ("config", "losses")
    check({part: found[part] for part in parts}, {part: expected[part] for part in parts})
    if OTHER:
        pytest.skip(f"fingerprints and validations are those of another machine: {'; '.join(OTHER)}")
    check(found, expected)
