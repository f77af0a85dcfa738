"""The evaluator of label-wise retrieval: NDCG and mAP both ways, micro-F1 of the predicted labels."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych import __version__, ops
from diptych.branches.labels import LabelView, label_view
from diptych.data.captions import Captions
from diptych.evaluation import protocols
from diptych.evaluation.cards import Facts, direction_words
from diptych.evaluation.labels import DEPTH, choose_threshold, first_occurrences, judge_labels, micro_f1
from diptych.evaluation.metrics import DIRECTIONS
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Group, Layout
from diptych.evaluation.significance import Queries, bootstrap, interval
from diptych.model.retriever import Retriever
from diptych.model.scores import EmbeddingScores, Fold, Scores

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
        """The group ``labels``."""
        began = time.perf_counter()
        captions = data.captions
        name, view = label_view(model.branches.items())
        rows = view.labels.rows_of(captions)
        labels = {"image": rows, "text": rows[captions.image_of]}
        rules = protocols.protocol_named(self.protocol)
        rules.check(captions.image_of, len(captions.images))
        told = {
            "image": model.encode_image(captions.images, view=name, show_progress=show_progress),
            "text": model.encode_text(data.texts, view=name, show_progress=show_progress),
        }
        scores = self._scores(model, view, data, told, show_progress)
        metrics, intervals = self._ranked(scores, data, labels, rules, view.merge_texts)
        choose = set(captions.splits) == {"val"} if self.choose is None else self.choose
        for place, side in enumerate(SIDES):
            if choose:
                view.thresholds[place], metrics[f"{side}_f1"] = choose_threshold(told[side], labels[side])
            else:
                metrics[f"{side}_f1"] = micro_f1(
                    told[side], labels[side], round(float(view.thresholds[place]), 6)
                )
        return Group(
            "labels",
            metrics,
            "ndcg",
            self._card(model, view, data, scores, choose),
            intervals,
            {"seconds": time.perf_counter() - began},
            self._tables(),
        )

    def check(self, model: Retriever, captions: Captions) -> None:
        """Refuse data with labels that the model does not know, or without labels."""
        label_view(model.branches.items())[1].labels.rows_of(captions)

    @staticmethod
    def _scores(
        model: Retriever, view: LabelView, data: Prepared, told: dict[str, Tensor], show_progress: bool
    ) -> Scores:
        """The model's scores; where the predictions are its embeddings, nothing is encoded a second time."""
        heads = model.image.aggregator is view.image_head and model.text.aggregator is view.text_head
        if heads and model.scorer is None and model.dim == view.dim:
            return EmbeddingScores(ops.unit(told["image"]), ops.unit(told["text"]))
        return data.scores_of(model, show_progress)

    def _ranked(
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
            part = (
                scores
                if rules.folds == 1
                else Fold(scores, torch.from_numpy(images), torch.from_numpy(texts))
            )
            distinct = first_occurrences([data.captions.texts[row] for row in texts]) if merge_texts else None
            judged = judge_labels(
                part,
                labels["image"][images],
                labels["text"][texts],
                depth=self.depth,
                distinct_texts=distinct,
            )
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
        metrics = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
        both = [f"{direction}_ndcg@{self.depth}" for direction in DIRECTIONS]
        metrics["ndcg"] = float(np.mean([metrics[name] for name in both]))
        if not draws:
            return metrics, {}
        sampled = {name: np.mean([one[name] for one in draws], axis=0) for name in draws[0]}
        sampled["ndcg"] = np.mean([sampled[name] for name in both], axis=0)
        return metrics, {name: interval(values) for name, values in sampled.items()}

    def _card(self, model: Retriever, view: LabelView, data: Prepared, scores: Scores, chosen: bool) -> Facts:
        captions = data.captions
        image, text = (f"{float(value):.2f}" for value in view.thresholds)
        return Facts(
            {
                "data": captions.name,
                "split": "+".join(sorted(set(captions.splits))),
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
                f"({'chosen on this split' if chosen else 'of the model, chosen on its validation split'})",
                "score": scores.kind,
                "model": model.fingerprint(),
                "diptych": __version__,
            },
        )

    def _tables(self) -> tuple[Layout, ...]:
        rows = [(direction_words(d), [f"{d}_ndcg@{self.depth}", f"{d}_map"]) for d in DIRECTIONS]
        return (
            Layout(["", f"NDCG@{self.depth}", "mAP"], [*rows, ("mean", ["ndcg", ""])]),
            Layout(["", "micro-F1"], [(side, [f"{side}_f1"]) for side in SIDES]),
        )
