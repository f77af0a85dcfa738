"""Size Augmentation of words: masking, replacing and deleting them before they are padded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class WordAugmentation:
    """Touch each word with probability ``rate``; of those touched 50 % masked, 10 % replaced, 40 % deleted.

    A word is all its pieces together: one draw decides for all of them, one mask or one random vocabulary
    entry stands for each piece. Hence 40 % · 0.2 = 8 % of words are dropped at the published rate of 0.2, the
    rest of what is touched is masking noise.

    ========================  ===========================================
    ``rate``                  0.2 in VSE∞
    ``mask_id``               the id that masks a piece
    ``choices``               the vocabulary's ids, drawn from uniformly
    ========================  ===========================================
    """

    rate: float
    mask_id: int
    choices: Ints
    masked: float = 0.5  # of the touched words
    replaced: float = 0.1

    def __call__(self, ids: Ints, words: Ints, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """New (ids, rows) of flat tokens (T,).

        ``words`` numbers the words of each text, −1 for tokens that are never touched; ``rows`` is the text
        each token belongs to, ascending. No text is left empty: where every token was deleted the first one
        stays.
        """
        if not len(ids):
            return ids, rows
        starts = np.ones(len(ids), dtype=bool)  # whether a token opens a new word
        starts[1:] = (words[1:] != words[:-1]) | (rows[1:] != rows[:-1])
        word_of = np.cumsum(starts) - 1  # (T,)
        draw = rng.random(int(word_of[-1]) + 1)[word_of] / self.rate if self.rate else np.ones(len(ids))
        touched = (draw < 1.0) & (words >= 0)
        replace = touched & (draw >= self.masked) & (draw < self.masked + self.replaced)
        new = np.where(touched & (draw < self.masked), self.mask_id, ids)
        new[replace] = rng.choice(self.choices, int(replace.sum()))
        keep = ~(touched & (draw >= self.masked + self.replaced))
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        emptied = np.add.reduceat(keep, firsts) == 0
        keep[firsts[emptied]] = True
        return new[keep], rows[keep]
