"""The evaluator of label-wise retrieval: NDCG and mAP both ways, micro-F1 of the predicted labels.

Failure cases of label-wise retrieval (supplement, section 4): retrieved items that miss the query's labels.

A retrieved item is a failure when it lacks a label of the query and carries another one in its place. Every such pair
(missed label, label found instead) is counted, and is of one of two kinds:

* ``super-class``: the item shares another label with the query, so both lie in one wider class (banana and vegetable
  are both food);
* ``semantic``: query and item share no label at all (a spoon taken for a ball).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych import __version__, ops
from diptych.branches.labels import LabelView, label_view
from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.evaluation import protocols
from diptych.evaluation.cards import Facts, direction_words, split_names
from diptych.evaluation.judgements import top_lists
from diptych.evaluation.labels import (
    DEPTH,
    Rows,
    checked_labels,
    choose_threshold,
    first_occurrences,
    judge_labels,
    micro_f1,
)
from diptych.evaluation.metrics import DIRECTIONS
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Group, Layout
from diptych.evaluation.significance import Queries, bootstrap, interval, over_folds
from diptych.model.retriever import Retriever
from diptych.model.scores import EmbeddingScores, Scores, as_scores

SIDES = ("image", "text")


@dataclass(frozen=True)
class LabelRetrieval:
    """NDCG@depth, mAP and micro-F1 of a model that predicts labels; the primary metric is the mean ``ndcg``.

    ``choose`` picks the thresholds of micro-F1 on these data and leaves them in the model; else the model's own are
    used. By default (None) they are chosen on the split ``val`` and on no other. Where the model says that texts are
    tag sets, each distinct one is ranked and asked once, with the labels of its first occurrence. ``protocol``
    gives the folds (coco-1k), ``bootstrap`` the number of resamples of the intervals, 0 for none.
    """

    depth: int = DEPTH
    choose: bool | None = None
    protocol: str = "plain"
    bootstrap: int = 0
    seed: int = 0

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        began = time.perf_counter()
        captions = data.captions
        name, view = label_view(model.branches.items())
        rows = view.labels.rows_of(captions)
        labels = {"image": rows, "text": rows[captions.image_of]}
        rules = protocols.protocol_named(self.protocol)
        rules.check(captions.image_of, len(captions.images))
        predicted = {
            "image": model.encode_image(captions.images, view=name, show_progress=show_progress),
            "text": model.encode_text(data.texts, view=name, show_progress=show_progress),
        }
        scores = self._scores(model, view, data, predicted, show_progress)
        metrics, intervals = self._rank(scores, data, labels, rules, view.merge_texts)
        choose = set(captions.splits) == {"val"} if self.choose is None else self.choose
        for place, side in enumerate(SIDES):
            if choose:
                view.thresholds[place], found = choose_threshold(predicted[side], labels[side])
            else:
                found = micro_f1(predicted[side], labels[side], round(float(view.thresholds[place]), 6))
            metrics[f"{side}_f1"] = found
        ranked = [(direction_words(d), [f"{d}_ndcg@{self.depth}", f"{d}_map"]) for d in DIRECTIONS]
        tables = (
            Layout(["", f"NDCG@{self.depth}", "mAP"], [*ranked, ("mean", ["ndcg", ""])]),
            Layout(["", "micro-F1"], [(side, [f"{side}_f1"]) for side in SIDES]),
        )
        card = self._card(model, view, data, scores, choose)
        seconds = {"seconds": time.perf_counter() - began}
        return Group("labels", metrics, "ndcg", card, intervals, seconds, tables)

    def check(self, model: Retriever, captions: Captions) -> None:
        """Refuse data with labels that the model does not know, or without labels."""
        label_view(model.branches.items())[1].labels.rows_of(captions)

    @staticmethod
    def _scores(
        model: Retriever, view: LabelView, data: Prepared, predicted: dict[str, Tensor], show_progress: bool
    ) -> Scores:
        """The model's scores; where the predictions are its embeddings, nothing is encoded a second time."""
        heads = model.image.aggregator is view.image_head and model.text.aggregator is view.text_head
        if heads and model.scorer is None and model.dim == view.dim:
            return EmbeddingScores(ops.unit(predicted["image"]), ops.unit(predicted["text"]))
        return data.scores_of(model, show_progress)

    def _rank(
        self,
        scores: Scores,
        data: Prepared,
        labels: dict[str, NDArray[np.float32]],
        rules: protocols.EvaluationProtocol,
        merge_texts: bool,
    ) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        found: list[dict[str, float]] = []
        draws: list[dict[str, NDArray[np.float64]]] = []
        image_of = data.captions.image_of
        for number, (images, texts) in enumerate(rules.split(image_of, len(data.captions.images))):
            distinct = first_occurrences([data.captions.texts[row] for row in texts]) if merge_texts else None
            own = labels["image"][images], labels["text"][texts]
            part = rules.part(scores, images, texts)
            judged = judge_labels(part, *own, depth=self.depth, distinct_texts=distinct)
            queries = {}
            for direction, one in judged.items():
                asked = texts if distinct is None else texts[distinct]
                owner = np.arange(len(images)) if direction == DIRECTIONS[0] else image_of[asked] - images[0]
                assert one.ap is not None
                queries[f"{direction}_ndcg@{self.depth}"] = Queries(one.ndcg, owner)
                queries[f"{direction}_map"] = Queries(one.ap, owner)
            found.append({name: float(one.values.mean()) for name, one in queries.items()})
            if self.bootstrap:
                rng = np.random.default_rng([self.seed, number])
                draws.append(bootstrap(queries, len(images), self.bootstrap, rng))
        metrics, sampled = over_folds(found, draws)
        both = [f"{direction}_ndcg@{self.depth}" for direction in DIRECTIONS]
        metrics["ndcg"] = float(np.mean([metrics[name] for name in both]))
        if sampled:
            sampled["ndcg"] = np.mean([sampled[name] for name in both], axis=0)
        return metrics, {name: interval(values) for name, values in sampled.items()}

    def _card(self, model: Retriever, view: LabelView, data: Prepared, scores: Scores, choose: bool) -> Facts:
        captions = data.captions
        image, text = (f"{float(value):.2f}" for value in view.thresholds)
        return Facts(
            {
                "data": captions.name,
                "split": split_names(captions),
                "images": len(captions.images),
                "texts": len(captions.texts),
                "labels": len(view.labels),
                "protocol": self.protocol,
                "equal texts": "merged, each distinct text once" if view.merge_texts else "kept",
                "relevance": "shared labels",
                "depth": self.depth,
                "data hash": captions.fingerprint(),
            },
            {
                "thresholds": f"image {image}, text {text} "
                f"({'chosen on this split' if choose else 'of the model, chosen on its validation split'})",
                "score": scores.kind,
                "model": model.fingerprint(),
                "diptych": __version__,
            },
        )


DEPTHS = {"image_to_text": 5, "text_to_image": 3}  # retrieved items looked at, as in the supplement's figure
Kind = Literal["super-class", "semantic"]


@dataclass
class Confusion:
    """A pair of labels: ``missed`` is the query's, ``found`` the retrieved item's; how often, and where.

    ``examples`` are (direction, query row, item row) in the order they were met.
    """

    kind: Kind
    missed: str
    found: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    examples: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class Failures:
    """The confusions, most frequent first, and the numbers of retrieved and of failed items by direction."""

    confusions: Sequence[Confusion]
    retrieved: Mapping[str, int]
    failed: Mapping[str, int]


def find_confusions(
    scores: Scores | Tensor | NDArray[Any],
    image_labels: Rows,
    text_labels: Rows,
    names: Sequence[str],
    depths: Mapping[str, int] = DEPTHS,
    examples: int = 3,
) -> Failures:
    """Look at the first items of every query, both ways; ``examples`` of each pair are kept."""
    if min(depths.values()) < 1:
        raise SettingsError("failure cases need at least one retrieved item per query.")
    scores = as_scores(scores)
    images = checked_labels(image_labels, scores.shape[0], "image").numpy() > 0
    texts = checked_labels(text_labels, scores.shape[1], "text").numpy() > 0
    pairs: dict[tuple[Kind, int, int], Confusion] = {}
    retrieved, failed = dict.fromkeys(DIRECTIONS, 0), dict.fromkeys(DIRECTIONS, 0)
    for direction, asked, gallery, dim in (
        (DIRECTIONS[0], images, texts, 1),
        (DIRECTIONS[1], texts, images, 0),
    ):
        depth = min(depths[direction], len(gallery))
        lists, _ = top_lists(scores, torch.arange(len(asked)), depth, dim)
        retrieved[direction] = lists.size
        for query, items in enumerate(lists):
            for item in items.tolist():
                missed, instead = asked[query] & ~gallery[item], gallery[item] & ~asked[query]
                if not (missed.any() and instead.any()):
                    continue
                failed[direction] += 1
                kind: Kind = "super-class" if (asked[query] & gallery[item]).any() else "semantic"
                for a in np.flatnonzero(missed).tolist():
                    for b in np.flatnonzero(instead).tolist():
                        pair = pairs.setdefault((kind, a, b), Confusion(kind, names[a], names[b]))
                        pair.counts[direction] += 1
                        if len(pair.examples) < examples:
                            pair.examples.append((direction, query, item))
    ordered = sorted(pairs.values(), key=lambda one: (-one.count, one.missed, one.found))
    return Failures(ordered, retrieved, failed)
