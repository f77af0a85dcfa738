"""Every table of every paper runs to its end on small data."""

from __future__ import annotations

from pathlib import Path

import pytest
from paper_world import World, run_to_the_end

from diptych.tables import PaperTable, papers, tables_of

TABLES = [table for paper in papers() for table in tables_of(paper).values() if not table.command]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.made(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.paper}-{table.name}")
def test_the_table_runs_to_its_end(
    table: PaperTable, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_the_end(table, world, tmp_path, monkeypatch)
