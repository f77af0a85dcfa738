"""The demonstration on a few dozen emoji: everything is made, the report shows it, a second run reuses it."""

from __future__ import annotations

import csv
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import diptych

from diptych.data.formats import open_captions
from diptych.evaluation.report import Report
from diptych.runs import demo

SMALL: dict[str, Any] = {
    "dim": 32,
    "epochs": 3,
    "decay_epoch": 2,
    "image_size": 64,
    "batch_size": 32,
    "log_steps": 1,
}


def some_emoji(folder: Path, count: int = 72) -> Path:
    """Some of the real pictures with their texts as a manifest; of six, one is val and one test."""
    captions = open_captions("emoji")
    texts_of = captions.texts_of()
    (folder / "images").mkdir(parents=True)
    with (folder / "emoji.csv").open("w", encoding="utf-8", newline="") as file:
        write = csv.writer(file)
        write.writerow(["image", "text", "split"])
        for row in range(count):
            name = f"{captions.image_ids[row]}.png"
            captions.images[row].resize((64, 64)).save(folder / "images" / name)  # type: ignore[union-attr]
            split = ("train", "train", "val", "train", "train", "test")[row % 6]
            write.writerows([name, captions.texts[text], split] for text in texts_of[row])
    return folder


class Page(html.parser.HTMLParser):
    """Headings, and under each the tags and the text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.sections: dict[str, list[tuple[str, dict[str, str | None]]]] = {}
        self.words: dict[str, str] = {}
        self.heading, self.inside = "", False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h1", "h2"):
            self.heading, self.inside = "", True
        else:
            self.sections.setdefault(self.heading, []).append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h1", "h2"):
            self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.heading += data
        else:
            self.words[self.heading] = self.words.get(self.heading, "") + data + " "

    def count(self, heading: str, tag: str, kind: str | None = None) -> int:
        """Tags of a section, or those of a class."""
        found = [attrs for name, attrs in self.sections[heading] if name == tag]
        return len([a for a in found if kind is None or kind in (a.get("class") or "").split()])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demonstration, with its data and its cache beside it."""
    base = tmp_path_factory.mktemp("demo")
    some_emoji(base / "data")
    run(base)
    return base


def run(base: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_CACHE", str(base / "cache"))
        demo.run_demo(base / "demo", str(base / "data"), **SMALL)


def test_the_report_shows_everything(made: Path) -> None:
    report = Report.load(made / "demo" / "report.json")
    page = Page((made / "demo" / "report.html").read_text("utf-8"))
    assert list(page.sections)[1:] == [
        "Diptych: VSE∞ on emoji", "Searches in words", "Text → image", "Image → text", "Search it yourself", "Training",
        "Metrics", "Protocol",
    ]  # fmt: skip
    first = report.metrics["text_to_image_recall@1"]
    assert (
        f"the right picture is the first answer for {first:.0f} % of the texts"
        in page.words["Diptych: VSE∞ on emoji"]
    )
    assert page.count("Searches in words", "figure") == len(demo.SEARCHES) * demo.ANSWERS
    assert page.count("Searches in words", "figure", "right") == 0
    assert report.card.split == "test"
    for value in (report.metrics["rsum"], report.metrics["image_to_text_recall@1"]):
        assert f"{value:.1f}" in page.words["Metrics"]
    assert page.count("Metrics", "tr") == 1 + len(report.metrics)
    for fact in (report.card.data_hash, report.card.model, report.card.ties, "test"):
        assert fact in page.words["Protocol"]
    assert page.count("Training", "polyline") == 2
    assert "training loss over steps" in page.words["Training"]
    assert "validation RSUM over epochs" in page.words["Training"]
    assert page.count("Text → image", "figure") == demo.SHOWN * demo.ANSWERS
    assert page.count("Text → image", "img") == demo.SHOWN * demo.ANSWERS
    assert page.count("Image → text", "figure", "text") == demo.SHOWN * demo.ANSWERS
    assert page.count("Image → text", "img") == demo.SHOWN
    # a text has one right picture, so at most one is marked in each row; an image has several texts
    right = page.count("Text → image", "figure", "right")
    assert 0 < right <= demo.SHOWN
    assert page.count("Image → text", "figure", "right") > 0
    assert "diptych search" in page.words["Search it yourself"]
    links = [
        attrs.get("src") or attrs.get("href") or "" for tags in page.sections.values() for _, attrs in tags
    ]
    assert not [
        link for link in links if link and not link.startswith("data:")
    ]  # one file, nothing from outside


def test_a_second_run_reuses_what_is_there(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = [made / "demo" / "run" / "last" / "progress.json", *sorted((made / "cache").rglob("*.npy"))]
    assert len(kept) > 3  # pictures and texts of several splits
    before = {path: path.stat().st_mtime_ns for path in kept}
    metrics = Report.load(made / "demo" / "report.json").metrics
    capsys.readouterr()
    run(made)
    said = capsys.readouterr().out
    assert not re.search(r"\bepoch \d", said)  # only the header names epochs
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert Report.load(made / "demo" / "report.json").metrics == metrics
    assert f"report: {made / 'demo' / 'report.html'}" in said
    assert f"diptych search {made / 'demo' / 'emoji.index'}" in said
    for query in demo.QUERIES:
        assert f'"{query}": ' in said


def test_what_it_says_to_do_next_works(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(made / "cache"))
    place = made / "demo" / "emoji.index"
    answers = json.loads(diptych("search", place, "birthday party", "-k", 5, "--all", "--json").stdout)
    assert len(answers["hits"]) == 5
    picture = sorted((made / "data" / "images").iterdir())[3]
    found = diptych("search", place, picture, "-k", 1, "--all", "--paths").stdout.strip()
    assert Path(found).resolve() == picture
    said = diptych("evaluate", made / "demo" / "run", "--split", "test").stdout
    rsum = Report.load(made / "demo" / "report.json").metrics["rsum"]
    assert f"{rsum:.1f}" in said
