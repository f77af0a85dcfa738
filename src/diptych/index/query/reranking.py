"""Re-ranking of search hits by pair scorers: the query and each hit are looked at together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diptych.cache.local_features import LocalFeatures, features_place
from diptych.data.images import as_item
from diptych.errors import QueryError, SettingsError
from diptych.index.models import open_model
from diptych.index.protocol import Item, Query, Term
from diptych.index.query.frames import picture_of
from diptych.model.protocol import Local, Model, PairScoring, Rows, pairs_of


class Reranker:
    """Scores of a query with items: the mean over models of their pair scorer's score.

    A pair scorer compares images with texts. Images are judged by the texts of the query, texts by its images; with
    several, the score is Σ weight · score / Σ |weight|. Local features of images come from ``stored`` where they are
    there and up to date, and are computed from the files otherwise: encoding one picture costs as much as indexing
    it did. Those of texts are always computed.
    """

    def __init__(self, models: Sequence[Model], stored: Sequence[LocalFeatures | None] = ()) -> None:
        self.scorers: list[PairScoring] = []
        for model in models:
            scorer = pairs_of(model)
            if scorer is None:
                raise SettingsError(
                    "this model has no pair scorer to re-rank with: give a run of 'sgr' or 'saf', for instance."
                )
            self.scorers.append(scorer)
        self.stored = list(stored) or [None] * len(self.scorers)
        self._lock = threading.Lock()  # a service asks from several threads

    def __call__(self, query: Query, items: Sequence[Item], files: Sequence[Path | None]) -> list[float]:
        kinds = {item.kind for item in items}
        if not items:
            return []
        wanted = "image" if kinds == {"text"} else "text"
        terms = [term for term in query.terms if term.kind == wanted]
        if len(kinds) > 1 or not terms:
            raise QueryError(
                "re-ranking compares words with images: ask for images with words, or for texts with a picture."
            )
        with self._lock:
            totals = [
                _scores(scorer, store, terms, items, files)
                for scorer, store in zip(self.scorers, self.stored, strict=True)
            ]
        mean: list[float] = np.mean(totals, axis=0).tolist()
        return mean


def reranker_of(place: str | Path, model: Any, others: Sequence[str | Path] = ()) -> Reranker | None:
    """What re-ranks the hits of an index: the pair scorers of ``others`` (folders of runs), else the model's own.

    Local features that lie beside the index are used. None where the model has no pair scorer and no other is named.
    """
    where, precision = getattr(model, "device", "cpu"), getattr(model, "precision", "no")
    models: list[Model] = [open_model(other, where, precision) for other in others]
    if not models and pairs_of(model) is not None:
        models = [model]
    path = None if "://" in str(place) else features_place(place)
    if not models or path is None or not path.exists():
        return Reranker(models) if models else None
    return Reranker(models, [LocalFeatures(path, one.fingerprint()) for one in models])


def _scores(
    scorer: PairScoring,
    store: LocalFeatures | None,
    terms: Sequence[Term],
    items: Sequence[Item],
    files: Sequence[Path | None],
) -> Rows:
    weights = np.array([term.weight for term in terms], np.float32)
    if items[0].kind == "image":
        images = _local_features(scorer, store, items, files)
        found = scorer.scores(images, [str(term.value) for term in terms]) @ weights
    else:
        images = scorer.image_features([as_item(term.value) for term in terms])
        found = weights @ scorer.scores(images, [item.text for item in items])
    return np.asarray(found / np.abs(weights).sum(), np.float32)


def _local_features(
    scorer: PairScoring, store: LocalFeatures | None, items: Sequence[Item], files: Sequence[Path | None]
) -> list[Local]:
    """The local features of images: the stored ones, and the others computed from their files."""
    known = store.get((item.id, item.content) for item in items) if store is not None else {}
    missing: list[tuple[Item, Path]] = []
    for item, file in zip(items, files, strict=True):
        if item.id in known:
            continue
        if file is None:
            raise QueryError(
                f"'{item.id}' has no stored local features, and no file to compute them from: index again with "
                "--local_features."
            )
        missing.append((item, file))
    if missing:
        computed = scorer.image_features([picture_of(*one) for one in missing])
        known |= {item.id: local for (item, _), local in zip(missing, computed, strict=True)}
    return [known[item.id] for item in items]
