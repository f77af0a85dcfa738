"""The recall of an approximate index: measured when it is built, kept with it, and set by a target."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from diptych.cli import main as _main  # noqa: F401  the commands need the package's settings
from diptych.cli.index import index as commands
from diptych.errors import IndexFault, SettingsError
from diptych.index.capabilities import Exam, K
from diptych.index.engines.embedded import approximate
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item, Recall
from diptych.web.monitoring import Metrics

COUNT, D = 4000, 64


def unit_rows(count: int, seed: int) -> Any:
    rows = np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Vectors without structure: the hardest for a graph."""
    place = tmp_path / "i"
    with EmbeddedIndex.create(place, D) as index:
        index.add([Item(f"i{n}") for n in range(COUNT)], unit_rows(COUNT, 0))
        index.add([Item(f"t{n}", "text", image_id=f"i{n}") for n in range(300)], unit_rows(300, 1))
    return place


def test_a_starved_graph_shows_its_recall_and_a_target_restores_it(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approximate, "WIDTH_SEARCH", 8)
    with EmbeddedIndex.open(filled, writable=True) as index:
        index.build_graph("image")
        starved = index.info.recall["image"]
        assert starved.value < 0.9
        assert starved.low < starved.value < starved.high
        assert (starved.queries, starved.of, starved.width) == (200, "text", 8)
        index.build_graph("image", target_recall=0.98)
        restored = index.info.recall["image"]
        assert restored.value >= 0.98
        assert restored.width > 8
    with EmbeddedIndex.open(filled) as again:
        assert again.info.recall["image"] == restored
        assert again.width("image") == restored.width
        assert again.recall("image") == restored  # measured anew, at the width that was stored


def test_the_recall_is_that_of_the_hits(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "WIDTH_SEARCH", 8)
    with EmbeddedIndex.open(filled, writable=True) as index:
        index.build_graph("image")
        queries = index.sample("text", None, 200)
        quick = index.search_many(queries, K, kind="image", exact=False)
        exact = index.search_many(queries, K, kind="image", exact=True)
        shares = [len(set(a.ids) & set(b.ids)) / K for a, b in zip(quick, exact, strict=True)]
        assert index.info.recall["image"].value == pytest.approx(np.mean(shares))


def test_items_that_ask_do_not_answer_themselves(tmp_path: Path) -> None:
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add([Item(f"i{n}") for n in range(50)], unit_rows(50, 0))
        exam = Exam(index, "image")
        assert exam.of == "image"
        assert len(exam.queries) == 50
        assert all(len(scores) == K and scores[0] < 0.999 for scores in exam.exact)
        with pytest.raises(IndexFault, match="image"):
            index.recall("image")


def test_codes_reach_a_target_too(filled: Path) -> None:
    with EmbeddedIndex.open(filled, writable=True) as index:
        index.build_graph("image", codes=True)
        before = index.info.recall["image"]
        assert before.width == 400
        index.build_graph("image", target_recall=0.999)
        assert index.info.recall["image"].value >= max(0.999, before.value)
        with pytest.raises(SettingsError, match=r"1\.5"):
            index.build_graph("image", target_recall=1.5)


def test_an_index_without_the_value_opens_as_before(filled: Path) -> None:
    with EmbeddedIndex.open(filled, writable=True) as index:
        index.build_graph("image")
        with index._store.writing() as db:
            db.execute("DELETE FROM meta WHERE key LIKE 'recall-%'")
    with EmbeddedIndex.open(filled, writable=True) as index:
        assert index.info.recall == {}
        assert index.width("image") == approximate.WIDTH_SEARCH
        assert not index.search(unit_rows(1, 5)[0], kind="image").exact
        index.build_graph("image")  # it is up to date: nothing is measured
        assert index.info.recall == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", "1", '{"value": 2}', "not json"])
def test_what_is_no_recall_is_none(text: str) -> None:
    assert Recall.read(text) is None
    sound = Recall(0.5, 0.4, 0.6, 200, "text", 256)
    assert Recall.read(sound.to_json()) == sound
    assert Recall.read(sound.to_json().replace("256", "10000000000")) is None


def test_the_commands_show_it(filled: Path) -> None:
    with EmbeddedIndex.open(filled, writable=True) as index:
        index.build_graph("image")
        text = f"{index.info.recall['image']}"
        metrics = Metrics().render(index.info.counts, 0, index.info.recall)
    assert re.search(r'diptych_recall\{kind="image"\} [01](\.\d+)?\n', metrics)
    for command in (["info", str(filled)], ["info", "--recall", str(filled)], ["verify", str(filled)]):
        done = CliRunner().invoke(commands, command)
        assert done.exit_code == 0, done.output
        assert f"image: {text}" in done.output
    with sqlite3.connect(filled / "index.db") as db:
        assert db.execute("SELECT count(*) FROM meta WHERE key = 'recall-image'").fetchone() == (1,)
