"""Columns of targets: a row for each image or text of the training data, read as batches need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import ArrayStore
from diptych.errors import DataError, SettingsError

Of = Literal["image", "text"]


@dataclass(frozen=True)
class Column:
    """What an objective reads beside the pairs: class labels, the vectors of a teacher.

    ``values`` has a row for each image or each text, as ``of`` says: an array, or a file of any size.
    """

    values: NDArray[Any] | ArrayStore
    of: Of

    def rows(self, numbers: NDArray[np.int64], *, pin_memory: bool = False) -> NDArray[Any]:
        """Some rows, in this order; those of a file in pinned memory for a GPU, if asked."""
        if isinstance(self.values, ArrayStore):
            return self.values.rows(numbers, pin_memory=pin_memory)
        return np.ascontiguousarray(self.values[numbers])

    def check(self, name: str, data: str, images: int, texts: int) -> None:
        """Refuse a column that does not fit the data, or in which some items have no value."""
        expected = {"image": images, "text": texts}.get(self.of)
        if expected is None:
            raise SettingsError(f"target '{name}' belongs to '{self.of}': say image or text.")
        if len(self.values) != expected:
            raise DataError(
                f"target '{name}' has {len(self.values)} rows for {expected} {self.of}s of {data}: "
                "give a row for each of them."
            )
        if isinstance(self.values, np.ndarray) and np.issubdtype(self.values.dtype, np.floating):
            missing = np.flatnonzero(np.isnan(self.values.reshape(expected, -1)).any(axis=1))
            if len(missing):
                raise DataError(
                    f"target '{name}' is missing for {len(missing)} {self.of}s of {data}, the first is number "
                    f"{missing[0]}: give it for all of them, or leave these {self.of}s out."
                )
