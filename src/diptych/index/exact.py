"""What makes a score exact on every engine: float64 for the hits, and ties that rounding must not decide."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diptych.index.protocol import Vectors

TIE = 2e-6  # scores of unit vectors in float32 that are closer may be equal: float64 and order of addition decide
MAX_TIES = 4096  # tied candidates beyond the margin; of more, the earliest


def rescore(stored: Vectors, query: Vectors) -> NDArray[np.float64]:
    """Dot products of rows with one query in float64, one row at a time: the same whatever the batch was."""
    result: NDArray[np.float64] = (stored.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
    return result
