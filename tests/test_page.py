"""The HTML file of a result: what it says, what it escapes, how its curves are drawn."""

from __future__ import annotations

import base64
import io
import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from diptych.reports.page import LARGE, Answer, QueryCard, Section, chart, gallery_page, page

EVIL = "<script>alert('x')</script> & \"quotes\""


ANSWERS = [Answer("dog.jpg", 0.9, True), Answer("cat.jpg", 0.1, False)]


def shown(**changes: object) -> str:
    whole = {
        "title": "A title",
        "introduction": "What this is.",
        "reports": {"photos": ([("rsum", "412.3", "400.1–420.0")], {"split": "val", "images": 1000})},
        "curves": {"loss": [(1, 3.0), (2, 2.0), (3, 1.0)]},
        "sections": [Section("Text → image", "What it finds.", [QueryCard("a dog", ANSWERS)])],
        "commands": "diptych search x",
    }  # fmt: skip
    return page(**{**whole, **changes})  # type: ignore[arg-type]


def test_everything_stands_in_one_file() -> None:
    content = shown()
    assert content.startswith("<!doctype html>")
    for part in (
        "A title",
        "What this is.",
        "412.3",
        "400.1–420.0",
        "1000",
        "Text → image",
        "a dog",
        "0.900",
    ):
        assert part in content
    assert not re.findall(r"(?:src|href)='(?!data:)", content)  # nothing is loaded from elsewhere


def test_right_answers_are_marked_and_others_not() -> None:
    figures = re.findall(r"<figure class='([^']*)'>.*?</figure>", shown(curves={}))
    assert figures == ["right text", "text"]
    assert shown(curves={}).count("✓") == 1


@pytest.mark.parametrize(
    "where",
    [
        "title",
        "introduction",
        "model",
        "metrics",
        "card",
        "curves",
        "section",
        "table",
        "answers",
        "commands",
    ],
)
def test_whatever_it_is_given_is_escaped(where: str) -> None:
    argument, given = {
        "title": ("title", EVIL), "introduction": ("introduction", EVIL), "commands": ("commands", EVIL),
        "model": ("reports", {EVIL: ([], {})}), "metrics": ("reports", {"a": ([(EVIL, EVIL, EVIL)], {})}),
        "card": ("reports", {"a": ([], {EVIL: EVIL})}),
        "curves": ("curves", {EVIL: [(0, 1.0), (1, 2.0)], EVIL + "2": []}),
        "section": ("sections", [Section(EVIL, EVIL)]),
        "table": ("sections", [Section("a", "b", table=([EVIL], [[EVIL]]))]),
        "answers": ("sections", [Section("a", "b", [QueryCard(EVIL, [Answer(EVIL, 0, True)])])]),
    }[where]  # fmt: skip
    content = shown(**{argument: given})
    assert "<script" not in content
    assert "&lt;script&gt;" in content
    assert "title='<" not in content
    assert "alert(&#x27;x&#x27;)" in content  # also inside attributes


def test_pictures_are_small_and_inside() -> None:
    large = Image.new("RGBA", (400, 200), (255, 0, 0, 128))
    content = gallery_page("dogs", QueryCard("a dog", [Answer("dog", 0.5, False, large)], large))
    found = re.findall(
        r"<img alt='' width='(\d+)' height='(\d+)' src='data:image/webp;base64,([^']+)'", content
    )
    assert len(found) == 2
    for width, height, data in found:
        picture = Image.open(io.BytesIO(base64.b64decode(data)))
        assert picture.size == (int(width), int(height)) == (LARGE, LARGE // 2)
    assert large.size == (400, 200)  # the caller's picture is left as it was


def test_answers_begin_at_the_margin_where_there_is_no_picture_above_them() -> None:
    answers = [Answer("dog", 0.5, False)]
    assert "</h1><div class='row gallery'><figure" in gallery_page("dogs", QueryCard("", answers))
    assert "</h1><p>Nothing matches.</p><div" in gallery_page("dogs", QueryCard("Nothing matches.", []))


def points(svg: str) -> list[tuple[float, float]]:
    line = re.search(r"points='([^']+)'", svg)
    assert line is not None
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line[1].split())]


def test_a_chart_runs_from_corner_to_corner() -> None:
    svg = chart("loss", [(10, 4.0), (20, 3.0), (30, 2.0)], "#000")
    ElementTree.fromstring(svg)  # well formed
    (x0, y0), (x1, y1), (x2, y2) = points(svg)
    assert x0 < x1 < x2
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 < y1 < y2  # down the picture: smaller values
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    for label in (">4<", ">2<", ">10<", ">30<"):
        assert label in svg
    assert "logarithmic" not in svg


def test_a_chart_over_decades_is_logarithmic() -> None:
    svg = chart("loss", [(1, 1000.0), (2, 10.0), (3, 0.1)], "#000")
    (_, y0), (_, y1), (_, y2) = points(svg)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)  # equal factors, equal distances
    assert "loss, logarithmic" in svg


def test_flat_and_short_curves() -> None:
    flat = points(chart("loss", [(1, 2.0), (2, 2.0)], "#000"))
    assert flat[0][1] == flat[1][1]
    points(chart("loss", [(1, -1.0), (2, 500.0)], "#000"))  # no logarithm of what is negative
    assert "too few points" in chart("loss", [(1, 2.0)], "#000")
    assert "too few points" in chart("loss", [], "#000")


def test_pictures_and_sentences_come_before_tables() -> None:
    content = shown(introduction="First.\n\nSecond.")
    places = [content.index(part) for part in ("First.", "a dog", "diptych search x", "<table")]
    assert places == sorted(places)


def test_answers_link_to_their_files() -> None:
    answer = Answer("a dog", 0.5, False, Image.new("RGB", (8, 8)), "photos/my%20dog.jpg", "photos/my dog.jpg")
    content = gallery_page("dogs", QueryCard("", [answer, Answer("no file", 0.1, False)]))
    assert content.count("<a href='photos/my%20dog.jpg'>") == 1
    assert "photos/my dog.jpg</span>" in content
    evil = gallery_page("x", QueryCard("", [Answer("a", 0.5, False, None, "x' onclick='y", EVIL)]))
    assert "onclick='y" not in evil
    assert "<script" not in evil
