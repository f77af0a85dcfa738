"""Intervals of a mean over few runs, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 % for 1, 2, … 30 degrees of freedom."""


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    t = T_975[len(values) - 2] if len(values) <= len(T_975) + 1 else 1.96
    return t * stdev(values) / math.sqrt(len(values))


def mean_and_interval(values: Sequence[float]) -> str:
    """Mean and half width of the 95 % interval of the mean over runs; the value alone for one run, nothing for none."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else ""
    return f"{mean(values):.1f} ± {half_width(values):.1f}"
