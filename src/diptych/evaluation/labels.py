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

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.captions import first_of_each
from diptych.errors import DataError, SettingsError, at_least
from diptych.evaluation.leading import leading
from diptych.evaluation.metrics import DIRECTIONS
from diptych.model.scores import LEAST, Scores, as_scores, checked_tile, full_precision, turned

DEPTH = 500  # the k of NDCG@k
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))  # 0.05, 0.10, … 0.95
BYTES = 64 * 2**20  # scores and sorting keys of one block of queries
# scores of one block where it can be: larger ones get new pages from the system every time
TILE_BYTES = 8 * 2**20
MOST_QUERIES = 256  # queries per block
PAIR_BYTES = 24  # memory for one query and one gallery item: a float32 score, an int64 key, room for sorting

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
    distinct_texts: NDArray[np.int64] | None = None,
) -> dict[str, LabelQueries]:
    """NDCG@depth and, where asked for, AP of every image and of every text, by direction.

    ``distinct_texts`` are the rows of the texts that images are ranked against and that are queries themselves
    (``first_occurrences`` merges equal tag sets); all texts otherwise.
    """
    at_least(depth, "the depth of NDCG", 1)
    scores = as_scores(scores)
    images = checked_labels(image_labels, scores.shape[0], "image")
    texts = checked_labels(text_labels, scores.shape[1], "text")
    if images.shape[1] != texts.shape[1]:
        raise DataError(
            f"images have {images.shape[1]} label columns and texts {texts.shape[1]}: use one vocabulary for both."
        )
    every, distinct = slice(None), slice(None) if distinct_texts is None else torch.from_numpy(distinct_texts)
    image_kinds, text_kinds = _kinds(images, scores.device), _kinds(texts, scores.device)
    directions = (
        _Direction(scores, image_kinds, text_kinds, every, distinct, True),
        _Direction(scores, text_kinds, image_kinds, distinct, every, False),
    )
    judged = [one.judge(depth, average_precision) for one in directions]
    return dict(zip(DIRECTIONS, judged, strict=True))


def label_metrics(
    scores: Scores | Tensor | NDArray[Any],
    image_labels: Rows,
    text_labels: Rows,
    *,
    depth: int = DEPTH,
    distinct_texts: NDArray[np.int64] | None = None,
) -> dict[str, float]:
    """``image_to_text_ndcg@500``, ``…_map``, both directions, and their mean ``ndcg``, the primary one."""
    judged = judge_labels(scores, image_labels, text_labels, depth=depth, distinct_texts=distinct_texts)
    metrics: dict[str, float] = {}
    for direction, queries in judged.items():
        assert queries.ap is not None
        metrics[f"{direction}_ndcg@{depth}"] = float(queries.ndcg.mean())
        metrics[f"{direction}_map"] = float(queries.ap.mean())
    metrics["ndcg"] = float(np.mean([queries.ndcg.mean() for queries in judged.values()]))
    return metrics


def first_occurrences(texts: Sequence[str]) -> NDArray[np.int64]:
    """The row of the first of each group of equal texts, in order: the distinct tag sets."""
    return np.unique(first_of_each(texts))


def micro_f1(predicted: Rows, labels: Rows, threshold: float) -> float:
    """F1 over all (item, label) cells in percent: 2TP / (2TP + FP + FN), a label being predicted from ``threshold`` on.

    0 where nothing is predicted and nothing is true.
    """
    values, truth = _cells(predicted, labels)
    positive = values >= threshold
    return _f1(int((positive & truth).sum()), int(positive.sum()), int(truth.sum()))


def choose_threshold(
    predicted: Rows, labels: Rows, thresholds: Sequence[float] = THRESHOLDS
) -> tuple[float, float]:
    """The threshold of the best micro-F1, and that F1; of several the smallest. One pass over the cells."""
    values, truth = _cells(predicted, labels)
    edges = np.sort(np.asarray(thresholds, dtype=np.float64))
    if not len(edges):
        raise SettingsError("no threshold to choose from: give at least one.")
    passed = np.searchsorted(edges, values.ravel(), side="right")  # thresholds a cell reaches
    positive, right = (_at_least(some, len(edges)) for some in (passed, passed[truth.ravel()]))
    found = [_f1(int(tp), int(n), int(truth.sum())) for tp, n in zip(right, positive, strict=True)]
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


Kinds = tuple[Tensor, Tensor]
"""Distinct label rows (kinds, C), and the kind of every item."""


def _kinds(labels: Tensor, device: torch.device) -> Kinds:
    """Items of equal labels are of one kind; rows of bits are told apart faster than rows of numbers."""
    bits = np.packbits(labels.cpu().numpy() > 0, axis=1)
    keys = np.ascontiguousarray(bits).view(np.dtype((np.void, bits.shape[1]))).ravel()  # one value per item
    _, first, kinds = np.unique(keys, return_index=True, return_inverse=True)
    return labels[torch.from_numpy(first)].to(device), torch.from_numpy(kinds).to(device)


class _Direction:
    """The queries of one side, the gallery of the other, and the relevance of their distinct label rows."""

    def __init__(
        self,
        scores: Scores,
        asked: Kinds,
        gallery: Kinds,
        queries: slice | Tensor,
        columns: slice | Tensor,
        images_ask: bool,
    ) -> None:
        self.scores, self.images_ask = scores, images_ask
        # products with the queries in rows have nothing to transpose
        self.turned = None if images_ask else turned(scores)
        self.columns = columns if isinstance(columns, slice) else columns.to(scores.device)
        self.asked, kinds = asked
        self.rows = torch.arange(len(kinds), device=kinds.device)[queries]  # the row of each query
        self.asked_kind = kinds[self.rows]
        self.gallery, kinds = gallery
        self.gallery_kind = kinds[self.columns]
        self.copies = torch.bincount(self.gallery_kind, minlength=len(self.gallery))
        self.size = len(self.gallery_kind)

    def judge(self, depth: int, average_precision: bool) -> LabelQueries:
        """NDCG and AP of every query, in the order of the queries."""
        depth = min(depth, self.size)
        discount = 1 / torch.log2(torch.arange(2, depth + 2, device=self.scores.device, dtype=torch.float64))
        queries = len(self.asked_kind)
        ndcg, ap = np.zeros(queries), np.zeros(queries)

        def one(numbers: Tensor) -> None:
            kinds, place = torch.unique_consecutive(self.asked_kind[numbers], return_inverse=True)
            shared = self.asked[kinds] @ self.gallery.T  # (kinds, gallery kinds) labels in common
            ranked = leading(self._scores(self.rows[numbers]), self.size if average_precision else depth)
            gain = shared[place[:, None], self.gallery_kind[ranked]]  # (q, …) in ranked order
            dcg, ideal = gain[:, :depth].double() @ discount, _ideal(shared, self.copies, discount)[place]
            where = numbers.cpu().numpy()
            ndcg[where] = 100 * torch.where(ideal > 0, dcg / ideal.clamp_min(1e-12), 0.0).cpu().numpy()
            if average_precision:
                ap[where] = 100 * _average_precision(gain > 0).cpu().numpy()

        # queries of equal labels stand together; numpy and torch leave the interpreter to the other threads
        size = max(1, self.size)
        most = min(MOST_QUERIES, max(LEAST, TILE_BYTES // (4 * size)), BYTES // (PAIR_BYTES * size))
        blocks = torch.split(torch.argsort(self.asked_kind, stable=True), max(1, most))
        with full_precision(self.scores.device), one_thread_each(self.scores.device, len(blocks)) as threads:
            for _ in threads.map(one, blocks):
                pass
        return LabelQueries(ndcg, ap if average_precision else None)

    def _scores(self, rows: Tensor) -> Tensor:
        if self.images_ask:
            return checked_tile(self.scores, rows, self.columns)
        if self.turned is not None and not torch.isnan((part := self.turned.tile(rows, self.columns)).sum()):
            return part
        return checked_tile(self.scores, self.columns, rows).T


@contextmanager
def one_thread_each(device: torch.device, jobs: int) -> Iterator[ThreadPoolExecutor]:
    """As many workers as torch has threads, each with one: several that all start their own would wait for cores.

    The number of threads belongs to the whole process and is put back at the end. A GPU has one worker.
    """
    threads = torch.get_num_threads()
    workers = min(threads, jobs) if device.type == "cpu" else 1
    if workers > 1:
        torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(max(1, workers)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _ideal(shared: Tensor, copies: Tensor, discount: Tensor) -> Tensor:
    """IDCG of each kind of query: the largest relevances first, counted by value instead of sorted."""
    most = int(shared.max().item()) if shared.numel() else 0
    items = discount.new_zeros(len(shared), most + 1)  # of each relevance
    items.scatter_add_(1, shared.long(), copies.to(discount.dtype).expand(shared.shape))
    # places taken by 'most', 'most − 1', … 1
    ends = items.flip(1).cumsum(1).long().clamp_max(len(discount))[:, :most]
    sums = torch.cat([discount.new_zeros(1), discount.cumsum(0)])  # (depth + 1,) of the first r places
    gained = sums[ends].diff(dim=1, prepend=discount.new_zeros(len(shared), 1))
    return gained @ torch.arange(most, 0, -1, device=shared.device, dtype=discount.dtype)


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


def _f1(right: int, positive: int, true: int) -> float:
    return 200.0 * right / (positive + true) if positive + true else 0.0
