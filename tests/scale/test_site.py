"""The documentation as a site: built without a warning, its notebooks executed, nothing loaded from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="the extra docs is not installed")
ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = ("first-search", "train-and-compare", "own-part")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``make site`` builds it."""
    place = tmp_path_factory.mktemp("site")
    (line,) = re.findall(
        r"^\t\$\(BIN\)/(sphinx-build .*) site$", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    command = [sys.executable, "-m", "sphinx", *line.split()[1:], str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place


def test_every_page_is_there(site: Path) -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "notebooks").glob("*.ipynb"),
    ]
    missing = [page for page in pages if not (site / page.relative_to(ROOT)).with_suffix(".html").is_file()]
    assert not missing


def test_the_notebooks_show_pictures_and_numbers(site: Path) -> None:
    shown = [(site / "docs" / "notebooks" / f"{name}.html").read_text("utf-8") for name in NOTEBOOKS]
    assert [page.count("data:image/jpeg") >= 5 for page in shown] == [True, True, False]
    assert all("rsum" in page for page in shown[1:])
    assert not [page for page in shown if "Traceback" in page]


def test_the_reference_has_every_public_name(site: Path) -> None:
    import diptych

    page = (site / "docs" / "api.html").read_text("utf-8")
    errors = [name for name in diptych.__all__ if f'id="diptych.errors.{name}"' in page]
    assert len(errors) == 14
    missing = {name for name in diptych.__all__ if f'id="diptych.{name}"' not in page}
    assert missing == {*errors, "__version__"}


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    tags = r"""<(?:script|img|iframe)[^>]+src=["'](?:https?:)?//|<link[^>]+href=["'](?:https?:)?//"""
    loads = rf"""{tags}|@import|url\(["']?http"""
    wrong = [
        (path.name, found)
        for path in site.rglob("*")
        if path.suffix in (".html", ".css")
        for found in re.findall(loads, path.read_text("utf-8"))
    ]
    assert not wrong
