"""Equal texts: every image that has a text, but for case and punctuation, is a right answer to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych.data.duplicates import normal_text
from diptych.errors import SettingsError

MOST_PAIRS = 50_000_000  # largest number of image-text pairs that are right for each other


def text_groups(texts: Sequence[str]) -> NDArray[np.int64]:
    """A number for each text, (M,): equal for texts that are equal but for case, punctuation and spacing."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(normal_text(text), len(numbers)) for text in texts], dtype=np.int64)


def right_pairs(
    image_of: NDArray[np.int64], group_of: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Images and texts (P,) of the pairs that are right: a text with each image that has a text of its group.

    ``image_of`` and ``group_of`` are (M,).
    """
    owned = np.unique(np.stack([group_of, image_of], axis=1), axis=0)  # (group, image), each once
    starts = np.searchsorted(owned[:, 0], group_of)
    sizes = np.searchsorted(owned[:, 0], group_of, side="right") - starts
    if sizes.sum() > MOST_PAIRS:
        raise SettingsError(
            f"equal texts make {sizes.sum():,} right pairs, more than {MOST_PAIRS:,}: so many images share a text that "
            "it says nothing; leave out --equal_texts."
        )
    texts = np.repeat(np.arange(len(image_of)), sizes)
    within = np.arange(len(texts)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return owned[np.repeat(starts, sizes) + within, 1], texts
