"""Reports: bootstrap by image, tables, lossless JSON, and refusing to compare unlike protocols."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from diptych.errors import DataError, SettingsError
from diptych.evaluation.cards import Card, Facts
from diptych.evaluation.compare import compare
from diptych.evaluation.report import Group, Report
from diptych.evaluation.retrieval import evaluate_scores
from diptych.evaluation.significance import Queries, bootstrap, interval

PAIRING = np.repeat(np.arange(60), 5)


def make_report(seed: int = 0, **options: object) -> Report:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((60, 300))
    scores[PAIRING, np.arange(300)] += 2.5
    return evaluate_scores(scores, PAIRING, model=f"model{seed}", **options)  # type: ignore[arg-type]


def with_card(report: Report, card: Card) -> Report:
    return Report((replace(report.groups[0], card=card),))


def test_a_report_of_the_first_format_still_loads(tmp_path: Path) -> None:
    report = make_report()
    group = report.groups[0]
    old = {"format": 1, "metrics": group.metrics, "card": asdict(group.card), "intervals": group.intervals,
           "speed": group.speed}  # fmt: skip
    (tmp_path / "old.json").write_text(json.dumps(old))
    loaded = Report.load(tmp_path / "old.json")
    assert loaded.metrics == report.metrics
    assert loaded.render() == report.render()


def test_groups_are_printed_saved_and_compared_one_by_one(tmp_path: Path) -> None:
    first = make_report().groups[0]
    facts = Facts({"sets": "STS-B dev", "pairs": 1500}, {"model": "m"}, note="half is missing")
    other = Group("sts", {"spearman": 86.7, "pearson": 87.0}, "spearman", facts)
    report = Report((other, first))
    assert report.primary_metric == "spearman"
    assert report.metrics["rsum"] == first.metrics["rsum"]
    said = report.render()
    assert "sets STS-B dev, pairs 1,500" in said
    assert "warning: half is missing" in said
    assert said.index("spearman") < said.index("RSUM")
    report.save(tmp_path / "both.json")
    assert Report.load(tmp_path / "both.json").render() == said
    shared = compare(report, Report((other,)))
    assert [row.metric for row in shared.rows] == ["spearman", "pearson"]
    with pytest.raises(SettingsError, match=r"sts.*retrieval"):
        compare(Report((other,)), Report((first,)))
    with pytest.raises(SettingsError, match=r"pairs.*1500"):
        compare(report, Report((replace(other, card=Facts({"sets": "STS-B dev", "pairs": 3})),)))


def test_a_group_that_names_what_it_does_not_return_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'sts'.*kendall"):
        Group("sts", {"spearman": 1.0}, "kendall", Facts({}))
    with pytest.raises(SettingsError, match="'a'"):
        Report((Group("x", {"a": 1.0}, "a", Facts({})), Group("y", {"a": 2.0}, "a", Facts({}))))
    with pytest.raises(SettingsError):
        Report(())


def test_replicates_are_those_of_explicit_resampling() -> None:
    rng = np.random.default_rng(0)
    images = np.sort(rng.integers(0, 7, size=20))  # uneven, perhaps an image without a query
    values = rng.random(20)
    found = bootstrap({"m": Queries(values, images)}, 7, 40, np.random.default_rng(5))["m"]
    drawn = np.random.default_rng(5).integers(7, size=(40, 7))
    for replicate, draw in zip(found, drawn, strict=True):
        sample = [
            value for image in draw for value, owner in zip(values, images, strict=True) if owner == image
        ]
        assert replicate == pytest.approx(np.mean(sample))


def test_texts_come_along_with_their_image() -> None:
    """Texts of an image that all agree hold one image's worth of evidence, not five."""
    images = np.repeat(np.arange(400), 5)
    values = np.repeat((np.arange(400) % 2).astype(float), 5)
    found = bootstrap({"m": Queries(values, images)}, 400, 2000, np.random.default_rng(0))["m"]
    assert found.std() == pytest.approx(np.sqrt(0.25 / 400), rel=0.1)
    assert found.std() > 1.5 * np.sqrt(0.25 / 2000)  # what resampling texts would give


def test_an_interval_is_the_central_part() -> None:
    assert interval(np.arange(1001.0)) == pytest.approx((25, 975))
    assert interval(np.array([1.0, np.nan, 1.0])) == (1.0, 1.0)


def test_intervals_surround_their_metric_and_are_seeded() -> None:
    report = make_report()
    for name, (low, high) in report.intervals.items():
        assert low <= report.metrics[name] <= high, name
    assert "image_to_text_median_rank" not in report.intervals
    assert {"rsum", "mean_recall", "text_to_image_mean_rank"} <= set(report.intervals)
    assert make_report().intervals == report.intervals
    assert make_report(seed=0, bootstrap=0).intervals == {}
    low, high = report.intervals["rsum"]
    assert report.intervals["mean_recall"] == pytest.approx((low / 6, high / 6))


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = make_report()
    report.save(tmp_path / "deep" / "report.json")
    assert Report.load(tmp_path / "deep" / "report.json") == report


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"r\.json"),
        ("[]", r"r\.json"),
        ('{"metrics": {}}', r"r\.json"),
        ('{"format": 99}', r"\b99\b.*\b2\b"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(DataError, match=message):
        Report.load(tmp_path / "r.json")
    with pytest.raises(DataError, match=r"absent\.json"):
        Report.load(tmp_path / "absent.json")


def test_a_card_of_another_shape_is_refused(tmp_path: Path) -> None:
    make_report().save(tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text("utf-8"))
    del content["groups"][0]["card"]["ties"]
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="ties"):
        Report.load(tmp_path / "r.json")


def test_the_table_is_aligned_and_complete() -> None:
    report = make_report()
    text = str(report)
    head, image_to_text, text_to_image = text.splitlines()[:3]
    assert len(head) == len(image_to_text) == len(text_to_image)
    assert head.split() == ["R@1", "R@5", "R@10", "median", "rank", "mean", "rank"]
    assert f"{report.metrics['rsum']:.1f} ({report.interval_text('rsum')})" in text
    for said in ("split unknown", "protocol plain", "ties index", report.card.data_hash, "model0", "pairs/s"):
        assert said in text
    assert "warning" not in text


def test_markdown_has_the_same_cells() -> None:
    report = make_report()
    lines = report.to_markdown().splitlines()
    assert lines[0] == "|  | R@1 | R@5 | R@10 | median rank | mean rank |"
    assert lines[1] == "|---|---:|---:|---:|---:|---:|"
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[0] == "image → text"
    name = "image_to_text_recall@1"
    assert cells[1] == f"{report.metrics[name]:.1f} ({report.interval_text(name)})"
    assert report.interval_text("image_to_text_median_rank") == ""


def test_the_card_in_words() -> None:
    fields = make_report().card_fields()
    assert fields["texts per image"] == "5"
    assert fields["intervals"] == "95 %, 1,000 bootstrap resamples by image (seed 0)"
    assert "thousand pairs/s" in fields["speed"]
    assert all(isinstance(value, str) for value in fields.values())


def test_comparing_shows_the_difference() -> None:
    first, second = make_report(0), make_report(1)
    comparison = compare(first, second)
    assert comparison.rows[0].metric == "image_to_text_recall@1"
    for row in comparison.rows:
        assert (row.first, row.second) == (first.metrics[row.metric], second.metrics[row.metric])
        assert row.change == row.second - row.first
    assert "model0" in str(comparison)
    assert comparison.to_markdown().startswith("| metric | model0 | model1 | difference |")


@pytest.mark.parametrize("name", Card.PROTOCOL_FIELDS)
def test_unlike_protocols_are_never_compared(name: str) -> None:
    first = make_report()
    other = (1, 2.0, 3) if name == "texts_per_image" else "another"
    second = with_card(first, replace(first.card, **{name: other}))
    with pytest.raises(SettingsError, match=rf"\b{name}\b"):
        compare(first, second)
    assert compare(first, second, allow=[name]).rows


def test_models_dates_and_seeds_may_differ() -> None:
    first = make_report()
    card = replace(first.card, model="b", date="2000-01-01", seed=7, bootstrap=0, version="9", data="copy")
    assert compare(first, with_card(first, card)).rows
    with pytest.raises(SettingsError, match="colour"):
        compare(first, first, allow=["colour"])


def test_tied_queries_are_reported_and_many_of_them_warned_of() -> None:
    report = evaluate_scores(np.zeros((60, 300)), PAIRING, bootstrap=0)
    assert report.card.tied_queries == {"image_to_text": 60, "text_to_image": 300}
    assert "100.0 %" in str(report)
    assert "warning" in report.card_fields()


def test_ties_below_the_top_are_counted_without_a_warning() -> None:
    scores = np.full((60, 300), -100.0)  # as of a re-ranker that was not asked about most pairs
    scores[:, :20] = np.arange(20)[::-1] + np.arange(60)[:, None]
    report = evaluate_scores(scores, PAIRING, bootstrap=0)
    assert report.card.tied_queries["text_to_image"] == 280
    assert report.card.tied_at_top == 280  # every image has one score for such a text: any may come first
    scores[:20] = np.linspace(1, 2, 20)[:, None] + np.linspace(0, 1, 300)
    report = evaluate_scores(scores, PAIRING, bootstrap=0)
    assert report.card.tied_at_top == 0 < report.card.tied_queries["text_to_image"]
    assert "tied, so" not in str(report)


def test_the_speed_of_features_is_not_called_that_of_pictures() -> None:
    group = Group("g", {"x": 1.0}, "x", Facts({}), speed={"images_per_second": 6307.0, "seconds": 1.0})
    assert group.speed_text() == "6,307 images/s, 1.00 s in all"
    group = replace(group, speed={**group.speed, "from_features": 1.0})
    assert group.speed_text().startswith("6,307 images/s from features")
