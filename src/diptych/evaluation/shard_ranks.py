"""Ranks over shards: a rank is a count, so the counts of parts of the gallery are added.

Images and their texts lie in the same shard. With s(i, t) the score of image i and text t, ``Own`` holds what every
query compares with, found in its own shard, and ``count_pair`` counts images of one block against texts of another:

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.errors import DataError
from diptych.evaluation.metrics import Counts
from diptych.model.scores import full_precision
from diptych.vectors.files import Written

TILE = (512, 1024)  # images and texts of one product
ROWS = 65_536  # images and texts of a block, unless one shard has more
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Images (N, D) and texts (M, D) of consecutive shards; texts are in the order of their images."""

    image: Tensor
    text: Tensor
    image_of: Ints  # (M,) rows of ``image``, ascending
    splits: tuple[str, ...]  # those its images are of
    hashes: tuple[str, ...]  # of the ids, columns, contents and texts of each shard


@dataclass(frozen=True)
class Own:
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


def blocks(shards: Sequence[Written], rows: int = ROWS) -> list[list[Written]]:
    """Consecutive shards that together have at most ``rows`` images and texts; a larger one is alone."""
    found: list[list[Written]] = []
    room = 0
    for shard in shards:
        size = shard.receipt.rows
        if not found or size > room:
            found.append([])
            room = rows
        found[-1].append(shard)
        room -= size
    return found


def read_block(shards: Sequence[Written], split: str | None = None, facts: bool = True) -> Block:
    """The vectors of some shards, of one split if it is named; with ``facts`` also what the card of a report says."""
    parts = [_read_shard(shard, split, facts) for shard in shards]
    starts = np.cumsum([0, *(len(part.image) for part in parts)])
    return Block(
        torch.cat([part.image for part in parts]),
        torch.cat([part.text for part in parts]),
        np.concatenate([part.image_of + start for part, start in zip(parts, starts, strict=False)]),
        tuple(sorted({name for part in parts for name in part.splits})),
        tuple(name for part in parts for name in part.hashes),
    )


def _read_shard(shard: Written, split: str | None, facts: bool) -> Block:
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
                raise DataError(
                    f"{shard.path}: the image of the text '{id}' is not before it: embed the shard again."
                )
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
    return Block(image, text[torch.from_numpy(order)], owner[order], tuple(splits), (digest.hexdigest(),))


class _Product:
    """Products of one shape: the scores of up to ``TILE`` rows of either side."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self.image, self.text = (torch.zeros(rows, dim, device=device) for rows in TILE)

    def __call__(self, image: Tensor, text: Tensor) -> Tensor:
        n, m = len(image), len(text)
        self.image[:n], self.text[:m] = image, text
        with full_precision(self.image.device):
            return (self.image @ self.text.T)[:n, :m]


def own_scores(block: Block, device: torch.device | str = "cpu") -> Own:
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
    of = torch.from_numpy(block.image_of)
    best = torch.full((images,), -torch.inf).scatter_reduce(0, of, own, "amax")
    is_best = own == best[of]
    first = torch.full((images,), texts).scatter_reduce(0, of[is_best], torch.arange(texts)[is_best], "amin")
    level = torch.bincount(of[is_best], minlength=images)
    return Own(
        block.image_of, own.numpy(), best.numpy(), first.numpy(), level.numpy(), block.splits, block.hashes
    )


def count_pair(
    images: Block, texts: Block, image_own: Own, text_own: Own, starts: tuple[int, int, int, int],
    device: torch.device | str = "cpu",
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
    best, first = on(image_own.best), on(image_own.first + own_text)
    own, owner = on(text_own.text), on(text_own.image_of + own_image)
    image_number, text_number = on(np.arange(len(image)) + first_image), on(np.arange(len(text)) + first_text)
    by_image, by_text = Counts(len(image), 1, where), Counts(len(text), 0, where)
    for rows, columns in _tiles(len(image), len(text)):
        part = product(image[rows], text[columns])
        by_image.add(rows, part, best[rows, None], text_number[columns], first[rows, None])
        by_text.add(columns, part, own[columns], image_number[rows, None], owner[columns])
    return PairCounts(*(
        torch.stack((side.above, side.level, side.earlier)).cpu().numpy() for side in (by_image, by_text)
    ))  # fmt: skip


def _tiles(images: int, texts: int) -> Iterator[tuple[slice, slice]]:
    for top in range(0, images, TILE[0]):
        for left in range(0, texts, TILE[1]):
            yield slice(top, min(top + TILE[0], images)), slice(left, min(left + TILE[1], texts))
