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
from diptych.errors import IndexFault
from diptych.evaluation.report import Report
from diptych.index.engines.opening import open_index
from diptych.index.models import open_model
from diptych.index.query.search import Searcher
from diptych.runs import demo
from diptych.training.checkpoint import read_run

MODELS = ("photos", "vse-infinity")
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
    reports = {name: Report.load(made / "demo" / f"report-{name}.json") for name in MODELS}
    page = Page((made / "demo" / "report.html").read_text("utf-8"))
    assert list(page.sections)[1:] == [
        "Diptych: search in emoji", "Searches in words", "Held-out numbers", "Misses: text → image",
        "Misses: image → text", "Search it yourself", "Training", *(f"Metrics and protocol: {name}" for name in MODELS),
    ]  # fmt: skip
    assert page.count("Searches in words", "figure") == len(demo.SEARCHES) * demo.ANSWERS
    assert page.count("Searches in words", "figure", "right") == 0
    first = reports["photos"].metrics["text_to_image_recall@1"]
    assert f"the right picture first for {first:.0f} % of the texts" in page.words["Held-out numbers"]
    for name, report in reports.items():
        assert report.card.split == "test"
        assert f"{report.metrics['rsum']:.1f} (" in page.words["Held-out numbers"]
        heading = f"Metrics and protocol: {name}"
        for value in (report.metrics["rsum"], report.metrics["image_to_text_recall@1"]):
            assert f"{value:.1f}" in page.words[heading]
        assert page.count(heading, "tr") == 2 + len(report.metrics) + len(report.card_fields())
        for fact in (report.card.data_hash, report.card.model, report.card.ties, "test"):
            assert fact in page.words[heading]
        assert f"{name}: validation RSUM over epochs" in page.words["Training"]
    assert page.count("Held-out numbers", "tr") == 1 + 7  # R@1, R@5 and R@10 both ways, and their sum
    assert page.count("Held-out numbers", "th") == len(MODELS)  # the corner is an empty cell
    assert "diptych search" in page.words["Search it yourself"]
    links = [
        attrs.get("src") or attrs.get("href") or "" for tags in page.sections.values() for _, attrs in tags
    ]
    assert not [
        link for link in links if link and not link.startswith("data:")
    ]  # one file, nothing from outside


def test_the_misses_are_misses_and_counted(made: Path) -> None:
    page = Page((made / "demo" / "report.html").read_text("utf-8"))
    for heading, query in (("Misses: text → image", "text"), ("Misses: image → text", "picture")):
        found = re.search(rf"For (\d+) held-out {query}s?, ", page.words[heading])
        shown = min(int(found[1]), demo.MISSES) if found else 0
        assert page.count(heading, "div", "query") == shown
        assert page.count(heading, "figure") == shown * demo.ANSWERS
        assert page.count(heading, "figure", "right") == 0
        pictures = 1 + demo.ANSWERS if query == "text" else 1
        assert page.count(heading, "img") == shown * pictures


def test_the_searches_are_those_of_the_whole_collection(made: Path) -> None:
    page = Page((made / "demo" / "report.html").read_text("utf-8"))
    with open_index(made / "demo" / "emoji.index") as index:
        assert index.count("image") == 72
        assert index.info.model == str((made / "demo" / "photos").resolve())
        model = open_model(index.info.model)
        hits = Searcher(index, model).search(demo.SEARCHES[0], demo.ANSWERS, chance=None)
    for hit in hits:
        assert hit.item.text.splitlines()[0] in page.words["Searches in words"]


def test_both_models_read_the_same_features(made: Path) -> None:
    packs = {path.parent for path in (made / "cache").rglob("*.npy")}
    sizes = [read_run(made / "demo" / run)["settings"]["image_size"] for run in ("photos", "run")]
    assert sizes[0] == sizes[1]
    assert packs


def test_a_second_run_reuses_what_is_there(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = [made / "demo" / run / "last" / "progress.json" for run in ("photos", "run")]
    kept = [*states, *sorted((made / "cache").rglob("*.npy"))]
    assert len(kept) > 3  # pictures and texts of several splits
    before = {path: path.stat().st_mtime_ns for path in kept}
    metrics = [Report.load(made / "demo" / f"report-{name}.json").metrics for name in MODELS]
    capsys.readouterr()
    run(made)
    said = capsys.readouterr().out
    assert not re.search(r"\bepoch \d", said)  # only the header names epochs
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert [Report.load(made / "demo" / f"report-{name}.json").metrics for name in MODELS] == metrics
    assert f"report: {made / 'demo' / 'report.html'}" in said
    assert f"diptych search {made / 'demo' / 'emoji.index'}" in said
    for query in demo.SEARCHES:
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
    rsum = Report.load(made / "demo" / "report-vse-infinity.json").metrics["rsum"]
    assert f"{rsum:.1f}" in said


def test_it_says_what_it_does_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.runs.demo.run_demo", lambda folder: print("loaded"))
    done = diptych("demo", "--output_dir", "there")
    assert "there" in done.stderr
    assert done.stdout == "loaded\n"


def test_make_shows_what_pip_does() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text("utf-8")
    assert "--quiet" not in makefile


def test_an_index_of_an_older_demonstration_is_not_lost(made: Path) -> None:
    with open_index(made / "demo" / "emoji.index") as index:
        before = index.generation
    other = demo.DemoModel("photos", made / "demo" / "run", *[None] * 2)  # type: ignore[arg-type]
    with pytest.raises(IndexFault, match="make clean"):
        demo._searches(other, open_captions(made / "data"), made / "demo" / "emoji.index")
    with open_index(made / "demo" / "emoji.index") as index:
        assert index.generation == before
