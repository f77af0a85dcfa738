"""Metrics of label-wise retrieval: NDCG@k and mAP with several labels per item, and micro-F1. Pure.

Images and texts carry label rows y ∈ {0, 1}^C. For a query q and a ranked gallery d_1, d_2, …:

* rel(q, d) = y_q · y_d, the number of shared labels (linear gain)
* DCG = Σ_{r ≤ k} rel(q, d_r) / log2(r + 1); IDCG is the DCG of the best possible order of the gallery
* NDCG@k = DCG / IDCG, and 0 where no item shares a label; k = min(k, gallery)
* AP = 1/R · Σ_r [rel(q, d_r) ≥ 1] · Prec@r over the whole list, R the relevant items; 0 where R = 0

in percent, means over **all** queries of a direction. Lists are ranked by (score descending, gallery index
ascending), the ``index`` tie rule.

Scores come in tiles. Relevance depends on labels alone, so it is computed once per pair of *distinct* label rows:
the captions of an image share theirs. The work takes a bounded amount of memory (``BYTES`` per block of queries).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.errors import DataError, SettingsError
from diptych.evaluation.metrics import DIRECTIONS
from diptych.scores import Scores, as_scores, checked_tile, full_precision

DEPTH = 500  # the k of NDCG@k
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))  # 0.05, 0.10, … 0.95
BYTES = 64 * 2**20  # scores and sorting keys of one block of queries
PAIR_BYTES = 24  # of one query and one gallery item: a float32 score, an int64 key, room for sorting
COLUMN = 0xFFFFFFFF  # the part of a sorting key that holds the column
SAMPLED = (
    4  # galleries of at least so many times the depth are sampled for a score that the first items reach
)
SPREAD = 3.5  # standard deviations by which that score is lowered

Rows = Tensor | NDArray[Any]
"""Labels (items, C): 0 or 1, True where an item has the label."""


@dataclass(frozen=True, slots=True)
class LabelQueries:
    """One direction, query by query, in percent: NDCG (Q,) and AP (Q,); ``ap`` is None where it was not asked for."""

    ndcg: NDArray[np.float64]
    ap: NDArray[np.float64] | None


def judge_labels(
    scores: Scores | Tensor | NDArray[Any],
    image_labels: Rows,
    text_labels: Rows,
    *,
    depth: int = DEPTH,
    average_precision: bool = True,
    gallery_texts: NDArray[np.int64] | None = None,
) -> dict[str, LabelQueries]:
    """NDCG@depth and, where asked for, AP of every image and of every text, by direction.

    ``gallery_texts`` are the rows of the texts that images are ranked against (``first_occurrences`` merges equal tag
    sets); all texts otherwise. Every text is a query, merged or not.
    """
    if depth < 1:
        raise SettingsError(f"NDCG@{depth} looks at no item: give a depth of 1 or more.")
    scores = as_scores(scores)
    images, texts = (
        checked_labels(image_labels, scores.shape[0], "image"),
        checked_labels(text_labels, scores.shape[1], "text"),
    )
    if images.shape[1] != texts.shape[1]:
        raise DataError(
            f"images have {images.shape[1]} label columns and texts {texts.shape[1]}: use one vocabulary for both."
        )
    gallery = slice(None) if gallery_texts is None else torch.from_numpy(gallery_texts).to(scores.device)
    return {
        DIRECTIONS[0]: _Direction(scores, images, texts[gallery], gallery, True).judge(
            depth, average_precision
        ),
        DIRECTIONS[1]: _Direction(scores, texts, images, slice(None), False).judge(depth, average_precision),
    }


def label_metrics(
    scores: Scores | Tensor | NDArray[Any],
    image_labels: Rows,
    text_labels: Rows,
    *,
    depth: int = DEPTH,
    gallery_texts: NDArray[np.int64] | None = None,
) -> dict[str, float]:
    """``image_to_text_ndcg@500``, ``…_map``, both directions, and their mean ``ndcg``, the primary one."""
    judged = judge_labels(scores, image_labels, text_labels, depth=depth, gallery_texts=gallery_texts)
    metrics: dict[str, float] = {}
    for direction, queries in judged.items():
        assert queries.ap is not None
        metrics[f"{direction}_ndcg@{depth}"] = float(queries.ndcg.mean())
        metrics[f"{direction}_map"] = float(queries.ap.mean())
    metrics["ndcg"] = float(np.mean([queries.ndcg.mean() for queries in judged.values()]))
    return metrics


def first_occurrences(texts: Sequence[str]) -> NDArray[np.int64]:
    """The row of the first of each group of equal texts, in order: the merged gallery of tag sets."""
    first: dict[str, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(text, row)
    return np.fromiter(first.values(), dtype=np.int64, count=len(first))


def micro_f1(predicted: Rows, labels: Rows, threshold: float) -> float:
    """F1 over all (item, label) cells in percent: 2TP / (2TP + FP + FN), a label being predicted from ``threshold`` on.

    0 where nothing is predicted and nothing is true.
    """
    values, truth = _cells(predicted, labels)
    told = values >= threshold
    return _f1(int((told & truth).sum()), int(told.sum()), int(truth.sum()))


def choose_threshold(
    predicted: Rows, labels: Rows, thresholds: Sequence[float] = THRESHOLDS
) -> tuple[float, float]:
    """The threshold of the best micro-F1, and that F1; of several the smallest. One pass over the cells."""
    values, truth = _cells(predicted, labels)
    edges = np.sort(np.asarray(thresholds, dtype=np.float64))
    if not len(edges):
        raise SettingsError("no threshold to choose from: give at least one.")
    passed = np.searchsorted(edges, values.ravel(), side="right")  # thresholds a cell reaches
    told = _at_least(passed, len(edges))
    right = _at_least(passed[truth.ravel()], len(edges))
    found = [_f1(int(tp), int(n), int(truth.sum())) for tp, n in zip(right, told, strict=True)]
    best = int(np.argmax(found))
    return float(edges[best]), found[best]


def checked_labels(labels: Rows, items: int, what: str) -> Tensor:
    """Labels as (items, C) float32 of zeros and ones."""
    rows = torch.as_tensor(np.asarray(labels) if not isinstance(labels, Tensor) else labels).float()
    if rows.dim() != 2 or len(rows) != items:
        raise DataError(
            f"{what} labels have shape {tuple(rows.shape)} for {items} {what}s: give one row of labels per {what}."
        )
    if not bool(((rows == 0) | (rows == 1)).all()):
        raise DataError(f"{what} labels hold other values than 0 and 1: give 1 where an item has a label.")
    return rows


class _Direction:
    """The queries of one side, the gallery of the other, and the relevance of their distinct label rows."""

    def __init__(
        self, scores: Scores, asked: Tensor, gallery: Tensor, columns: Any, images_ask: bool
    ) -> None:
        self.scores, self.columns, self.images_ask = scores, columns, images_ask
        device = scores.device
        self.asked, self.asked_kind = torch.unique(asked.to(device), dim=0, return_inverse=True)
        self.gallery, self.gallery_kind, self.copies = torch.unique(
            gallery.to(device), dim=0, return_inverse=True, return_counts=True
        )
        self.size = len(gallery)

    def judge(self, depth: int, average_precision: bool) -> LabelQueries:
        """NDCG and AP of every query, in the order of the queries."""
        depth = min(depth, self.size)
        discount = 1 / torch.log2(torch.arange(2, depth + 2, device=self.scores.device, dtype=torch.float64))
        queries = len(self.asked_kind)
        ndcg, ap = np.zeros(queries), np.zeros(queries)

        def one(rows: Tensor) -> None:
            kinds, place = torch.unique_consecutive(self.asked_kind[rows], return_inverse=True)
            shared = self.asked[kinds] @ self.gallery.T  # (kinds, gallery kinds) labels in common
            ranked = _ranked(self._scores(rows), self.size if average_precision else depth)
            gain = shared[place[:, None], self.gallery_kind[ranked]]  # (q, …) in ranked order
            dcg, ideal = gain[:, :depth].double() @ discount, _ideal(shared, self.copies, discount)[place]
            where = rows.cpu().numpy()
            ndcg[where] = 100 * torch.where(ideal > 0, dcg / ideal.clamp_min(1e-12), 0.0).cpu().numpy()
            if average_precision:
                ap[where] = 100 * _average_precision(gain > 0).cpu().numpy()

        # queries of equal labels stand together; numpy and torch leave the interpreter to the other threads
        blocks = torch.split(torch.argsort(self.asked_kind, stable=True), self._block_size())
        workers = torch.get_num_threads() if self.scores.device.type == "cpu" else 1
        # the precision is set once out here, for it is one of the whole process
        with full_precision(self.scores.device), ThreadPoolExecutor(workers) as threads:
            for _ in threads.map(one, blocks):
                pass
        return LabelQueries(ndcg, ap if average_precision else None)

    def _block_size(self) -> int:
        return max(1, BYTES // (PAIR_BYTES * max(1, self.size)))

    def _scores(self, rows: Tensor) -> Tensor:
        """Scores (q, gallery) of some queries."""
        if self.images_ask:
            return checked_tile(self.scores, rows, self.columns)
        return checked_tile(self.scores, self.columns, rows).T


def _ranked(block: Tensor, depth: int) -> Tensor:
    """The first ``depth`` columns of each row by (value descending, column ascending)."""
    if block.dtype != torch.float32:
        return block.sort(dim=1, descending=True, stable=True).indices[:, :depth]
    if block.device.type == "cpu":
        return torch.from_numpy(_ranked_on_cpu(block.contiguous().numpy(), depth))
    keys = (block + 0.0).view(torch.int32)
    keys = torch.bitwise_xor(keys, (keys >> 31) & 0x7FFFFFFF).bitwise_not().to(torch.int64) << 32
    keys |= torch.arange(block.shape[1], device=block.device)
    return keys.topk(depth, dim=1, largest=False, sorted=True).values & COLUMN


def _ranked_on_cpu(block: NDArray[np.float32], depth: int) -> NDArray[np.int64]:
    """``_ranked`` by numpy, which sorts integers with vector instructions, several times as fast as torch.

    From a small part of many columns only what reaches a guessed score is sorted. The guess is a score within a sample
    of the columns, low enough that the first ``depth`` should reach it; a row where fewer do is ranked whole. So the
    order is exact whatever the guess.
    """
    rows, columns = block.shape
    if depth * SAMPLED > columns:
        return np.sort(_keys(block, np.arange(columns)), axis=1)[:, :depth] & COLUMN
    stride = max(1, min(16, depth // 64))
    sample = block[:, ::stride]
    expected = depth / stride
    place = max(0, sample.shape[1] - int(expected + SPREAD * expected**0.5) - 1)
    guess = np.partition(sample, place, axis=1)[:, place]
    flat = np.flatnonzero(block >= guess[:, None])
    ends = np.searchsorted(flat, np.arange(1, rows + 1) * columns)
    counts = np.diff(ends, prepend=0)
    keys = np.full((rows, max(depth, counts.max())), np.iinfo(np.int64).max)
    keys[np.arange(keys.shape[1]) < counts[:, None]] = _keys(block.ravel()[flat], flat % columns)
    keys.sort(axis=1)
    ranked = keys[:, :depth] & COLUMN
    for row in np.flatnonzero(counts < depth):
        ranked[row] = np.sort(_keys(block[row], np.arange(columns)))[:depth] & COLUMN
    return ranked


def _keys(values: NDArray[np.float32], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """One integer per score: its bits so that larger scores come first, then its column.

    Integers have no ties, so sorting them gives the order of a stable sort. Adding 0 turns −0 into 0, its equal.
    """
    bits = (values + np.float32(0)).view(np.int32)
    order = np.invert(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF)))
    keys: NDArray[np.int64] = (order.astype(np.int64) << 32) | columns
    return keys


def _ideal(shared: Tensor, copies: Tensor, discount: Tensor) -> Tensor:
    """IDCG of each kind of query: the largest relevances first, counted by value instead of sorted."""
    most = int(shared.max().item()) if shared.numel() else 0
    sums = torch.cat([discount.new_zeros(1), discount.cumsum(0)])  # (depth + 1,) of the first r places
    weights = copies.to(torch.float32)
    total, taken = (
        discount.new_zeros(len(shared)),
        torch.zeros(len(shared), dtype=torch.int64, device=shared.device),
    )
    for value in range(most, 0, -1):
        count = ((shared == value).float() @ weights).long()
        end = (taken + count).clamp_max(len(discount))
        total += value * (sums[end] - sums[taken])
        taken = end
    return total


def _average_precision(relevant: Tensor) -> Tensor:
    """AP of ranked lists (q, gallery)."""
    found = relevant.cumsum(1)
    place = torch.arange(1, relevant.shape[1] + 1, device=relevant.device)
    precision = (found.double() / place * relevant).sum(1)
    return precision / found[:, -1].clamp_min(1)


def _cells(predicted: Rows, labels: Rows) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    values = np.asarray(predicted.cpu() if isinstance(predicted, Tensor) else predicted, dtype=np.float64)
    if values.ndim != 2:
        raise DataError(f"predictions have shape {values.shape}: give (items, labels).")
    truth = checked_labels(labels, len(values), "item").cpu().numpy() > 0
    if truth.shape != values.shape:
        raise DataError(f"predictions are {values.shape} and labels {truth.shape}: they must have one shape.")
    return values, truth


def _at_least(passed: NDArray[np.int64], edges: int) -> NDArray[np.int64]:
    """Cells that reach each threshold."""
    return np.cumsum(np.bincount(passed, minlength=edges + 1)[::-1])[::-1][1:]


def _f1(right: int, told: int, true: int) -> float:
    return 200.0 * right / (told + true) if told + true else 0.0
