"""Class-based retrieval: is the nearest other image of the same class? R@1 as in CUB, SOP, In-Shop, iNaturalist."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych import ops
from diptych.errors import DataError

BLOCK = 1024  # queries compared with the whole gallery at a time


def nearest_of_same_class(
    vectors: Tensor,
    classes: NDArray[np.int64],
    gallery: Tensor | None = None,
    gallery_classes: NDArray[np.int64] | None = None,
) -> NDArray[np.bool_]:
    """For each query (N, D), whether the nearest gallery item by cosine has its class.

    Without a gallery each image is asked for among all others: its own row is left out, not "the first hit", which
    may be a duplicate of it. Of equally near items the first in the gallery counts. A class of one image can never
    be right, and stays in the average.
    """
    own = gallery is None
    gallery = vectors if gallery is None else gallery
    gallery_classes = classes if gallery_classes is None else gallery_classes
    _check(vectors, classes, "queries")
    _check(gallery, gallery_classes, "gallery items")
    if len(gallery) <= int(own):
        raise DataError(f"{len(gallery)} images are too few to look for neighbours: give at least {1 + own}.")
    queries, items = ops.unit(vectors.float()), ops.unit(gallery.float())
    numbers = torch.arange(len(items), device=items.device)
    found = np.zeros(len(queries), dtype=np.int64)
    for start in range(0, len(queries), BLOCK):
        scores = queries[start : start + BLOCK] @ items.T  # (block, N)
        rows = torch.arange(len(scores), device=scores.device)
        if own:
            scores[rows, rows + start] = -torch.inf
        best = scores == scores.amax(dim=1, keepdim=True)
        first = torch.where(best, numbers, len(items)).amin(dim=1)  # argmax does not promise the first
        found[start : start + BLOCK] = first.cpu().numpy()
    same: NDArray[np.bool_] = gallery_classes[found] == classes
    return same


def class_recall(
    vectors: Tensor,
    classes: NDArray[np.int64],
    gallery: Tensor | None = None,
    gallery_classes: NDArray[np.int64] | None = None,
) -> float:
    """R@1 in percent: the share of queries whose nearest gallery item has their class."""
    return 100.0 * float(nearest_of_same_class(vectors, classes, gallery, gallery_classes).mean())


def _check(vectors: Tensor, classes: NDArray[np.int64], what: str) -> None:
    if vectors.dim() != 2 or len(vectors) != len(classes):
        raise DataError(
            f"{tuple(vectors.shape)} vectors for {len(classes)} classes of {what}: give one row each."
        )
    if not bool(torch.isfinite(vectors).all()):
        raise DataError(f"a vector of the {what} is not finite: the model is broken, or its input.")
