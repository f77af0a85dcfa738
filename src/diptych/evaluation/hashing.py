"""Mean average precision of retrieval by binary codes: MAP@5000, with its ties decided and with them averaged."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diptych.codes import Codes, hamming, kth, pack, pack_bits
from diptych.data.captions import Captions
from diptych.data.labels import COLUMN, class_names, class_rows, class_sets
from diptych.errors import DataError, SettingsError, at_least, one_of
from diptych.evaluation.cards import Facts, made_by, split_names
from diptych.evaluation.labels import checked_labels
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Group, Layout
from diptych.evaluation.significance import Queries, intervals_of
from diptych.model.retriever import Retriever

TOP = 5000  # depth of MAP@5000
Missing = Literal["zero", "skip"]


@dataclass(frozen=True, slots=True)
class HashingScores:
    """MAP of a set of queries in percent, and what it was counted over.

    ``map`` decides ties by the index in the database; ``map_tie_averaged`` is the expectation over all orders of
    tied items. ``queries`` were averaged, ``unlabelled`` have no label and were skipped, ``without_relevant`` have
    no relevant item in the top (they count as 0, or are skipped with ``missing="skip"``).
    """

    map: float
    map_tie_averaged: float
    queries: int
    unlabelled: int
    without_relevant: int
    top: int
    precisions: NDArray[np.float64]  # (queries, 2) AP in percent, ties by index and averaged


def hashing_map(
    query: ArrayLike,
    database: ArrayLike,
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    *,
    top: int = TOP,
    missing: Missing = "zero",
    leave_one_out: bool = False,
) -> HashingScores:
    """MAP@top of codes (Q, K) against codes (N, K) with labels (Q, C) and (N, C) of zeros and ones.

    ::

        AP_q = Σ_{r ≤ R} rel(r) · Prec@r / Σ_{r ≤ R} rel(r),   R = min(top, N),   MAP = mean_q AP_q

    An item is relevant if it shares at least one label with the query. Items are ranked by (Hamming distance,
    database index): a code of 16 bits has 17 distances, so that most places are decided by this rule. Hence the
    second value, where a block of n tied items with r relevant, behind N items with R₀ relevant, contributes
    Σ_{j ≤ m} (r/n) · (R₀ + 1 + (j−1)(r−1)/(n−1)) / (N + j) with its first m places, and m·r/n relevant items.

    A query with no relevant item in the top has AP 0 (CSQ, DeepHash) or is left out with ``missing="skip"``
    (HashNet). Queries without a label are left out. Numbers are binarised at 0: h ≥ 0 is +1. With
    ``leave_one_out`` the queries are the database itself, and none is ranked for itself.
    """
    values, labels = _check(query, database, query_labels, database_labels, top, missing)
    if leave_one_out and (len(values[0]) != len(values[1]) or len(values[1]) < 2):
        raise DataError(
            f"leaving one out needs the same two or more items on both sides, not {len(values[0])} queries and "
            f"{len(values[1])} items."
        )
    ranking = _Ranking(pack(values[1]), labels[1], min(top, len(values[1]) - leave_one_out))
    labelled = np.flatnonzero(labels[0].any(axis=1))
    if not len(labelled):
        raise DataError(f"none of the {len(values[0])} queries has a label: hashing needs labelled queries.")
    words, wanted = pack(values[0][labelled]), pack_bits(labels[0][labelled])
    found = np.array(
        [
            ranking.precision(words[q], wanted[q], int(row) if leave_one_out else None)
            for q, row in enumerate(labelled)
        ]
    )
    empty = np.isnan(found[:, 0])
    if missing == "skip" and empty.all():
        raise DataError("no query has a relevant item in the top: with missing='zero' each counts as 0.")
    kept = found[~empty] if missing == "skip" else np.nan_to_num(found)
    averaged = found[~np.isnan(found[:, 1]), 1] if missing == "skip" else kept[:, 1]
    return HashingScores(
        map=float(100 * kept[:, 0].mean()),
        map_tie_averaged=float(100 * averaged.mean()),
        queries=len(kept),
        unlabelled=len(values[0]) - len(labelled),
        without_relevant=int(empty.sum()),
        top=ranking.top,
        precisions=100 * np.nan_to_num(kept),
    )


class _Ranking:
    """A database, ready to be ranked for one query after the other."""

    def __init__(self, codes: Codes, labels: NDArray[np.bool_], top: int) -> None:
        self.codes, self.top = np.asfortranarray(codes), min(top, len(codes))
        self.labels = np.ascontiguousarray(pack_bits(labels).T)  # (⌈C / 64⌉, N)
        self.ranks = np.arange(1, self.top + 1, dtype=np.float64)

    def precision(self, code: Codes, labels: Codes, without: int | None = None) -> tuple[float, float]:
        """AP with ties by index and with ties averaged; NaN where the top holds no relevant item.

        The item ``without`` is not ranked.
        """
        distances = hamming(code, self.codes)
        if without is not None:
            distances[without] = np.iinfo(distances.dtype).max  # behind all others, and so outside the top
        # the top, and all that tie with its last
        near = np.flatnonzero(distances <= kth(distances, self.top))
        near = near[np.argsort(distances[near], kind="stable")]  # of bytes: a counting sort
        shared = self.labels[0][near] & labels[0]
        for word in range(1, len(labels)):
            shared |= self.labels[word][near] & labels[word]
        relevant = shared != 0
        top = relevant[: self.top]
        hits = np.cumsum(top, dtype=np.float64)
        averaged = self._averaged(distances[near], relevant)
        if hits[-1] == 0:
            return float("nan"), averaged
        return float((hits[top] / self.ranks[top]).sum() / hits[-1]), averaged

    def _averaged(self, distances: NDArray[Any], relevant: NDArray[np.bool_]) -> float:
        """E[Σ rel · Prec@r] / E[Σ rel] over the orders of tied items; NaN where none of them has a relevant one."""
        starts = np.flatnonzero(np.diff(distances, prepend=-1))  # first place of each block of ties
        sizes = np.diff(starts, append=len(distances)).astype(np.float64)
        hits = np.add.reduceat(relevant.astype(np.float64), starts)
        before = np.cumsum(hits) - hits
        taken = np.minimum(sizes, self.top - starts)  # of the last block only some places lie in the top
        block = np.repeat(np.arange(len(starts)), taken.astype(np.int64))  # (top,)
        share = (hits / sizes)[block]
        others = ((hits - 1) / np.maximum(sizes - 1, 1))[block] * (self.ranks - 1 - starts[block])
        expected = float((taken * hits / sizes).sum())
        if expected == 0:
            return float("nan")
        return float((share * (before[block] + 1 + others) / self.ranks).sum() / expected)


def _check(
    query: ArrayLike,
    database: ArrayLike,
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    top: int,
    missing: str,
) -> tuple[list[NDArray[Any]], list[NDArray[np.bool_]]]:
    """Codes and labels of the queries and of the database that fit together."""
    one_of(missing, "missing", Missing)
    at_least(top, "top", 1)
    values = [np.asarray(rows) for rows in (query, database)]
    if any(rows.ndim != 2 for rows in values) or values[0].shape[1] != values[1].shape[1]:
        raise DataError(
            f"codes of shape {values[0].shape} cannot be ranked against {values[1].shape}: both must be (items, "
            "bits) with the same number of bits."
        )
    labels = [
        checked_labels(np.asarray(one), len(rows), "code").numpy() > 0
        for one, rows in zip((query_labels, database_labels), values, strict=True)
    ]
    if labels[0].shape[1] != labels[1].shape[1]:
        raise DataError(
            f"the queries have {labels[0].shape[1]} classes and the database {labels[1].shape[1]}: "
            "both need the same columns."
        )
    if not len(values[1]):
        raise DataError("the database is empty: give at least one code to rank.")
    return values, labels


VIEW = "hash"  # the name of the hash head among a model's branches


@dataclass(frozen=True)
class HashRetrieval:
    """MAP@top of codes; the primary metric is ``map``, ties decided by the index in the database.

    The images of the split ask for the other images of the data, or where there are none (while a run trains) each
    for the others of the split. ``bootstrap`` is the number of resamples of the intervals, by query; 0 for none.
    """

    column: str = COLUMN
    top: int = TOP
    missing: Missing = "zero"
    bootstrap: int = 0
    seed: int = 0
    split_labels: bool = True
    reads_others: ClassVar[bool] = True

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        began = time.perf_counter()
        if VIEW not in model.branches:
            raise SettingsError(
                f"this model has no hash head '{VIEW}': train one with the recipe 'cookie-hash'."
            )
        ranked = [data.captions] if data.others is None else [data.captions, data.others]
        sets = [class_sets(part, self.column, self.split_labels) for part in ranked]
        names = class_names([one for part in sets for one in part])
        rows = [class_rows(one, names) for one in sets]
        codes = [
            model.encode_image(part.images, view=VIEW, show_progress=show_progress).numpy() for part in ranked
        ]
        alone = data.others is None
        how: dict[str, Any] = {"top": self.top, "missing": self.missing, "leave_one_out": alone}
        found = hashing_map(codes[0], codes[-1], rows[0], rows[-1], **how)
        queries, bits = ranked[0], int(codes[0].shape[1])
        names_of_map = ["map", "map_tie_averaged"]
        facts = Facts(
            {
                "data": queries.name,
                "queries": len(queries.images),
                "query split": split_names(queries),
                "database": "the other queries" if alone else len(ranked[1].images),
                "bits": bits,
                "classes": len(names),
                "label column": self.column,
                "top": found.top,
                "without relevant": self.missing,
                "ties": "database index",
                "data hash": "-".join(part.fingerprint() for part in ranked),
            },
            {
                "queries averaged": found.queries,
                "queries without a label": found.unlabelled,
                "queries without a relevant item": found.without_relevant,
                "bootstrap": self.bootstrap,
                **made_by(model),
            },
        )
        every = np.arange(found.queries)
        asked = {name: Queries(found.precisions[:, n], every) for n, name in enumerate(names_of_map)}
        return Group(
            "hashing",
            {"map": found.map, "map_tie_averaged": found.map_tie_averaged},
            "map",
            facts,
            intervals_of(asked, len(every), self.bootstrap, np.random.default_rng(self.seed)),
            {"seconds": time.perf_counter() - began},
            (Layout(["", f"MAP@{self.top}", "ties averaged"], [(f"{bits} bits", names_of_map)]),),
        )

    def check(self, model: Retriever, captions: Captions) -> None:
        class_sets(captions, self.column, self.split_labels)
