"""Retrieval over a folder of vectors: everything is ranked, a few blocks of shards are in memory at a time.

A rank is a count, so the counts of parts of the gallery are added. Images and their texts lie in the same shard. With
s(i, t) the score of image i and text t, ``BlockScores`` holds what every query compares with, found in its own shard,
and ``count_pair`` counts images of one block against texts of another:

====================================  =========================================================================
of an image i                         its best own score b(i) = max s(i, t) over its texts, and the first such t
of a text t                           s(i(t), t), the score of its image
above, of i (of t)                    how many texts (images) score more
level, of i (of t)                    how many score exactly the same, its own ones included
earlier, of i (of t)                  how many of these have a smaller number in the whole collection
====================================  =========================================================================

The ranks are exactly those of ``evaluation.metrics.count_ranks`` on all vectors at once, ties included, because an own
score has the same bits wherever it is computed: each product multiplies matrices of one fixed shape, copied to the same
buffers, so that it always runs the same kernel.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.captions import canonical_split
from diptych.devices import pick_device
from diptych.errors import DataError, Unavailable
from diptych.evaluation.metrics import Counts, OwnScores, Placement, Ranks
from diptych.evaluation.protocols import Options, rules_of_ranks
from diptych.evaluation.report import Report
from diptych.evaluation.retrieval import evaluate_ranks
from diptych.model.scores import full_precision
from diptych.progress import track
from diptych.vectors.files import Shard, open_vectors
from diptych.vectors.on_ray import DeadWorker

TILE = (512, 1024)  # images and texts of one product
ROWS = 65_536  # images and texts of a block, unless one shard has more
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ShardBlock:
    """Images (N, D) and texts (M, D) of consecutive shards; texts are in the order of their images."""

    image: Tensor
    text: Tensor
    image_of: Ints  # (M,) rows of ``image``, ascending
    splits: tuple[str, ...]  # those its images are of
    hashes: tuple[str, ...]  # of the ids, columns, contents and texts of each shard


@dataclass(frozen=True)
class BlockScores:
    """What the queries of a block compare with."""

    image_of: Ints  # (M,)
    text: NDArray[np.float32]  # (M,) score of each text with its image
    best: NDArray[np.float32]  # (N,) score of each image with its best text, −∞ without one
    first: Ints  # (N,) the first text that has it
    level: Ints  # (N,) how many have it
    splits: tuple[str, ...]
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class PairCounts:
    """(above, level, earlier) for the images of one block and for the texts of another."""

    image: Ints  # (3, N)
    text: Ints  # (3, M)


def blocks(shards: Sequence[Shard], rows: int = ROWS) -> list[list[Shard]]:
    """Consecutive shards that together have at most ``rows`` images and texts; a larger one is alone."""
    found: list[list[Shard]] = []
    room = 0
    for shard in shards:
        size = shard.receipt.rows
        if not found or size > room:
            found.append([])
            room = rows
        found[-1].append(shard)
        room -= size
    return found


def read_block(shards: Sequence[Shard], split: str | None = None, facts: bool = True) -> ShardBlock:
    """The vectors of some shards, of one split if it is named; with ``facts`` also what the card of a report says."""
    parts = [_read_shard(shard, split, facts) for shard in shards]
    starts = np.cumsum([0, *(len(part.image) for part in parts)])
    return ShardBlock(
        torch.cat([part.image for part in parts]),
        torch.cat([part.text for part in parts]),
        np.concatenate([part.image_of + start for part, start in zip(parts, starts, strict=False)]),
        tuple(sorted({name for part in parts for name in part.splits})),
        tuple(name for part in parts for name in part.hashes),
    )


def _read_shard(shard: Shard, split: str | None, facts: bool) -> ShardBlock:
    places: dict[str, int] = {}  # of the images that are kept
    vectors: dict[str, list[NDArray[np.float32]]] = {"image": [], "text": []}
    image_of: list[int] = []
    splits: set[str] = set()
    digest = hashlib.sha256()
    further = ("metadata", "text", "content") if facts else ("metadata",) if split is not None else ()
    for table in shard.tables(("id", "kind", "image_id", *further, "vector")):
        values = shard.values_of(table)
        columns = [values[name] for name in ("id", "kind", "image_id", *further)]
        kept: dict[str, list[int]] = {"image": [], "text": []}
        for row, (id, kind, image_id, *rest) in enumerate(zip(*columns, strict=True)):
            if kind == "image":
                own = str(shard.metadata_of(rest[0]).get("split") or "") if rest else ""
                if split is not None and own != split:
                    continue
                splits.add(own)
                places[id] = len(places)
            elif image_id in places:
                image_of.append(places[image_id])
            elif split is not None:
                continue
            else:
                raise DataError(f"{shard.path}: no image before the text '{id}': embed the shard again.")
            kept[kind].append(row)
            if facts:
                metadata, text, content = rest
                # a file's content key begins with its size and time, which a copy does not keep
                digest.update("\0".join((id, text, metadata, content.rsplit(":", 1)[-1], "")).encode())
        found = shard.vectors_of(table)
        for kind, rows in kept.items():
            vectors[kind].append(found[rows])
    owner = np.asarray(image_of, np.int64)
    order = np.argsort(owner, kind="stable")
    empty = np.zeros((0, shard.dim), np.float32)
    image, text = (torch.from_numpy(np.concatenate([empty, *vectors[kind]])) for kind in ("image", "text"))
    for kind, side in (("image", image), ("text", text)):
        if not torch.isfinite(side).all():
            raise DataError(f"{shard.path} has {kind} vectors that are not finite: embed the shard again.")
    return ShardBlock(
        image, text[torch.from_numpy(order)], owner[order], tuple(splits), (digest.hexdigest(),)
    )


class _Product:
    """Products of one shape: the scores of up to ``TILE`` rows of either side."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self.image, self.text = (torch.zeros(rows, dim, device=device) for rows in TILE)

    def __call__(self, image: Tensor, text: Tensor) -> Tensor:
        n, m = len(image), len(text)
        self.image[:n], self.text[:m] = image, text
        with full_precision(self.image.device):
            return (self.image @ self.text.T)[:n, :m]


def own_scores(block: ShardBlock, device: torch.device | str = "cpu") -> BlockScores:
    """What the queries of a block compare with, from the tiles that hold its own pairs."""
    product = _Product(block.image.shape[1], torch.device(device))
    images, texts = len(block.image), len(block.text)
    own = torch.zeros(texts)
    for left in range(0, texts, TILE[1]):
        columns = slice(left, min(left + TILE[1], texts))
        owner = block.image_of[columns]
        for top in range(int(owner[0]) // TILE[0] * TILE[0], int(owner[-1]) + 1, TILE[0]):
            part = product(block.image[top : top + TILE[0]], block.text[columns])
            here = np.flatnonzero((owner >= top) & (owner < top + TILE[0]))
            own[left + here] = part[owner[here] - top, here].cpu()
    best = OwnScores.of(torch.from_numpy(block.image_of), torch.arange(texts), own, images)
    return BlockScores(
        block.image_of, own.numpy(), best.best.numpy(), best.first.numpy(), best.level.numpy(), block.splits,
        block.hashes,
    )  # fmt: skip


def count_pair(
    images: ShardBlock, texts: ShardBlock, image_own: BlockScores, text_own: BlockScores,
    starts: tuple[int, int, int, int], device: torch.device | str = "cpu",
) -> PairCounts:  # fmt: skip
    """Count the images of one block against the texts of another.

    ``starts`` are the numbers, in the whole collection, of the first image and text of the first block, and of the
    second: numbers decide which of two equal scores is earlier.
    """
    where = torch.device(device)
    product = _Product(images.image.shape[1], where)
    first_image, own_text, own_image, first_text = starts

    def on(values: Any) -> Tensor:
        return torch.as_tensor(values).to(where)

    image, text = on(images.image), on(texts.text)
    by_image = Counts(on(image_own.best), on(image_own.first + own_text), 1)
    by_text = Counts(on(text_own.text), on(text_own.image_of + own_image), 0)
    image_number, text_number = on(np.arange(len(image)) + first_image), on(np.arange(len(text)) + first_text)
    for top in range(0, len(image), TILE[0]):
        for left in range(0, len(text), TILE[1]):
            rows, columns = slice(top, top + TILE[0]), slice(left, left + TILE[1])
            part = product(image[rows], text[columns])
            by_image.add(rows, part, text_number[columns])
            by_text.add(columns, part, image_number[rows])
    return PairCounts(*(
        torch.stack((side.above, side.level, side.earlier)).cpu().numpy() for side in (by_image, by_text)
    ))  # fmt: skip


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
        raise DataError(f"{folder} was embedded without texts, so nothing can be ranked: embed with --texts.")
    split = None if split is None else canonical_split(split)
    groups = [tuple(group) for group in blocks(opened.shards, rows)]
    call = run or (lambda function, jobs, label: _here(function, jobs, label, show_progress))
    found: list[BlockScores | None] = [None] * len(groups)
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
    groups: Sequence[tuple[Shard, ...]],
    owns: Sequence[BlockScores],
    image_starts: Sequence[int],
    text_starts: Sequence[int],
    split: str | None,
    device: str,
    call: Run,
) -> Ranks:
    """Add the counts of all pairs of blocks."""
    pairs = [(a, b) for a in range(len(groups)) for b in range(len(groups))]
    image, text = (np.zeros((3, starts[-1]), np.int64) for starts in (image_starts, text_starts))
    begins = list(zip(image_starts, text_starts, strict=True))
    jobs = [
        (groups[a], groups[b], owns[a], owns[b], (*begins[a], *begins[b]), split, device) for a, b in pairs
    ]
    for number, counts in _safely(call, pair_of, jobs, "ranks"):
        a, b = pairs[number]
        image[:, image_starts[a] : image_starts[a + 1]] += counts.image
        text[:, text_starts[b] : text_starts[b + 1]] += counts.text
    level = np.concatenate([own.level for own in owns])
    owner = np.concatenate([own.image_of + start for own, start in zip(owns, image_starts, strict=False)])
    asked = np.flatnonzero(np.bincount(owner, minlength=image_starts[-1]))
    image[1] -= level
    text[1] -= 1  # the own image
    return Ranks(Placement(asked, *image[:, asked]), Placement(np.arange(text_starts[-1]), *text))


def _safely(
    call: Run, function: Callable[..., Any], jobs: Sequence[Job], label: str
) -> Iterator[tuple[int, Any]]:
    """The results of all jobs: a rank needs every count, so that one that is lost for good ends it."""
    for number, result in call(function, jobs, label):
        if isinstance(result, DeadWorker):
            raise Unavailable(f"the {label} of block {number} could not be counted, {result.reason}")
        yield number, result


def _here(
    function: Callable[..., Any], jobs: Sequence[Job], label: str, show_progress: bool
) -> Iterator[tuple[int, Any]]:
    for number, job in enumerate(track(jobs, label, len(jobs), show_progress)):
        yield number, function(*job)
    _block.cache_clear()


@lru_cache(maxsize=2)
def _block(group: tuple[Shard, ...], split: str | None) -> ShardBlock:
    """A block of vectors; the two used last are kept, since the next pair shares one of them."""
    return read_block(group, split, facts=False)


def own_of(group: tuple[Shard, ...], split: str | None, device: str) -> BlockScores:
    """What the queries of a block compare with: the work of one process of many."""
    return own_scores(read_block(group, split), pick_device(device))


def pair_of(
    images: tuple[Shard, ...], texts: tuple[Shard, ...], image_own: BlockScores, text_own: BlockScores,
    starts: tuple[int, int, int, int], split: str | None, device: str,
) -> Any:  # fmt: skip
    """The counts of one pair of blocks: the work of one process of many."""
    blocks_of = _block(images, split), _block(texts, split)
    return count_pair(*blocks_of, image_own, text_own, starts, pick_device(device))
