"""Finding texts and pictures that are there twice, exactly or nearly."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diptych.progress import track

HASH_SIDE = 16  # a difference hash of 16×16 bits
NEAR_BITS = 10  # nearly equal pictures differ in at most this many of the 256 bits,
NEAR_COLOUR = 6.0  # and by at most so much of 255 in the mean of their cells' colours
COLOUR_SIDE = 8  # a thumbnail of 8×8 cells
FLAT_BITS = 8  # a picture with fewer steps in brightness than this is too plain to compare
BLOCK = 256  # pictures compared with all others at a time


def groups(keys: Iterable[Hashable]) -> list[list[int]]:
    """Places of equal keys, for every key that is there more than once."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    return [rows for rows in places.values() if len(rows) > 1]


def normal_text(text: str) -> str:
    """A text without case, punctuation and spacing: what makes two texts nearly the same."""
    return " ".join(_words().findall(unicodedata.normalize("NFC", text).casefold()))


@functools.cache
def _words() -> re.Pattern[str]:
    """Words of letters, digits and marks: vowel signs, which many scripts write with, are no letters to ``re``."""
    marks = "".join(
        c for c in map(chr, range(0x300, sys.maxunicode + 1)) if unicodedata.category(c)[0] == "M"
    )
    return re.compile(f"[\\w{re.escape(marks)}]+")


@dataclass(frozen=True)
class Look:
    """What a picture looks like from afar; scaling and re-encoding leave it almost as it was."""

    bits: NDArray[np.uint64]  # (4,): whether each of 16×16 cells is brighter than its right neighbour (dHash)
    colours: NDArray[np.uint8]  # (192,): a thumbnail

    @staticmethod
    def of(picture: Image.Image) -> Look:
        box = Image.Resampling.BOX
        cells = np.asarray(picture.convert("L").resize((HASH_SIDE + 1, HASH_SIDE), box), dtype=np.int16)
        colours = np.asarray(picture.convert("RGB").resize((COLOUR_SIDE, COLOUR_SIDE), box), dtype=np.uint8)
        return Look(np.packbits(cells[:, :-1] > cells[:, 1:]).view(np.uint64), colours.reshape(-1))

    def is_near(self, other: Look) -> bool:
        """Whether the colours agree too; pairs come with bits that do."""
        difference = np.abs(self.colours.astype(np.int16) - other.colours)
        return float(difference.mean()) <= NEAR_COLOUR


def near_groups(looks: Sequence[Look], show_progress: bool = True) -> list[list[int]]:
    """Places of pictures chained by near pairs; plain pictures are left out."""
    bits = np.asarray([look.bits for look in looks], dtype=np.uint64).reshape(-1, 4)
    busy = np.flatnonzero(np.bitwise_count(bits).sum(axis=1) >= FLAT_BITS)
    codes = bits[busy]
    leader = np.arange(len(looks))

    def find(row: int) -> int:
        while leader[row] != row:
            row = int(leader[row])
        return row

    starts = range(0, len(codes), BLOCK)
    for start in track(starts, "comparing images", show=show_progress):
        block, others = codes[start : start + BLOCK], codes[start:]
        distance = np.zeros((len(block), len(others)), dtype=np.uint16)
        for word in range(bits.shape[1]):
            distance += np.bitwise_count(block[:, word, None] ^ others[None, :, word])
        for a, b in zip(*np.nonzero(np.triu(distance <= NEAR_BITS, 1)), strict=True):
            one, two = int(busy[start + a]), int(busy[start + b])
            if looks[one].is_near(looks[two]):
                first, second = sorted((find(one), find(two)))
                leader[second] = first
    return groups([find(place) for place in range(len(looks))])


def across(rows: Sequence[int], splits: Sequence[str]) -> bool:
    """Whether images lie in more than one split."""
    return len({splits[row] for row in rows}) > 1
