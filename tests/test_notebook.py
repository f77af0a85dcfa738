"""What notebooks show: the pictures of an index, and a bar while something takes long."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from colours import ColourModel, make_index

from diptych import progress
from diptych.progress import track


def test_an_index_shows_some_of_its_pictures(tmp_path: Path) -> None:
    with make_index(tmp_path, ColourModel()) as index:
        shown = index._repr_html_()
        assert shown.count("data:image/jpeg") == 6
        assert "60 images, 60 texts" in shown
    assert "not open" in index._repr_html_()  # closed: it never fails


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook would show, one entry for each change."""
    shown: list[str] = []
    module = ModuleType("IPython.display")
    module.HTML = str  # type: ignore[attr-defined]
    module.display = lambda content, display_id: SimpleNamespace(update=shown.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    for name in ("ipykernel", "IPython"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return shown


def test_a_bar_moves_below_the_cell_and_goes(cell: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=iter(range(100)).__next__))
    assert list(track(range(4), "reading <b>", unit="picture")) == [0, 1, 2, 3]
    assert "reading &lt;b&gt;" in cell[0]
    assert "<progress value=4 max=4>" in cell[-2]
    assert cell[-1] == ""


def test_a_quick_loop_shows_no_bar_and_an_interrupted_one_leaves_none(
    cell: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(track(range(3), "quick")) == [0, 1, 2]
    assert cell == []
    monkeypatch.setattr(progress, "PATIENCE", -1)
    slow = track(range(9), "slow")
    assert [next(slow), next(slow)] == [0, 1]
    slow.close()  # what an interrupted cell does to it
    assert "<progress" in cell[0]
    assert cell[-1] == ""


def test_rates_are_written_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", -1)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=iter((0.0, 0.0, 0.001)).__next__))
    assert list(track(range(2), "index", unit="picture")) == [0, 1]
    assert "2/2, 2,000 pictures/s" in capsys.readouterr().err
