"""Retrieval over a folder of vectors: everything is ranked, a few blocks of shards are in memory at a time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from diptych.data.splits import canonical_split
from diptych.devices import pick_device
from diptych.errors import DataError, Unavailable
from diptych.evaluation.metrics import Placement, Ranks
from diptych.evaluation.report import Report
from diptych.evaluation.retrieval import evaluate_ranks
from diptych.evaluation.rules import Options, rules_of_ranks
from diptych.evaluation.shard_ranks import ROWS, Block, Ints, Own, blocks, count_pair, own_scores, read_block
from diptych.progress import track
from diptych.vectors.files import Written, open_vectors
from diptych.vectors.on_ray import Lost

Job = tuple[Any, ...]
Run = Callable[[Callable[..., Any], Sequence[Job], str], Iterable[tuple[int, Any]]]
"""Calls a function with the arguments of each job, here or elsewhere: (number of the job, result), in any order."""


def evaluate_vectors(
    folder: str | Path,
    *,
    split: str | None = None,
    device: str = "auto",
    rows: int = ROWS,
    run: Run | None = None,
    show_progress: bool = False,
    **options: Unpack[Options],
) -> Report:
    """The report of what ``diptych embed`` wrote: of all of it, or of one split. ``options`` are those of ``evaluate``.

    Each pair of blocks (of ``rows`` images and texts, or one larger shard) is counted by itself and the counts are
    added, so that the result is that of one process whatever the shards, and whoever counts. Memory: up to three
    blocks of vectors where pairs are counted, some 50 bytes an image or text here.
    """
    rules_of_ranks(**options)  # checked before any work
    began = time.perf_counter()
    opened = open_vectors(folder)
    opened.check_complete()
    if not opened.manifest.texts:
        raise DataError(
            f"{folder} was embedded without texts, so there is nothing to rank: embed with --texts."
        )
    split = None if split is None else canonical_split(split)
    groups = [tuple(group) for group in blocks(opened.written, rows)]
    call = run or (lambda function, jobs, label: _here(function, jobs, label, show_progress))
    found: list[Own | None] = [None] * len(groups)
    for number, own in _safely(call, own_of, [(group, split, device) for group in groups], "own scores"):
        found[number] = own
    owns = [own for own in found if own is not None]
    image_starts, text_starts = (
        np.cumsum([0, *(len(getattr(own, side)) for own in owns)]).tolist() for side in ("best", "text")
    )
    if not text_starts[-1]:
        what = f"no text of the split '{split}'" if split else "no text"
        raise DataError(f"{folder} holds {what}: give another --split, or none for everything.")
    ranks = _ranks(groups, owns, image_starts, text_starts, split, device, call)
    starts = zip(owns, image_starts, strict=False)
    seconds = time.perf_counter() - began
    return evaluate_ranks(
        ranks,
        np.concatenate([own.image_of + start for own, start in starts]),
        image_starts[-1],
        data=opened.manifest.name,
        split=split or "+".join(sorted({name for own in owns for name in own.splits})),
        data_hash=hashlib.sha256("".join(h for own in owns for h in own.hashes).encode()).hexdigest()[:16],
        model=opened.manifest.fingerprint,
        speed={
            "thousand_pairs_per_second": image_starts[-1] * text_starts[-1] / seconds / 1000,
            "seconds": seconds,
        },
        **options,
    )


def _ranks(
    groups: Sequence[tuple[Written, ...]],
    owns: Sequence[Own],
    image_starts: Sequence[int],
    text_starts: Sequence[int],
    split: str | None,
    device: str,
    call: Run,
) -> Ranks:
    """Add the counts of all pairs of blocks."""
    pairs = [(a, b) for a in range(len(groups)) for b in range(len(groups))]
    image = np.zeros((3, image_starts[-1]), np.int64)
    text = np.zeros((3, text_starts[-1]), np.int64)
    jobs = _Jobs(
        len(pairs),
        lambda n: (
            groups[pairs[n][0]], groups[pairs[n][1]], owns[pairs[n][0]], owns[pairs[n][1]],
            (image_starts[pairs[n][0]], text_starts[pairs[n][0]], image_starts[pairs[n][1]], text_starts[pairs[n][1]]),
            split, device,
        ),
    )  # fmt: skip
    for number, counts in _safely(call, pair_of, jobs, "ranks"):
        a, b = pairs[number]
        image[:, image_starts[a] : image_starts[a + 1]] += counts.image
        text[:, text_starts[b] : text_starts[b + 1]] += counts.text
    level = np.concatenate([own.level for own in owns])
    owner = np.concatenate([own.image_of + start for own, start in zip(owns, image_starts, strict=False)])
    asked = np.flatnonzero(np.bincount(owner, minlength=image_starts[-1]))
    everything: Ints = np.arange(text_starts[-1])
    return Ranks(
        Placement(asked, image[0, asked], (image[1] - level)[asked], image[2, asked]),
        Placement(everything, text[0], text[1] - 1, text[2]),
    )


def _safely(
    call: Run, function: Callable[..., Any], jobs: Sequence[Job], label: str
) -> Iterator[tuple[int, Any]]:
    """The results of all jobs: a rank needs every count, so that one that is lost for good ends it."""
    for number, result in call(function, jobs, label):
        if isinstance(result, Lost):
            raise Unavailable(f"the {label} of block {number} could not be counted, {result.reason}")
        yield number, result


class _Jobs(Sequence[Job]):
    """The arguments of many jobs, made when one is asked for: they hold arrays."""

    def __init__(self, count: int, make: Callable[[int], Job]) -> None:
        self.size, self.make = count, make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.make(index)


def _here(
    function: Callable[..., Any], jobs: Sequence[Job], label: str, show_progress: bool
) -> Iterator[tuple[int, Any]]:
    for number, job in enumerate(track(jobs, label, len(jobs), show_progress)):
        yield number, function(*job)
    _block.cache_clear()


@lru_cache(maxsize=2)
def _block(group: tuple[Written, ...], split: str | None) -> Block:
    """A block of vectors; the two used last are kept, since the next pair shares one of them."""
    return read_block(group, split, facts=False)


def own_of(group: tuple[Written, ...], split: str | None, device: str) -> Own:
    """What the queries of a block compare with: the work of one process of many."""
    return own_scores(read_block(group, split), pick_device(device))


def pair_of(
    images: tuple[Written, ...],
    texts: tuple[Written, ...],
    image_own: Own,
    text_own: Own,
    starts: tuple[int, int, int, int],
    split: str | None,
    device: str,
) -> Any:
    """The counts of one pair of blocks: the work of one process of many."""
    return count_pair(
        _block(images, split), _block(texts, split), image_own, text_own, starts, pick_device(device)
    )
