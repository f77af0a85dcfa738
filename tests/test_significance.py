"""Differences between results: paired over queries and over seeds, against independent computations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import diptych, refused
from scipy import stats

from diptych.errors import SettingsError
from diptych.evaluation.cards import Card
from diptych.evaluation.compare import _letters, compare, rank
from diptych.evaluation.protocols import EvaluationProtocol
from diptych.evaluation.report import Outcomes, Report
from diptych.evaluation.retrieval import evaluate_scores
from diptych.evaluation.significance import (
    Spread,
    contributions,
    holm,
    paired_difference,
    student_quantile,
    student_tails,
)

PAIRING = np.repeat(np.arange(40), 3)


def report(seed: int, boost: float = 1.5, **options: object) -> Report:
    noise = np.random.default_rng(seed).standard_normal((40, 120))
    shared = np.random.default_rng(999).standard_normal((40, 120))  # what is hard is hard for every model
    scores = shared + 0.5 * noise
    scores[PAIRING, np.arange(120)] += boost
    return evaluate_scores(scores, PAIRING, model=f"model{seed}", bootstrap=0, **options)  # type: ignore[arg-type]


def outcomes(found: Report) -> Outcomes:
    kept = found.groups[0].outcomes
    assert kept is not None
    return kept


def value(one: Outcomes, metric: str, images: list[int]) -> float:
    """A recall, by loops, over the queries of the given images, each as often as it is named; folds averaged."""
    way, _, k = metric.partition("_recall@")
    total = []
    for fold in sorted(set(one.folds)):
        hits = [
            100.0 * (rank < int(k))
            for image in images
            if one.folds[image] == fold
            for rank, owner in zip(one.ranks[way], one.images[way], strict=True)
            if owner == image
        ]
        total.append(sum(hits) / len(hits))
    return sum(total) / len(total)


def test_outcomes_are_the_metrics_query_by_query(tmp_path: Path) -> None:
    for protocol in ("plain", EvaluationProtocol("two folds", folds=2)):
        found = report(0, protocol=protocol)
        kept = outcomes(found)
        for metric in ("image_to_text_recall@5", "text_to_image_recall@1"):
            assert value(kept, metric, list(range(40))) == pytest.approx(found.metrics[metric])
        assert len(kept.ranks["text_to_image"]) == 120
        assert len(kept.folds) == 40
    found.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == found


@pytest.mark.parametrize("folds", [1, 2])
def test_the_interval_is_that_of_a_paired_bootstrap(folds: int) -> None:
    protocol = EvaluationProtocol("some", folds=folds)
    a, b = (outcomes(report(seed, boost, protocol=protocol)) for seed, boost in ((0, 1.5), (1, 1.9)))
    metric = "text_to_image_recall@5"
    found = paired_difference([a], [b], draws=3000)[metric]
    rng, draws = np.random.default_rng(77), []
    for _ in range(400):  # by loops, with other draws
        images = [
            int(one) for fold in np.split(np.arange(40), folds) for one in rng.choice(fold, size=len(fold))
        ]
        draws.append(value(b, metric, images) - value(a, metric, images))
    low, high = np.quantile(draws, [0.025, 0.975])
    width = high - low
    assert found.low == pytest.approx(low, abs=0.15 * width)
    assert found.high == pytest.approx(high, abs=0.15 * width)
    # unpaired, the interval would be wider: what is hard for both cancels
    unpaired = paired_difference([a], [outcomes(report(1, 1.9, protocol=protocol))], draws=3000)[metric]
    assert unpaired == found


def test_p_is_that_of_every_exchange() -> None:
    """With few images all 2^N exchanges can be listed: p is their share, up to the error of drawing some."""
    pairing = np.repeat(np.arange(8), 2)
    sides = []
    for seed, boost in ((0, 0.6), (1, 1.6)):
        scores = np.random.default_rng(seed).standard_normal((8, 16))
        scores[pairing, np.arange(16)] += boost
        sides.append(outcomes(evaluate_scores(scores, pairing, bootstrap=0)))
    metric = "text_to_image_recall@1"
    each = [
        np.array([value(one, metric, [image]) for image in range(8)]) for one in sides
    ]  # as many texts for every image
    change = each[1] - each[0]
    far = [
        abs(sum((1 if mask >> n & 1 else -1) * change[n] for n in range(8))) >= abs(change.sum()) - 1e-9
        for mask in range(256)
    ]
    p = paired_difference([sides[0]], [sides[1]], draws=20_000)[metric].p
    assert p == pytest.approx(np.mean(far), abs=0.015)
    assert p != pytest.approx(stats.ttest_ind(*each).pvalue, abs=0.01)  # another test gives another answer


def test_no_difference_is_told_of_equal_sides_and_a_large_one_is() -> None:
    same = paired_difference([outcomes(report(0))], [outcomes(report(0))], draws=500)
    assert all((one.low, one.high, one.p) == (0, 0, 1) for one in same.values())
    better = paired_difference([outcomes(report(0, 1.0))], [outcomes(report(0, 3.0))], draws=2000)
    assert better["rsum"].low > 0
    assert better["rsum"].p < 0.002
    assert better["text_to_image_mean_rank"].high < 0


def test_under_no_difference_p_is_uniform() -> None:
    """Two models of the same kind: p below 0.1 in about a tenth of the cases."""
    found = [
        paired_difference([outcomes(report(n))], [outcomes(report(n + 500))], draws=300)["mean_recall"].p
        for n in range(60)
    ]
    assert 1 <= sum(p < 0.1 for p in found) <= 14


def test_seeds_are_averaged_query_by_query() -> None:
    a, b = [report(n, 1.5) for n in range(3)], [report(n + 10, 1.8) for n in range(3)]
    rows = {row.metric: row for row in compare(a, b, draws=2000).rows}
    row = rows["rsum"]
    means = [np.mean([one.metrics["rsum"] for one in side]) for side in (a, b)]
    assert (row.first, row.second, row.change) == pytest.approx((*means, means[1] - means[0]))
    assert row.queries is not None
    assert row.queries.low < row.change < row.queries.high
    alone = compare(a[0], b[0], draws=2000).rows[0].queries
    assert rows[compare(a[0], b[0], draws=2000).rows[0].metric].queries.p <= 1  # type: ignore[union-attr]
    assert alone is not None
    assert row.both is not None
    assert row.both.low < row.change < row.both.high


@pytest.mark.parametrize("freedom", [1.0, 2.0, 2.7, 4.0, 30.5])
def test_student_is_student(freedom: float) -> None:
    for t in (0.0, 0.3, 1.0, 2.5, 12.0):
        assert student_tails(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-3, abs=1e-9)
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-4)


@pytest.mark.parametrize("folds", [1, 2])
def test_images_add_up_to_the_metrics(folds: int) -> None:
    found = report(0, protocol=EvaluationProtocol("some", folds=folds))
    adds = contributions(outcomes(found))
    for name in ("rsum", "mean_recall", "text_to_image_recall@5", "image_to_text_mean_rank"):
        assert adds[name].sum() == pytest.approx(found.metrics[name])


def test_the_variance_of_seeds_alone_is_that_of_students_t() -> None:
    """Where a seed does the same on every image, only seeds vary: the t of equal variances."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((4, 1)) / 50 + np.zeros((1, 50)) + side / 50 for side in (0.0, 1.5))
    doubt = Spread.among([a, b], 0, 1).doubt()
    result = stats.ttest_ind(b.sum(axis=1), a.sum(axis=1))
    assert doubt.p == pytest.approx(result.pvalue, rel=1e-4)
    assert (doubt.low, doubt.high) == pytest.approx(tuple(result.confidence_interval()), rel=1e-4)


def test_the_variance_of_queries_alone_is_that_of_a_paired_t() -> None:
    rng = np.random.default_rng(1)
    image, other = rng.standard_normal((2, 300))
    a, b = (np.repeat(side[None], 2, axis=0) for side in (image, image + 0.1 * other + 0.02))  # equal seeds
    result = stats.ttest_rel(b[0], a[0])
    assert Spread.among([a, b], 0, 1).doubt().p == pytest.approx(result.pvalue, rel=0.02)


def test_holm_is_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def simulated(images: int, seeds: int, gain: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Two systems whose second is better by ``gain``: images are hard for both, or for one; seeds differ."""
    hard, own = rng.normal(50, 20, images), rng.normal(0, 12, (2, images))
    return [
        (hard + own[side] + side * gain + rng.normal(0, 1, (seeds, 1)) + rng.normal(0, 25, (seeds, images)))
        / images
        for side in (0, 1)
    ]


def rates(times: int, gain: float = 4.0) -> tuple[float, float, float]:
    """The rates of false alarms and of detections of a gain, and the rate of detections that was promised."""
    rng = np.random.default_rng(0)
    promised = Spread.among(simulated(20_000, 40, 0.0, rng), 0, 1).power(gain, 400, 4)
    seen = [
        [Spread.among(simulated(400, 4, planted, rng), 0, 1).doubt().p < 0.05 for _ in range(times)]
        for planted in (0.0, gain)
    ]
    return float(np.mean(seen[0])), float(np.mean(seen[1])), promised


def test_false_alarms_and_detections_are_as_promised() -> None:
    alarms, seen, promised = rates(600)  # 6,000 in tests/scale/test_power.py
    assert alarms == pytest.approx(0.05, abs=0.025)
    assert seen == pytest.approx(promised, abs=0.05)
    assert 0.6 < promised < 0.9


def test_more_images_or_seeds_are_needed_for_a_smaller_gain() -> None:
    rng = np.random.default_rng(3)
    spread = Spread.among(simulated(400, 4, 0.0, rng), 0, 1)
    images = [spread.images_for(gain) for gain in (12.0, 6.0)]
    assert images[0] is not None
    assert images[1] is not None
    assert images[0] < images[1]
    assert spread.power(6.0, images[1]) == pytest.approx(0.8, abs=0.02)
    assert spread.images_for(0.01) is None  # seeds alone hide it
    seeds = spread.seeds_for(3.0)
    assert seeds is not None
    assert spread.power(3.0, seeds=seeds) >= 0.8 > spread.power(3.0, seeds=seeds - 1)


def test_systems_that_cannot_be_told_apart_share_a_letter() -> None:
    """Three systems of three seeds, two of them alike; p-values are those of pairs, corrected."""
    sides = [[report(10 * n + seed, boost) for seed in range(3)] for n, boost in enumerate((1.5, 1.5, 3.0))]
    names = [[f"{name}-{seed}" for seed in range(3)] for name in "xyz"]
    found = rank(sides, names=names, detect=1.0)
    assert found.systems[0][0].startswith("z")
    letters = [mark for *_, mark in found.systems]
    assert letters == ["a", "b", "b"]
    assert [row.doubt.p < 0.05 for _, _, row in found.pairs if row.doubt] == [True, True, False]
    assert all(row.change >= 0 for _, _, row in found.pairs)
    shown = found.render()
    assert "other queries and other seeds" in shown
    assert "to see a gain of 1" in shown
    with pytest.raises(SettingsError, match="text_to_image_recall@1"):
        rank(sides, names=names, metric="recall")
    assert (
        "seeds are not counted" in rank([side[:1] for side in sides], names=[n[:1] for n in names]).render()
    )


def test_one_image_tells_no_systems_apart() -> None:
    sides = [[evaluate_scores(np.eye(1), np.zeros(1, int), model=name, bootstrap=0)] for name in "abc"]
    with pytest.raises(SettingsError, match=r"^a split"):
        rank(sides, names=["a", "b", "c"])


def test_letters_of_overlapping_groups() -> None:
    assert _letters(3, [(0, 2)]) == ["a", "ab", "b"]
    assert _letters(3, []) == ["a", "a", "a"]
    assert _letters(3, [(0, 1), (0, 2), (1, 2)]) == ["a", "b", "c"]


def test_sides_of_other_queries_and_reports_without_ranks() -> None:
    a, b = report(0), report(1)
    group = b.groups[0]
    kept = outcomes(b)
    moved = replace(kept, images={way: [*rows[1:], rows[0]] for way, rows in kept.images.items()})
    with pytest.raises(SettingsError):
        compare(a, Report((replace(group, outcomes=moved),)))
    bare = compare(a, Report((replace(group, outcomes=None),)))
    assert all(row.queries is None for row in bare.rows)
    assert "no interval" in bare.render()
    assert "evaluate again" in bare.render()
    with pytest.raises(SettingsError):
        compare([], [a])


def saved(folder: Path, name: str, seed: int, boost: float, system: str) -> Path:
    found = report(seed, boost)
    group = found.groups[0]
    assert isinstance(group.card, Card)
    card = replace(group.card, system=system, run=f"runs/{name}")
    Report((replace(group, card=card),)).save(folder / f"{name}.json")
    return folder / f"{name}.json"


def test_seeds_of_one_system_are_put_together(tmp_path: Path) -> None:
    a, b, c = (
        [saved(tmp_path, f"{name}-{seed}", 10 * n + seed, 1.5 + n, f"vse {name}") for seed in range(seeds)]
        for n, (name, seeds) in enumerate((("a", 2), ("b", 2), ("c", 1)))
    )
    shown = diptych("compare", *a, "--with", *b, "--with", *c, "--detect=1").output
    assert shown == diptych("compare", a[0], b[0], c[0], a[1], b[1], "--detect", 1).output
    assert "p (Holm)" in shown
    assert "to see a gain of 1 in 80 % of cases" in shown
    two = diptych("compare", *a, "--with", *b, "--detect", 1).output
    assert "other queries and other seeds" in two
    assert "seeds of each side" in two
    by_rank = diptych("compare", *a, "--with", *b, "--metric", "text_to_image_mean_rank").output
    assert by_rank.splitlines()[1].startswith("b")  # of ranks, the smallest is the best
    assert "the seed" in refused("compare", a[0], b[0], "--with", c[0])
    assert "3 results" in refused("compare", *a, saved(tmp_path, "a-9", 9, 1.5, "vse a"))
    assert "twice" in refused("compare", *a, "--with", *b, a[0])
