"""The synthetic pooling experiment: its patterns, its error, its table."""

from __future__ import annotations

import math

import pytest
import torch

from diptych.aggregators import GPO, CosSinMLP, Interpolation
from diptych.errors import SettingsError
from diptych.runs import synthetic_pooling as experiment
from diptych.runs.synthetic_pooling import PATTERNS


def oracle(pattern: str, size: int) -> list[float]:
    """Weights of ranks 1 … N, from the paper's words."""
    if pattern == "A":
        return [1 / size] * size
    if pattern.startswith("M-"):
        k = min(int(pattern[2:]), size)
        return [1 / k if rank <= k else 0.0 for rank in range(1, size + 1)]
    if pattern == "T-50%":
        top = math.ceil(size / 2)
        return [1 / top if rank <= top else 0.0 for rank in range(1, size + 1)]
    weights = [size - rank for rank in range(1, size + 1)]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_those_of_the_paper(pattern: str) -> None:
    sizes = torch.tensor([5, 10, 11, 20])
    theta = experiment.true_coefficients(pattern, sizes, 20)
    for row, size in zip(theta.tolist(), sizes.tolist(), strict=True):
        assert row[:size] == pytest.approx(oracle(pattern, size), abs=1e-7)
        assert row[size:] == [0.0] * (20 - size)


def test_the_error_of_average_pooling_is_known() -> None:
    average = GPO(Interpolation())  # its knots start at zero: equal weights
    assert experiment.errors(average, "A").seen == pytest.approx(0, abs=1e-7)
    measured = experiment.errors(average, "M-1")
    by_size = [math.sqrt(((1 - 1 / n) ** 2 + (n - 1) / n**2) / n) for n in range(10, 20)]
    assert measured.smaller == pytest.approx(sum(by_size) / 10, rel=1e-5)


def test_training_moves_towards_the_pattern() -> None:
    torch.manual_seed(0)
    generator = CosSinMLP()
    before = experiment.errors(GPO(generator), "M-1")
    after = experiment.errors(experiment.train(generator, "M-1", seed=0, steps=120), "M-1")
    assert after.seen < 0.02 < before.seen


def test_runs_repeat_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    runs = [experiment.run_one("Cos/Sin+MLP", "L", seed=1, steps=3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert (torch.get_rng_state() == state).all()
    assert experiment.run_one("Cos/Sin+MLP", "L", seed=2, steps=3) != runs[0]


def test_processes_give_the_same_runs() -> None:
    choice = {
        "designs": ["Index+Interp"],
        "patterns": ["A", "L"],
        "seeds": 1,
        "steps": 2,
        "show_progress": False,
    }
    assert experiment.run(**choice, workers=2) == experiment.run(**choice, workers=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"designs": ["Fourier"]}, "Fourier"),
        ({"patterns": ["M-2"]}, "'M-2'"),
        ({"seeds": 0}, r"\b0\b"),
    ],
)
def test_bad_settings_say_so(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        experiment.run(**settings)  # type: ignore[arg-type]
