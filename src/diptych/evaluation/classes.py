"""Class-based retrieval: does an item find others of its class? R@K as in CUB, SOP, In-Shop and iNaturalist."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych import ops
from diptych.errors import DataError

BLOCK = 1 << 25  # scores held at a time


def class_ranks(
    vectors: Tensor,
    classes: NDArray[np.int64],
    gallery: Tensor | None = None,
    gallery_classes: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """For each query (N, D), how many items of other classes stand before the first of its own, by cosine.

    Without a gallery each item is asked for among all others: its own row is left out, not "the first hit", which may
    be a duplicate of it. Equal scores rank by gallery index. Infinite where no other item has the class: such a query
    is never right, and stays in the average.
    """
    own = gallery is None
    gallery = vectors if gallery is None else gallery
    gallery_classes = classes if gallery_classes is None else gallery_classes
    _check(vectors, classes, "queries")
    _check(gallery, gallery_classes, "gallery items")
    if len(gallery) <= int(own):
        raise DataError(f"{len(gallery)} items are too few to look for neighbours: give at least {1 + own}.")
    queries, items = ops.unit(vectors.float()), ops.unit(gallery.float())
    labels, numbers = (
        torch.from_numpy(gallery_classes).to(items.device),
        torch.arange(len(items), device=items.device),
    )
    asked = torch.from_numpy(classes).to(items.device)
    ranks = np.zeros(len(queries))
    step = max(1, BLOCK // len(items))
    for start in range(0, len(queries), step):
        rows = slice(start, start + step)
        scores = queries[rows] @ items.T  # (block, N)
        same = labels == asked[rows, None]
        if own:
            itself = numbers == numbers[rows, None]
            scores.masked_fill_(itself, -torch.inf)
            same &= ~itself
        best = scores.masked_fill(~same, -torch.inf).amax(dim=1, keepdim=True)
        level = scores == best
        first = torch.where(level & same, numbers, len(items)).amin(dim=1, keepdim=True)
        before = (scores > best).sum(1) + (level & ~same & (numbers < first)).sum(1)
        ranks[rows] = torch.where(same.any(1), before.double(), torch.inf).cpu().numpy()
    return ranks


def class_recall(
    vectors: Tensor,
    classes: NDArray[np.int64],
    gallery: Tensor | None = None,
    gallery_classes: NDArray[np.int64] | None = None,
    ks: Sequence[int] = (1,),
) -> dict[int, float]:
    """R@K in percent for each K: the share of queries with an item of their class among the first K."""
    ranks = class_ranks(vectors, classes, gallery, gallery_classes)
    return {k: 100.0 * float((ranks < k).mean()) for k in ks}


def _check(vectors: Tensor, classes: NDArray[np.int64], what: str) -> None:
    if vectors.dim() != 2 or len(vectors) != len(classes):
        raise DataError(
            f"{tuple(vectors.shape)} vectors for {len(classes)} classes of {what}: give one row each."
        )
    if not bool(torch.isfinite(vectors).all()):
        raise DataError(f"a vector of the {what} is not finite: the model is broken, or its input.")
