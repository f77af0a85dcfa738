"""Vectors that come from anywhere, as rows that can be scored: finite, of one width, of unit length."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.errors import DataError

ROWS = 10_000  # checked together
UNIT = 1e-3  # how far the length of a unit vector may be from 1: that of float16 rows is


def as_rows(vectors: Any, what: str) -> NDArray[Any]:
    """Vectors (N, D) as a numpy array: from an array, a tensor on any device, or lists of numbers."""
    if hasattr(vectors, "detach"):  # a tensor, which this module does not import
        vectors = vectors.detach().cpu().float().numpy()
    try:
        rows = np.asarray(vectors)
    except ValueError as error:
        raise DataError(
            f"{what} are rows of unequal length ({error}): give an array (rows, numbers)."
        ) from error
    if rows.ndim != 2 or not rows.shape[1]:
        shape = "×".join(map(str, rows.shape)) or "a single number"
        raise DataError(f"the shape of {what} is {shape}: give an array (rows, numbers).")
    if rows.dtype.kind not in "fiu":
        raise DataError(f"{what} hold {rows.dtype}, not numbers: give float32.")
    return rows


def check_rows(rows: NDArray[Any], what: str, *, unit: bool = False, outcome: str = "") -> None:
    """Raise unless every row is finite and not zero; with ``unit``, of length 1 as well. ``outcome`` says what then."""
    for start in range(0, len(rows), ROWS):
        norms = np.linalg.norm(np.asarray(rows[start : start + ROWS], np.float64), axis=1)
        bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
        if len(bad):
            problem = "is all zeros" if norms[bad[0]] == 0 else "holds NaN or infinity"
            raise DataError(f"{what} row {start + int(bad[0])} {problem}{outcome}: leave such rows out.")
        far = np.flatnonzero(np.abs(norms - 1) > UNIT)
        if unit and len(far):
            raise DataError(
                f"{what} row {start + int(far[0])} has length {norms[far[0]]:.4g}, not 1: normalise the vectors, or "
                "give normalize=True."
            )


def unit_rows(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Rows of length 1, in float32; divided in float64."""
    exact = np.asarray(rows, np.float64)
    return np.asarray(exact / np.linalg.norm(exact, axis=1, keepdims=True), np.float32)
