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

from diptych.data.captions import first_of_each
from diptych.data.duplicates import normal_text
from diptych.errors import DataError, SettingsError
from diptych.model.scores import Scores, Where, as_scores, checked_tile

Ties = Literal["index", "strict", "expected", "pessimistic"]
TIES: tuple[str, ...] = get_args(Ties)
KS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
TILES = {"cpu": (512, 1024), "cuda": (4096, 8192)}  # images and texts of one tile, by device
BEYOND = 2**62  # larger than any gallery number
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
    return count_shared_ranks(
        scores, checked_pairing(image_of, *scores.shape), np.arange(scores.shape[1]), tile
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
    (images, texts), device = scores.shape, scores.device
    first_image = np.full(texts, images)
    np.minimum.at(first_image, text_of, image_of)
    order = np.argsort(first_image, kind="stable")  # texts grouped by image: own pairs then lie in few tiles
    column = np.argsort(order)
    tiles = _Tiles(scores, order, tile or TILES.get(device.type, TILES["cpu"]))
    own = tiles.own(image_of, column[text_of])  # (P,)
    image, text, place = (torch.from_numpy(one).to(device) for one in (image_of, text_of, column[text_of]))
    of_image, of_text = OwnScores.of(image, text, own, images), OwnScores.of(place, image, own, texts)
    by_image, by_text = Counts(of_image.best, of_image.first, 1), Counts(of_text.best, of_text.first, 0)
    image_number, text_number = torch.arange(images, device=device), torch.from_numpy(order).to(device)
    for rows, columns, part in tiles:
        by_image.add(rows, part, text_number[columns])
        by_text.add(columns, part, image_number[rows])
    asked, described = np.unique(image_of), np.unique(text_of)
    return Ranks(
        by_image.placement(of_image.level, asked, asked),
        by_text.placement(of_text.level, column[described], described),
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
        raise DataError(f"scores of {images} images and {texts} texts cannot be ranked: give items to both.")
    if owner.shape != (texts,) or owner.dtype.kind not in "iu":
        raise DataError(
            f"image_of is {owner.dtype} of shape {owner.shape} for {texts} texts: give the image row of each."
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

    def own(self, image: NDArray[np.int64], column: NDArray[np.int64]) -> Tensor:
        """The score of each own pair (P,): its image and the place of its text in the order."""
        (height, width), across = self.size, -(-self.scores.shape[1] // self.size[1])
        number = image // height * across + column // width  # of the tile
        order = np.argsort(number, kind="stable")
        found: Tensor | None = None
        for pairs in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
            i, j = divmod(int(number[pairs[0]]), across)
            part = self.part(i, j)
            used = part.numel() * part.element_size()
            if used <= self.room:
                self.room -= used
                self.kept[i, j] = part
            scores = part[image[pairs] - i * height, column[pairs] - j * width]
            found = scores.new_empty(len(image)) if found is None else found
            found[torch.from_numpy(pairs)] = scores
        assert found is not None
        return found

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


@dataclass(frozen=True, slots=True)
class OwnScores:
    """What queries compare with: their best own score, the first own item that has it, and how many have it, (Q,)."""

    best: Tensor
    first: Tensor
    level: Tensor

    @staticmethod
    def of(query: Tensor, item: Tensor, scores: Tensor, queries: int) -> OwnScores:
        """From own pairs (P,): queries, gallery numbers of their items, and scores."""
        best = scores.new_full((queries,), -torch.inf).scatter_reduce(0, query, scores, "amax")
        is_best = scores == best[query]
        first = torch.full((queries,), BEYOND, device=scores.device)
        first = first.scatter_reduce(0, query[is_best], item[is_best], "amin")
        return OwnScores(best, first, torch.bincount(query[is_best], minlength=queries))


class Counts:
    """Items above and level with the best own score, gathered over tiles, for the queries along one side."""

    def __init__(self, best: Tensor, first: Tensor, gallery_dim: int) -> None:
        self.best, self.first, self.dim = best, first, gallery_dim
        self.above, self.level, self.earlier = (
            torch.zeros(len(best), dtype=torch.int64, device=best.device) for _ in range(3)
        )

    def add(self, queries: slice, part: Tensor, number: Tensor) -> None:
        """Count one tile; ``number`` are the gallery numbers of its items."""
        best, first = (one[queries].unsqueeze(self.dim) for one in (self.best, self.first))
        number = number.unsqueeze(1 - self.dim)
        # comparisons written as float32 are vectorised on CPU and sum exactly: five times faster than bool
        flags = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        above = torch.gt(part, best, out=flags).sum(self.dim)
        level = torch.ge(part, best, out=flags).sum(self.dim) - above
        self.above[queries] += above.long()
        if level.any():
            self.level[queries] += level.long()
            self.earlier[queries] += ((part == best) & (number < first)).sum(self.dim)

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
    """For each text, (M,), the first that is equal to it but for case, punctuation and spacing."""
    return first_of_each([normal_text(text) for text in texts])


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
