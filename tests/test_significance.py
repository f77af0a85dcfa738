"""Differences between results: paired over queries and over seeds, against independent computations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from diptych.errors import SettingsError
from diptych.evaluation.compare import compare
from diptych.evaluation.protocols import EvaluationProtocol
from diptych.evaluation.report import Outcomes, Report
from diptych.evaluation.retrieval import evaluate_scores
from diptych.evaluation.significance import paired, student_quantile, student_tails, welch

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
    found = paired([a], [b], draws=3000)[metric]
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
    unpaired = paired([a], [outcomes(report(1, 1.9, protocol=protocol))], draws=3000)[metric]
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
    p = paired([sides[0]], [sides[1]], draws=20_000)[metric].p
    assert p == pytest.approx(np.mean(far), abs=0.015)
    assert p != pytest.approx(stats.ttest_ind(*each).pvalue, abs=0.01)  # another test gives another answer


def test_no_difference_is_told_of_equal_sides_and_a_large_one_is() -> None:
    same = paired([outcomes(report(0))], [outcomes(report(0))], draws=500)
    assert all((one.low, one.high, one.p) == (0, 0, 1) for one in same.values())
    better = paired([outcomes(report(0, 1.0))], [outcomes(report(0, 3.0))], draws=2000)
    assert better["rsum"].low > 0
    assert better["rsum"].p < 0.002
    assert better["text_to_image_mean_rank"].high < 0


def test_under_no_difference_p_is_uniform() -> None:
    """Two models of the same kind: p below 0.1 in about a tenth of the cases."""
    found = [
        paired([outcomes(report(n))], [outcomes(report(n + 500))], draws=300)["mean_recall"].p
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
    assert row.seeds is not None
    result = stats.ttest_ind([r.metrics["rsum"] for r in b], [r.metrics["rsum"] for r in a], equal_var=False)
    assert row.seeds.p == pytest.approx(result.pvalue, rel=1e-5)
    assert (row.seeds.low, row.seeds.high) == pytest.approx(tuple(result.confidence_interval()), rel=1e-5)


@pytest.mark.parametrize("freedom", [1.0, 2.0, 2.7, 4.0, 30.5])
def test_student_is_student(freedom: float) -> None:
    for t in (0.0, 0.3, 1.0, 2.5, 12.0):
        assert student_tails(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-3, abs=1e-9)
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-4)


def test_welch_of_seeds_that_agree() -> None:
    assert welch([1.0, 1.0], [1.0, 1.0]).p == 1
    assert welch([1.0, 1.0], [2.0, 2.0]).p == 0


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
