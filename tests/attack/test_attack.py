"""A small budget of the standing attacker: every target, a few inputs each. The long one is ``make attack``."""

from __future__ import annotations

import resource
import time
import warnings
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rivals import SERVER
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
    "model_calls": 10,
}
FEW = 20  # of the others
SECONDS = 30.0  # the long run allows 5; this one shares its cores
GROWTH = 500_000  # kilobytes


@pytest.mark.filterwarnings("ignore")  # of the libraries that read damaged files
@pytest.mark.parametrize(
    "name", sorted(set(TARGETS) - {"tables"})
)  # a table may end this process, if it must be
def test_a_few_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings.simplefilter("ignore")
    monkeypatch.setenv(SERVER, "")  # tests/test_postgres.py compares PostgreSQL with the embedded engine
    monkeypatch.setattr(extra_formats, "SVG_SECONDS", 1)
    with CLOSING:
        attack = TARGETS[name](tmp_path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(INPUTS.get(name, FEW)):
            start = time.monotonic()
            attacked(attack, Random(f"{name} {number}"))
            assert time.monotonic() - start < SECONDS, number
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


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
