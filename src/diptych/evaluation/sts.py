"""Semantic textual similarity: cosines of text vectors against gold scores, set by set.

The sub-files of a set are joined in three ways:

=========  ====================================================================================
``all``    one correlation over the pairs of all sub-files together (SimCSE, CUSA)
``mean``   the mean over sub-files
``wmean``  the mean over sub-files, weighted by their number of pairs (SentEval's own figure)
=========  ====================================================================================

Published figures differ by several points between the three; always name the one you print.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from diptych.branches.branch import UniModalHeads
from diptych.data.text_inputs import CleanedInput
from diptych.errors import DataError
from diptych.evaluation.cards import Facts
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Group, Layout
from diptych.evaluation.senteval import SEVEN, SentenceSet, SentEval, is_senteval, read_senteval, texts_of
from diptych.model.retriever import Retriever
from diptych.objectives.soft_labels import UNI
from diptych.ops import unit
from diptych.targets.teachers import TextTeacher


def uni_view(model: Retriever) -> str | None:
    """The view "uni" where the model has one, else None: the towers' own vectors."""
    return UNI if UNI in model.branches else None


def name_of_view(model: Retriever) -> str:
    """What these vectors are, for the card of a report."""
    if uni_view(model) is None:
        return "the towers' own"
    return "uni-modal heads" if isinstance(model.branches[UNI], UniModalHeads) else "the encoders' own"


AGGREGATIONS = ("all", "mean", "wmean")
FEWEST = 3  # items that have an order of neighbours


def pearson(similarities: ArrayLike, gold: ArrayLike) -> float:
    """Pearson's r; 0 with a warning where one side is constant."""
    a, b = _check(similarities, gold)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    if not size or not np.isfinite(size):
        warnings.warn("a correlation with constant values is reported as 0.", RuntimeWarning, stacklevel=2)
        return 0.0
    return float(np.clip((a * b).sum() / size, -1, 1))


def spearman(similarities: ArrayLike, gold: ArrayLike) -> float:
    """Spearman's ρ: Pearson's r of the ranks, where equal values share their mean rank."""
    a, b = _check(similarities, gold)
    return pearson(average_ranks(a), average_ranks(b))


def average_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def agreement(files: Sequence[tuple[ArrayLike, ArrayLike]]) -> dict[str, float]:
    """``spearman_all``, ``pearson_wmean``, … × 100 of sub-files, each (similarities, gold).

    ``both_all``, … is the mean of the two, which COOKIE prints.
    """
    if not files:
        raise DataError("no pairs of sentences to correlate: give at least one file.")
    sizes = np.array([len(np.asarray(gold)) for _, gold in files], dtype=np.float64)
    together = tuple(np.concatenate([np.asarray(file[side]) for file in files]) for side in (0, 1))
    found: dict[str, float] = {}
    for name, measure in (("spearman", spearman), ("pearson", pearson)):
        whole = measure(*together)
        each = np.array([measure(*file) for file in files]) if len(files) > 1 else np.array([whole])
        values = (whole, float(each.mean()), float((each * sizes).sum() / sizes.sum()))
        found |= {f"{name}_{way}": 100 * value for way, value in zip(AGGREGATIONS, values, strict=True)}
    found |= {f"both_{way}": (found[f"spearman_{way}"] + found[f"pearson_{way}"]) / 2 for way in AGGREGATIONS}
    return found


def _check(similarities: ArrayLike, gold: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a, b = np.asarray(similarities, dtype=np.float64), np.asarray(gold, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise DataError(f"{a.shape} similarities do not go with {b.shape} gold scores: give one each.")
    if not np.isfinite(b).all():
        raise DataError("a gold score is not a finite number: check the file of gold scores.")
    return np.nan_to_num(a, nan=0.0), b  # the cosine of a zero vector


def neighbour_agreement(vectors: ArrayLike, gold: ArrayLike) -> float:
    """How alike two spaces order the neighbours of an item: mean over items of Spearman's ρ, × 100.

    For each item of ``vectors`` (N, D) the cosines with all others are correlated with those of ``gold`` (N, E).
    """
    ours, theirs = (_cosines(np.asarray(rows, dtype=np.float64)) for rows in (vectors, gold))
    if len(ours) != len(theirs) or len(ours) < FEWEST:
        raise DataError(f"{len(ours)} vectors and {len(theirs)} of the gold space: give {FEWEST} of each.")
    others = ~np.eye(len(ours), dtype=np.bool_)
    found = [spearman(a[keep], b[keep]) for a, b, keep in zip(ours, theirs, others, strict=True)]
    return 100 * float(np.mean(found))


def _cosines(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    cosines: NDArray[np.float64] = rows @ rows.T
    return cosines


Encode = Callable[[Sequence[str]], Tensor]
"""Texts to vectors (M, D)."""

COLUMNS = {
    "spearman_all": "Spearman",
    "pearson_all": "Pearson",
    "both_all": "mean of both",
    "spearman_mean": "Spearman, mean",
    "spearman_wmean": "Spearman, wmean",
}


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder in place of a model: the mean of its token states."""

    name: str
    teacher: TextTeacher


@dataclass(frozen=True)
class Sts:
    """The STS sets of a SentEval folder, by the model's uni-modal text vectors (its own vectors without such heads).

    A model that cleans captions reads these sentences as they are: the published STS rows do not clean.
    """

    folder: str | Path
    reads_captions: ClassVar[bool] = False
    reads = staticmethod(is_senteval)
    wants: ClassVar[str] = "SentEval's data folder"

    def __call__(
        self, model: Retriever | TextEncoder, data: Prepared | None = None, *, show_progress: bool = False
    ) -> Group:
        found = read_senteval(self.folder)
        if isinstance(model, TextEncoder):
            teacher = model.teacher
            facts = {"vectors": "mean of the token states", "model": f"{model.name} {teacher.identity()}"}
            return sts_group(lambda texts: torch.from_numpy(teacher(texts)), found, facts)
        facts = {"vectors": name_of_view(model), "model": model.fingerprint()}
        view, reader = uni_view(model), model.text_input
        if isinstance(reader, CleanedInput):
            reader = reader.inner
            facts["sentences"] = "as they are, not cleaned"

        def encode(texts: Sequence[str]) -> Tensor:
            store = reader.prepare(texts, show_progress=show_progress)
            return model.encode_text(store, view=view, show_progress=show_progress)

        return sts_group(encode, found, facts)


def sts_group(encode: Encode, data: SentEval, facts: dict[str, str]) -> Group:
    """Correlations × 100 of every set; the mean over the seven sets only where all seven are there."""
    texts = texts_of(data.sets)
    row_of = {text: row for row, text in enumerate(texts)}
    vectors = unit(encode(texts).double()).numpy()
    metrics: dict[str, float] = {}
    rows: list[tuple[str, list[str]]] = []
    for one in data.sets:
        files = []
        for file in one.files:
            first, second = (vectors[[row_of[text] for text in side]] for side in (file.first, file.second))
            files.append(((first * second).sum(axis=1), file.gold))
        name = f"{one.name} {one.split}"
        found = agreement(files)
        metrics |= {f"{name} {kind}": value for kind, value in found.items()}
        several = len(one.files) > 1
        kinds = [kind if several or kind.endswith("all") else "" for kind in COLUMNS]
        rows.append((f"{name} ({len(one):,} pairs)", [f"{name} {kind}" if kind else "" for kind in kinds]))
    primary = f"{data.sets[0].name} {data.sets[0].split} spearman_all"
    if data.complete:
        metrics["sts_average"] = float(np.mean([metrics[f"{name} test spearman_all"] for name in SEVEN]))
        primary = "sts_average"
        rows.append(("mean of the seven test sets", ["sts_average", *[""] * (len(COLUMNS) - 1)]))
    missing = "; ".join(data.missing)
    return Group(
        "sts",
        metrics,
        primary,
        Facts(
            {"protocol": "sts", "aggregation": "all pairs of a set together", "data": _digest(data.sets)},
            facts,
            f"missing, so that no mean of the seven is given: {missing}." if missing else "",
        ),
        tables=(Layout(["STS, × 100", *COLUMNS.values()], rows),),
        digits=2,
    )


def _digest(sets: Sequence[SentenceSet]) -> str:
    digest = hashlib.sha256()
    for one in sets:
        for file in one.files:
            digest.update("\0".join([one.name, one.split, file.name, *file.first, *file.second]).encode())
            digest.update(file.gold.tobytes())
    return digest.hexdigest()[:16]
