"""Which texts and images are scored together: buckets of similar lengths, cut to fit the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of texts that are padded to the same number of words."""

    rows: Sequence[int]
    words: int


def length_buckets(sizes: Sequence[int], overhead: float) -> list[Bucket]:
    """The buckets with the least padding, shortest texts first.

    Minimises Σ over buckets of ``overhead`` + rows · (longest + 1): ``overhead`` is the cost of one more bucket
    in words, the 1 is the global node. Texts of one length stay together and in order.
    """
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    lengths = sorted(set(sizes))
    counts = [0] * len(lengths)
    place = {length: n for n, length in enumerate(lengths)}
    for size in sizes:
        counts[place[size]] += 1
    before = [0, *accumulate(counts)]  # texts shorter than lengths[n]
    best: list[tuple[float, int]] = [
        (0.0, 0)
    ]  # cost of the first n lengths, and where their last bucket starts
    for end, longest in enumerate(lengths, start=1):
        costs = (
            (best[start][0] + overhead + (before[end] - before[start]) * (longest + 1), start)
            for start in range(end)
        )
        best.append(min(costs))
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    cuts.reverse()
    return [Bucket(order[before[a] : before[b]], lengths[b - 1]) for a, b in pairwise(cuts)]


def spans(count: int, most: int) -> Iterator[slice]:
    """Slices of about equal length, none longer than ``most``."""
    pieces = max(1, -(-count // max(1, most)))
    size = -(-count // pieces) if count else 0
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + size, count))
