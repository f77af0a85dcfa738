"""False alarms and detections of comparisons where the effects are known, with enough draws to tell 5 % from 6 %."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from test_significance import rates

from diptych.evaluation.significance import Spread


def test_false_alarms_and_detections_are_as_promised() -> None:
    alarms, seen, promised = rates(6000)
    assert alarms == pytest.approx(0.05, abs=0.01)
    assert seen == pytest.approx(promised, abs=0.05)


def answered(
    images: int, seeds: int, rng: np.random.Generator, spread: float = 0.1
) -> list[NDArray[np.float64]]:
    """What images add to the recall of two equal systems: five queries each, answered or not."""
    hard, sides = rng.normal(0, 2, images), []
    for _ in range(2):
        own = rng.normal(0, 0.5, images)
        chance = 1 / (1 + np.exp(-(hard + own + rng.normal(0, spread, (seeds, 1)))))
        sides.append(rng.binomial(5, chance) / 5 * 100 / images)
    return sides


@pytest.mark.parametrize(("images", "seeds"), [(200, 3), (1000, 3), (200, 5)])
def test_false_alarms_of_queries_that_are_right_or_wrong(images: int, seeds: int) -> None:
    rng = np.random.default_rng(1)
    found = [Spread.among(answered(images, seeds, rng), 0, 1).doubt().p < 0.05 for _ in range(6000)]
    assert np.mean(found) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("images", [200, 1000])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.1, 0.3])
def test_two_seeds_of_each_side_give_no_more_false_alarms_than_promised(images: int, spread: float) -> None:
    """Two seeds cannot tell how seeds vary: where they vary little, there are fewer false alarms than 5 %."""
    rng = np.random.default_rng(2)
    found = [Spread.among(answered(images, 2, rng, spread), 0, 1).doubt().p < 0.05 for _ in range(4000)]
    assert 0.015 < np.mean(found) < 0.06
