"""axe-core finds nothing on the page, the API reference and every report: light, dark, on a desktop and a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import PHONE, chromium, expect, opened, shoot, violations
from colours import ColourModel, draw, make_index, running

from diptych.reports import page as pages
from diptych.reports.audit import Question, audit_page
from diptych.reports.page import Answer, QueryCard, QueryComparison, Result, Section
from diptych.web.app import create_app

SCREENS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": PHONE,
    "phone-dark": {**PHONE, "color_scheme": "dark"},
}
STATES = {  # an address, and what the status says once the answer is there
    "": "A look at the collection",
    "?q=red": "5 matches",
    "?q=submarine": "closest of",
    "?q=red&like=red%2Fcircle.png": "of 60 images",
    "?kind=text&q=red": "60 texts",
    "?filter=prize%20%3C%203": "A look at the collection",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = ColourModel()
    folder = tmp_path_factory.mktemp("accessibility")
    with make_index(folder, model) as index, running(create_app(index, model, chance=0.2)) as url:
        yield url


@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_is_wrong_with_the_page(browser: Any, address: str, screen: str) -> None:
    for page in opened(browser, address, **SCREENS[screen]):
        for state, status in STATES.items():
            page.goto(f"{address}/{state}")
            expect(page.locator("#status")).to_contain_text(re.compile(status))
            expect(page.locator("body.busy")).to_have_count(0)
            if "phone" in screen and "filter" not in state:
                page.click("#options")
                expect(page.locator("#filter")).to_be_visible()
            assert violations(page) == [], state
        page.goto(f"{address}/docs")
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        shoot(page, f"docs-{screen}")


def reports() -> dict[str, str]:
    answers = [
        Answer(f"a picture {n}", 0.5, n == 1, draw("red", "ring"), link="a.png", note="a.png")
        for n in range(6)
    ]
    texts = [Answer("a red ring", 0.5, True), Answer("a blue ring", 0.4, False)]
    card, table = (
        QueryCard("a red ring", answers, draw("red", "ring")),
        (("", "photos"), [("RSUM", "312.1 (278.9–347.6)")]),
    )
    sections = [Section("Text → image", "Two.", [card]), Section("Numbers", "Three.", table=table)]
    judged = Question("a.png", "a#0", "a red ring", ["a ring"], "far from its image")
    return {
        "report": pages.page("A report", "One.", sections, "diptych search a " * 8, {"loss": [(0, 2.0), (1, 1.0)]},
                             {"photos": ([("rsum", "312.1", "278.9–347.6")], {"split": "val"})}),
        "gallery": pages.gallery_page("a red ring", card),
        "comparison": pages.comparison_page("Two models", "One.", table, {"Images": ("Two.", [
            QueryComparison("a red ring", [Result("a", 1, answers), Result("b", 2, texts)])])}),
        "cases": pages.comparison_page("Cases", "One.", table, {"Colours": ("", [card, QueryCard("a ring", texts)])}),
        "audit": audit_page("An audit", ["2 pairs"], [judged, judged], "0123"),
    }  # fmt: skip


@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_is_wrong_with_a_report(browser: Any, tmp_path: Path, screen: str) -> None:
    for name, content in reports().items():
        place = tmp_path / f"{name}.html"
        place.write_text(content, "utf-8")
        for page in opened(browser, place.as_uri(), **SCREENS[screen]):
            page.wait_for_load_state()
            assert violations(page) == [], name
