"""Batches as they are prepared for an encoder, in numpy: the search half reads them as they are, torch at its edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sets:
    """A padded batch of sets: regions, grid cells, video frames, or words.

    ``values`` is (B, L, D) for vectors and (B, L) for token ids; ``mask`` is (B, L), True where valid.
    """

    values: NDArray[Any]
    mask: NDArray[np.bool_]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Valid elements of each set, (B,)."""
        return np.asarray(self.mask.sum(axis=1), np.int64)

    @property
    def is_ids(self) -> bool:
        """Whether the elements are token ids rather than vectors."""
        return self.values.ndim == 2


Arrays = Sets | NDArray[np.float32]
"""What an image encoder reads: sets (regions, frames, patches) or pixels (B, 3, H, W)."""
