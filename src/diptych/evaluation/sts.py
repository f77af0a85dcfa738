"""Semantic textual similarity: cosines of text vectors against gold scores, set by set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from diptych.data.cleaning import CleanedInput
from diptych.evaluation.cards import Facts
from diptych.evaluation.correlation import agreement
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Group, Layout
from diptych.evaluation.senteval import SEVEN, SentenceSet, SentEval, is_senteval, read_senteval, texts_of
from diptych.evaluation.views import name_of_view, uni_view
from diptych.model.retriever import Retriever
from diptych.ops import unit
from diptych.targets.teachers import TextTeacher

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
        """The group ``sts``; ``data`` plays no part."""
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
