"""Features → vectors: Mean, Max, KMax, First, Last, GeM, GPO and its variants.

Every aggregator maps a padded batch of sets, values (B, L, D) and mask (B, L), to (B, D), in float32 or
better. What lies at invalid positions, NaN included, reaches neither the result nor a gradient. An empty set
pools to zeros: raising would make the host wait for the device at every step.
"""

from __future__ import annotations

from diptych.aggregators.generators import (
    CosSinBiGRU,
    CosSinMLP,
    CosSinTransformer,
    Generator,
    IndexBiGRU,
    Interpolation,
    SortedRowBiGRU,
)
from diptych.aggregators.gpo import GPO
from diptych.aggregators.pooling import Aggregator, First, GeM, KMax, Last, Max, Mean

__all__ = [
    "GPO",
    "Aggregator",
    "CosSinBiGRU",
    "CosSinMLP",
    "CosSinTransformer",
    "First",
    "GeM",
    "Generator",
    "IndexBiGRU",
    "Interpolation",
    "KMax",
    "Last",
    "Max",
    "Mean",
    "SortedRowBiGRU",
]
