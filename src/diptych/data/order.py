"""In which order the texts of an epoch are seen: a function of the seed and the epoch, with no state to lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
WINDOW = 16_384  # texts that are shuffled together; their images lie in a few neighbouring shards
_MIXING, _PASSING = 0, 1  # keys of the two streams of random numbers


class TextOrder(Protocol):
    """Which texts an epoch shows, and when."""

    def __len__(self) -> int:
        """Texts of an epoch, the same for every epoch."""
        ...

    def epoch(self, seed: int, number: int) -> Ints:
        """The rows of the texts of an epoch, in order."""
        ...

    def renumbered(self, new_row: Ints) -> TextOrder:
        """The order of a subset: ``new_row`` (M,) is the new row of each text, −1 for one that is left out."""
        ...


@dataclass(frozen=True, eq=False)
class Stream:
    """The texts of one corpus, shard by shard: ``texts`` are rows, ``shards`` the size of each shard in texts.

    ``weight`` is how often an epoch passes over the corpus: 1 shows every text once, 0.5 half of them (the other half
    comes in the next epoch), 2 every text twice.
    """

    name: str
    texts: Ints
    shards: Sequence[int]
    weight: float = 1.0

    @property
    def taken(self) -> int:
        """Texts of this corpus in an epoch."""
        return round(self.weight * len(self.texts))

    def one_pass(self, rng: np.random.Generator, window: int) -> Ints:
        """All texts once: the shards in random order, then windows of ``window`` texts shuffled."""
        ends = np.cumsum(self.shards)
        pieces = [self.texts[ends[s] - self.shards[s] : ends[s]] for s in rng.permutation(len(self.shards))]
        order = np.concatenate(pieces)
        for start in range(0, len(order), window):
            rng.shuffle(order[start : start + window])
        return order


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several corpora at once, each in its own order, mixed evenly over the epoch in proportion to their weights.

    A corpus is an endless sequence of passes, each in an order drawn from (seed, corpus, pass); epoch e takes the
    e-th piece of it, so over time every text is seen equally often whatever the weight. Nothing but the seed and the
    epoch decides what stands at a position: a killed run goes on at the exact sample.
    """

    streams: tuple[Stream, ...]
    window: int = WINDOW

    def __len__(self) -> int:
        return sum(stream.taken for stream in self.streams)

    def epoch(self, seed: int, number: int) -> Ints:
        """The rows of the texts of an epoch, in order."""
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_MIXING, number)))
        corpus_at = rng.permutation(np.repeat(np.arange(len(self.streams)), [s.taken for s in self.streams]))
        order = np.empty(len(self), dtype=np.int64)
        for corpus in range(len(self.streams)):
            order[corpus_at == corpus] = self._piece(seed, corpus, number)
        return order

    def renumbered(self, new_row: Ints) -> Mixture:
        """The same corpora without the texts that were left out; a corpus without texts disappears."""
        streams = []
        for stream in self.streams:
            rows = new_row[stream.texts]
            kept = rows >= 0
            ends = np.cumsum(stream.shards)
            counts = [
                int(kept[end - size : end].sum()) for end, size in zip(ends, stream.shards, strict=True)
            ]
            if kept.any():
                streams.append(replace(stream, texts=rows[kept], shards=[c for c in counts if c]))
        return replace(self, streams=tuple(streams))

    def _piece(self, seed: int, corpus: int, number: int) -> Ints:
        stream = self.streams[corpus]
        size, first, last = len(stream.texts), number * stream.taken, (number + 1) * stream.taken
        pieces = [np.empty(0, dtype=np.int64)]
        for turn in range(first // size, -(-last // size)):
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_PASSING, corpus, turn)))
            begin = turn * size
            pieces.append(stream.one_pass(rng, self.window)[max(first - begin, 0) : last - begin])
        return np.concatenate(pieces)
