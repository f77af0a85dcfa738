"""Ranks by counting, and the metrics made of them. Pure: scores and ``image_of`` in, numbers out.

The rank of a query is the number of gallery items before its best own item, so 0 is the best rank:

* image → text: texts scoring above the best text of the image;
* text → image: images scoring above the image of the text.

R@K = 100 · mean(rank < K). Items that score exactly as much as the own item are *tied* with it. A tie rule
says which of them stand before it:

===============  ============================================================================================
``index``        those with a smaller gallery index, as in a stable sort by descending score (the default)
``strict``       none: only a score above counts. A model that scores everything alike gets 100 %
``expected``     half of them
``pessimistic``  all of them
===============  ============================================================================================

Other own texts of an image are never before its best one, under any rule. Without ties the four agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.duplicates import normal_text
from diptych.errors import DataError, SettingsError
from diptych.model.scores import Scores, Where, as_scores, checked_tile

Ties = Literal["index", "strict", "expected", "pessimistic"]
TIES: tuple[str, ...] = get_args(Ties)
KS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
TILES = {"cpu": (512, 1024), "cuda": (4096, 8192)}  # images and texts of one tile, by device
KEPT_BYTES = 256 * 2**20  # memory for cached tiles that contain matched pairs, between the two passes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the best own item of each query stands, under every tie rule at once.

    ``queries`` are row numbers (images without a text are not queries). ``above`` counts the items that score
    more, ``tied`` the others that score the same, ``earlier`` those of the tied with a smaller gallery index.
    All are (Q,).
    """

    queries: NDArray[np.int64]
    above: NDArray[np.int64]
    tied: NDArray[np.int64]
    earlier: NDArray[np.int64]

    def ranks(self, ties: str = "index") -> NDArray[np.float64]:
        """Ranks from 0 under a tie rule; whole numbers but for ``expected``."""
        before = {
            "index": self.earlier,
            "strict": np.zeros_like(self.tied),
            "expected": self.tied / 2,
            "pessimistic": self.tied,
        }
        return (self.above + before[checked_ties(ties)]).astype(np.float64)

    @property
    def tied_queries(self) -> int:
        """Queries whose rank depends on the tie rule."""
        return int((self.tied > 0).sum())

    @property
    def tied_at_top(self) -> int:
        """Queries that are tied within the best ten, where the tie rule may decide a recall."""
        return int(((self.tied > 0) & (self.above < max(KS))).sum())


@dataclass(frozen=True, slots=True)
class Ranks:
    """Both directions of one retrieval."""

    image_to_text: Placement
    text_to_image: Placement

    def __iter__(self) -> Iterator[tuple[str, Placement]]:
        """(direction in words, placement)."""
        return ((name, getattr(self, name)) for name in DIRECTIONS)


def count_ranks(
    scores: Scores | Tensor | NDArray[Any],
    image_of: Sequence[int] | NDArray[np.int64] | Tensor,
    tile: tuple[int, int] | None = None,
) -> Ranks:
    """Ranks in both directions from one pass over the scores, a tile at a time, without sorting.

    ``image_of`` (M,) is the image of each text; any number of texts per image. The tiles that hold own pairs
    come first, since every query needs its own score before anything can be counted; the own scores are read
    from these very tiles, for a second computation with other rounding would make and break ties.
    """
    scores = as_scores(scores)
    images, texts = scores.shape
    owner = checked_pairing(image_of, images, texts)
    order = np.argsort(owner, kind="stable")  # texts grouped by image: own pairs then lie in few tiles
    tiles = _Tiles(scores, order, tile or TILES.get(scores.device.type, TILES["cpu"]))
    device = scores.device
    image_number, text_number = torch.arange(images, device=device), torch.from_numpy(order).to(device)
    image_of_text = torch.from_numpy(owner[order]).to(device)  # (M,) ascending

    own = tiles.own(owner[order])  # (M,) score of each text with its image
    best = own.new_full((images,), -torch.inf).scatter_reduce(0, image_of_text, own, "amax")
    is_best = own == best[image_of_text]
    own_best = torch.bincount(image_of_text[is_best], minlength=images)
    first = torch.full((images,), texts, device=device)  # the best own text; of several, the first
    first = first.scatter_reduce(0, image_of_text[is_best], text_number[is_best], "amin")

    by_image, by_text = Counts(images, 1, device), Counts(texts, 0, device)
    for rows, columns, part in tiles:
        by_image.add(rows, part, best[rows, None], text_number[columns], first[rows, None])
        by_text.add(columns, part, own[columns], image_number[rows, None], image_of_text[columns])

    asked = np.flatnonzero(np.bincount(owner, minlength=images))
    return Ranks(
        by_image.placement(own_best, asked, asked),
        by_text.placement(torch.ones_like(text_number), np.argsort(order), np.arange(texts)),
    )


def count_shared_ranks(
    scores: Scores | Tensor | NDArray[Any],
    image_of: NDArray[np.int64],
    text_of: NDArray[np.int64],
    tile: tuple[int, int] | None = None,
) -> Ranks:
    """``count_ranks`` where a text may belong to several images: the pairs are (image_of[p], text_of[p]).

    The rank of a text is that of the best of its images, as the rank of an image is that of the best of its texts.
    Texts without an image, and images without a text, are no queries but stand in the gallery.
    """
    scores = as_scores(scores)
    tiles = _Tiles(scores, np.arange(scores.shape[1]), tile or TILES.get(scores.device.type, TILES["cpu"]))
    device = scores.device
    sides = [torch.from_numpy(np.asarray(one, np.int64)).to(device) for one in (image_of, text_of)]
    own = torch.full(sides[0].shape, -torch.inf, device=device)
    for rows, columns, part in tiles:
        own = own.to(part.dtype)  # rounded otherwise, a score would not be level with itself
        inside = (sides[0] >= rows.start) & (sides[0] < rows.stop)
        inside &= (sides[1] >= columns.start) & (sides[1] < columns.stop)
        own[inside] = part[sides[0][inside] - rows.start, sides[1][inside] - columns.start]
    best, first, level = [], [], []
    for side, other, count in zip(sides, sides[::-1], scores.shape, strict=True):
        highest = own.new_full((count,), -torch.inf).scatter_reduce(0, side, own, "amax")
        is_best = own == highest[side]
        places = torch.full((count,), max(scores.shape), device=device)
        first.append(places.scatter_reduce(0, side[is_best], other[is_best], "amin"))
        level.append(torch.bincount(side[is_best], minlength=count))
        best.append(highest)
    numbers = [torch.arange(count, device=device) for count in scores.shape]
    by_image, by_text = Counts(scores.shape[0], 1, device), Counts(scores.shape[1], 0, device)
    for rows, columns, part in tiles:
        by_image.add(rows, part, best[0][rows, None], numbers[1][columns], first[0][rows, None])
        by_text.add(columns, part, best[1][columns], numbers[0][rows, None], first[1][columns])
    asked = [np.unique(one) for one in (image_of, text_of)]
    return Ranks(
        by_image.placement(level[0], asked[0], asked[0]), by_text.placement(level[1], asked[1], asked[1])
    )


def recall_at(ranks: NDArray[Any], ks: Sequence[int] = KS) -> dict[int, float]:
    """R@K in percent for each K: the share of queries with an own item among the first K."""
    if not len(ranks):
        raise DataError("recall of no queries: the data need at least one text.")
    return {k: 100.0 * float(np.mean(np.asarray(ranks) < k)) for k in ks}


def median_rank(ranks: NDArray[Any]) -> float:
    """floor(median) + 1: counted from 1, as papers print it."""
    return float(np.floor(np.median(ranks)) + 1)


def mean_rank(ranks: NDArray[Any]) -> float:
    """mean + 1: counted from 1, as papers print it."""
    return float(np.mean(ranks) + 1)


def rsum(metrics: Mapping[str, float]) -> float:
    """The sum of R@1, R@5 and R@10 of both directions; 600 at most."""
    return sum(metrics[f"{direction}_recall@{k}"] for direction in DIRECTIONS for k in KS)


def summary(ranks: Ranks, ties: str = "index") -> dict[str, float]:
    """Every metric by name: ``image_to_text_recall@1``, ..., ``text_to_image_mean_rank``, ``rsum``."""
    metrics: dict[str, float] = {}
    for direction, placement in ranks:
        places = placement.ranks(ties)
        metrics |= {f"{direction}_recall@{k}": value for k, value in recall_at(places).items()}
        metrics[f"{direction}_median_rank"] = median_rank(places)
        metrics[f"{direction}_mean_rank"] = mean_rank(places)
    metrics["rsum"] = rsum(metrics)
    metrics["mean_recall"] = metrics["rsum"] / (len(DIRECTIONS) * len(KS))
    return metrics


def retrieval_metrics(
    scores: Scores | Tensor | NDArray[Any],
    image_of: Sequence[int] | NDArray[np.int64] | Tensor,
    ties: str = "index",
) -> dict[str, float]:
    """The metrics of scores (images, texts) as a flat dict; the primary one is ``rsum``."""
    checked_ties(ties)
    return summary(count_ranks(scores, image_of), ties)


def checked_ties(ties: str) -> str:
    """A tie rule that exists."""
    if ties not in TIES:
        raise SettingsError(f"ties='{ties}' is unknown: choose one of {', '.join(TIES)}.")
    return ties


def checked_pairing(
    image_of: Sequence[int] | NDArray[Any] | Tensor, images: int, texts: int
) -> NDArray[np.int64]:
    """``image_of`` as (M,) int64 that fits scores (images, texts)."""
    owner = np.asarray(image_of.cpu() if isinstance(image_of, Tensor) else image_of)
    if not texts or not images:
        raise DataError(
            f"scores of {images} images and {texts} texts cannot be ranked: both sides need an item."
        )
    if owner.shape != (texts,) or owner.dtype.kind not in "iu":
        raise DataError(
            f"image_of is {owner.dtype} of shape {owner.shape} for {texts} texts: "
            "give the image row of each text."
        )
    if owner.min() < 0 or owner.max() >= images:
        raise DataError(
            f"image_of reaches from {owner.min()} to {owner.max()}, but there are {images} images: count from 0."
        )
    return owner.astype(np.int64)


class _Tiles:
    """The tiles of scores whose texts are taken in ``order``, each in (rows, columns, scores)."""

    def __init__(self, scores: Scores, order: NDArray[np.int64], size: tuple[int, int]) -> None:
        self.scores = scores
        in_order = np.array_equal(order, np.arange(len(order)))
        self.order = None if in_order else torch.from_numpy(order).to(scores.device)
        self.size = tuple(_even(total, most) for total, most in zip(scores.shape, size, strict=True))
        self.kept: dict[tuple[int, int], Tensor] = {}
        self.room = KEPT_BYTES

    def own(self, image_number: NDArray[np.int64]) -> Tensor:
        """The score of each text with its image, (M,); ``image_number`` is ascending."""
        places = np.stack([image_number // self.size[0], np.arange(len(image_number)) // self.size[1]])
        starts = np.flatnonzero(np.any(np.diff(places, axis=1, prepend=-1) != 0, axis=0))
        found = []
        for start, stop in zip(starts, [*starts[1:], len(image_number)], strict=True):
            i, j = int(places[0, start]), int(places[1, start])
            part = self.part(i, j)
            used = part.numel() * part.element_size()
            if used <= self.room:
                self.room -= used
                self.kept[i, j] = part
            rows = torch.from_numpy(image_number[start:stop] - i * self.size[0]).to(part.device)
            columns = torch.arange(int(start), int(stop), device=part.device) - j * self.size[1]
            found.append(part[rows, columns])
        return torch.cat(found)

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        (images, texts), (height, width) = self.scores.shape, self.size
        for i in range(-(-images // height)):
            for j in range(-(-texts // width)):
                part = self.kept.pop((i, j)) if (i, j) in self.kept else self.part(i, j)
                top, left = i * height, j * width
                yield slice(top, top + part.shape[0]), slice(left, left + part.shape[1]), part

    def part(self, i: int, j: int) -> Tensor:
        """Tile (i, j).

        At either end a full tile is asked for and its new part returned: every tile has one shape, so that
        every product runs the same kernel with the same rounding.
        """
        (images, texts), (height, width) = self.scores.shape, self.size
        top, left = min(i * height, images - height), min(j * width, texts - width)
        rows, columns = slice(top, top + height), slice(left, left + width)
        asked: Where = columns if self.order is None else self.order[columns]
        return checked_tile(self.scores, rows, asked)[i * height - top :, j * width - left :]


class Counts:
    """Items above and level with a threshold, gathered over tiles, for the queries along one side."""

    def __init__(self, queries: int, gallery_dim: int, device: torch.device) -> None:
        self.dim = gallery_dim
        self.above, self.level, self.earlier = (
            torch.zeros(queries, dtype=torch.int64, device=device) for _ in range(3)
        )

    def add(
        self, queries: slice, part: Tensor, threshold: Tensor, number: Tensor, own_number: Tensor
    ) -> None:
        """Count one tile; ``number`` are the gallery numbers of its items, ``own_number`` of the own ones."""
        # comparisons written as float32 are vectorised on CPU and sum exactly: five times faster than bool
        flags = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        above = torch.gt(part, threshold, out=flags).sum(self.dim)
        level = torch.ge(part, threshold, out=flags).sum(self.dim) - above
        self.above[queries] += above.long()
        if level.any():
            self.level[queries] += level.long()
            self.earlier[queries] += ((part == threshold) & (number < own_number)).sum(self.dim)

    def placement(self, own: Tensor, keep: NDArray[np.int64], queries: NDArray[np.int64]) -> Placement:
        """The counts at ``keep``, as those of ``queries``; ``own`` items are no ties of themselves."""
        counts = (self.above, self.level - own, self.earlier)
        return Placement(queries, *(values.cpu().numpy()[keep] for values in counts))


def _even(total: int, most: int) -> int:
    """A tile side of at most about ``most`` that divides ``total`` with little left over."""
    if total <= most:
        return total
    parts = -(-total // most)
    return min(total, -(-total // (parts * 16)) * 16)  # whole vector registers


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
