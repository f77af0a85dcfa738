"""Evaluate: encode each image and each text once, rank, and report under a protocol."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych import __version__
from diptych.data.captions import Captions, ImageStore
from diptych.data.text import TextStore
from diptych.errors import DataError, SettingsError
from diptych.evaluation import protocols
from diptych.evaluation.bootstrap import Queries, bootstrap, interval
from diptych.evaluation.cards import Card
from diptych.evaluation.equal_texts import right_pairs, text_groups
from diptych.evaluation.judgements import Judgements, coco_ids, judge_scores
from diptych.evaluation.metrics import (
    DIRECTIONS,
    KS,
    Ranks,
    checked_pairing,
    count_ranks,
    count_shared_ranks,
    summary,
)
from diptych.evaluation.report import Group, Outcomes, Report, retrieval_tables
from diptych.evaluation.rules import Rules, rules_of_ranks
from diptych.evaluation.score_matrix import refinable, stored_scores
from diptych.model.protocol import Scorer
from diptych.model.scores import Fold, MeanScores, Scores, Where, as_scores


def evaluate_ensemble(
    retrievers: Sequence[Scorer],
    captions: Captions,
    *,
    protocol: str | protocols.EvaluationProtocol = "plain",
    ties: str = "index",
    judgements: Sequence[str | Judgements] = (),
    image_stores: Sequence[ImageStore] | None = None,
    text_stores: Sequence[TextStore | None] | None = None,
    image_batch_size: int | None = None,
    text_batch_size: int | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    equal_texts: bool = False,
    score_matrix: Path | None = None,
    device: torch.device | str | None = None,
    show_progress: bool = False,
) -> Report:
    """``evaluate`` for the mean of the scores of several models, which is never held whole.

    ``image_stores`` holds the same images once per model where models read different features of them.
    With ``score_matrix``, the scores are computed once into that ``.npy`` file, resumed after a kill, and ranked
    from there. Pair scores in half precision go through a temporary file, so that their best can be refined.
    """
    rules = Rules.of(protocol, ties, judgements, bootstrap, seed, equal_texts)
    source = _Source.of(captions, rules)
    stores = [None] * len(retrievers) if text_stores is None else text_stores
    galleries = [captions.images] * len(retrievers) if image_stores is None else image_stores
    for gallery in galleries:
        if len(gallery) != len(captions.images):
            raise DataError(
                f"a model's store has {len(gallery)} images, the data {len(captions.images)}: give the same images."
            )
    if len(stores) != len(retrievers):
        raise SettingsError(
            f"{len(stores)} text stores for {len(retrievers)} models: give one each, or none."
        )
    if not retrievers:
        raise SettingsError("an ensemble needs at least one member: give a model.")
    began = time.perf_counter()
    members: list[Scores] = []
    for retriever, gallery, store in zip(retrievers, galleries, stores, strict=True):
        if store is not None and len(store) != len(captions.texts):
            raise DataError(
                f"the text store has {len(store)} texts, the data {len(captions.texts)}: prepare these."
            )
        members.append(
            retriever.scores(
                gallery,
                captions.texts if store is None else store,
                image_batch_size=image_batch_size,
                text_batch_size=text_batch_size,
                device=device,
                show_progress=show_progress,
            )
        )
    scores = members[0] if len(members) == 1 else MeanScores(members)
    encoding = _encoding_speed(members, len(captions.images), len(captions.texts))
    model = " + ".join(retriever.fingerprint() for retriever in retrievers)
    if score_matrix is None and not refinable(scores):
        return _report(scores, source, rules, model, began, encoding)
    with TemporaryDirectory() as folder:  # what is computed again in float32 must be kept until it is ranked
        path = Path(folder) / "scores.npy" if score_matrix is None else score_matrix
        computed = _Timed(scores)
        identity = {"model": model, "data": source.data_hash}
        stored = stored_scores(scores, path, identity, computed.tile, show_progress=show_progress)
        return _report(stored, source, rules, model, began, encoding, computed)


def _encoding_speed(members: Sequence[Scores], images: int, texts: int) -> dict[str, float]:
    """Items per second of the encoders, where every member measured its own."""
    seconds = [getattr(member, "encode_seconds", None) for member in members]
    known = [one for one in seconds if one is not None]
    if len(known) < len(members):
        return {}
    return {
        "images_per_second": len(members) * images / sum(one[0] for one in known),
        "texts_per_second": len(members) * texts / sum(one[1] for one in known),
    }


def evaluate_scores(
    scores: Scores | Tensor | NDArray[Any],
    data: Captions | Sequence[int] | NDArray[np.int64],
    *,
    protocol: str | protocols.EvaluationProtocol = "plain",
    ties: str = "index",
    judgements: Sequence[str | Judgements] = (),
    bootstrap: int = 1000,
    seed: int = 0,
    equal_texts: bool = False,
    model: str = "unknown",
) -> Report:
    """Report scores (images, texts) that exist already, or that a pair scorer computes tile by tile.

    ``data`` are the captions scored, or only ``image_of`` (M,); judgements need the captions, for their ids.
    """
    scores, began = as_scores(scores), time.perf_counter()
    rules = Rules.of(protocol, ties, judgements, bootstrap, seed, equal_texts)
    if isinstance(data, Captions):
        source = _Source.of(data, rules)
        if scores.shape != (source.images, len(source.image_of)):
            raise DataError(
                f"scores are {scores.shape}, but the data have {source.images} images and "
                f"{len(source.image_of)} texts: score these captions, in this order."
            )
    else:
        if rules.equal_texts:
            raise SettingsError("equal texts are found in the captions: pass them in place of image_of.")
        if rules.judgements:
            raise SettingsError(
                "judgements need the captions, for their ids: pass them in place of image_of."
            )
        source = _Source.bare(checked_pairing(data, *scores.shape), scores.shape[0], rules)
    return _report(scores, source, rules, model, began, {})


@dataclass(frozen=True, slots=True)
class _Source:
    """What the card says of the data, with the pairing and, for judgements, the ids."""

    image_of: NDArray[np.int64]
    images: int
    name: str
    split: str
    data_hash: str
    ids: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    group_of: NDArray[np.int64] | None = None  # (M,) equal texts share a number; only where that counts

    @staticmethod
    def of(captions: Captions, rules: Rules) -> _Source:
        """Captions, once the protocol and the judgements have accepted them."""
        images, texts = len(captions.images), len(captions.texts)
        image_of = checked_pairing(captions.image_of, images, texts)
        rules.protocol.check(image_of, images)
        for judgements in rules.judgements:
            judgements.check(images, texts)
        split = "+".join(sorted(set(captions.splits)))
        ids = coco_ids(captions) if rules.judgements else None
        groups = text_groups(captions.texts) if rules.equal_texts else None
        return _Source(image_of, images, captions.name, split, captions.fingerprint(), ids, groups)

    @staticmethod
    def bare(image_of: NDArray[np.int64], images: int, rules: Rules) -> _Source:
        """Only a pairing: its hash stands for the data."""
        rules.protocol.check(image_of, images)
        digest = hashlib.sha256(f"{images}\0".encode() + image_of.tobytes()).hexdigest()[:16]
        return _Source(image_of, images, "scores", "unknown", digest)


class _Timed:
    """Scores that remember how many pairs they computed in how much time."""

    def __init__(self, scores: Scores) -> None:
        self.scores, self.pairs, self.seconds = scores, 0, 0.0
        self.kind, self.shape, self.device = scores.kind, scores.shape, scores.device

    def tile(self, images: Where, texts: Where) -> Tensor:
        """The tile, timed to its end."""
        start = time.perf_counter()
        part = self.scores.tile(images, texts)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - start
        self.pairs += part.numel()
        return part


def _report(
    scores: Scores,
    source: _Source,
    rules: Rules,
    model: str,
    began: float,
    encoding: dict[str, float],
    computed: _Timed | None = None,
) -> Report:
    """``computed`` timed the computation where ``scores`` are only read from a file."""
    timed = _Timed(scores)

    def ranked(images: NDArray[np.int64], texts: NDArray[np.int64]) -> Ranks:
        whole = rules.protocol.folds == 1
        part = timed if whole else Fold(timed, torch.from_numpy(images), torch.from_numpy(texts))
        image_of = source.image_of[texts] - images[0]
        if source.group_of is None:
            return count_ranks(part, image_of)
        return count_shared_ranks(part, *right_pairs(image_of, source.group_of[texts]))

    judged = _judged(timed, source, rules.judgements) if source.ids is not None else {}
    measured = _measure(ranked, judged, source, rules)
    clock = timed if computed is None else computed
    pairs = {"thousand_pairs_per_second": clock.pairs / clock.seconds / 1000} if clock.pairs else {}
    speed = encoding | pairs | {"seconds": time.perf_counter() - began}
    return _filled(measured, source, rules, scores.kind, model, speed)


def evaluate_ranks(
    ranks: Ranks,
    image_of: NDArray[np.int64],
    images: int,
    *,
    data: str,
    split: str,
    data_hash: str,
    model: str,
    score: str = "dot",
    protocol: str | protocols.EvaluationProtocol = "plain",
    ties: str = "index",
    bootstrap: int = 1000,
    seed: int = 0,
    speed: dict[str, float] | None = None,
) -> Report:
    """Report ranks that were counted elsewhere, over shards of the data; ``data`` and what follows fill the card."""
    rules = rules_of_ranks(protocol, ties, bootstrap, seed)
    rules.protocol.check(image_of, images)
    source = _Source(image_of, images, data, split, data_hash)
    return _filled(_measure(lambda *_: ranks, {}, source, rules), source, rules, score, model, speed or {})


_Measured = tuple[dict[str, float], dict[str, tuple[float, float]], dict[str, int], int, Outcomes]
"""Metrics, their intervals, tied queries of each direction and those at the top, and what became of every query."""


def _filled(
    measured: _Measured, source: _Source, rules: Rules, score: str, model: str, speed: dict[str, float]
) -> Report:
    """What was measured, with its card."""
    metrics, intervals, tied, at_top, outcomes = measured
    sizes = np.bincount(source.image_of, minlength=source.images)
    card = Card(
        protocol=rules.protocol.name,
        data=source.name,
        split=source.split,
        images=source.images,
        texts=len(source.image_of),
        texts_per_image=(int(sizes.min()), float(sizes.mean()), int(sizes.max())),
        folds=rules.protocol.folds,
        ties=rules.ties,
        tied_queries=tied,
        tied_at_top=at_top,
        score=score,
        data_hash=source.data_hash,
        model=model,
        bootstrap=rules.draws,
        seed=rules.seed,
        version=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        equal_texts=rules.equal_texts,
    )
    tables = retrieval_tables(metrics)
    return Report((Group("retrieval", metrics, "rsum", card, intervals, speed, tables, outcomes=outcomes),))


def _measure(
    ranked: Callable[[NDArray[np.int64], NDArray[np.int64]], Ranks],
    judged: dict[str, Queries],
    source: _Source,
    rules: Rules,
) -> _Measured:
    """Metrics averaged over the folds, intervals (images resampled within their fold), and tied queries."""
    found: list[dict[str, float]] = []
    draws: list[dict[str, NDArray[np.float64]]] = []
    tied, at_top = dict.fromkeys(DIRECTIONS, 0), 0
    ranks_of: dict[str, list[float]] = {way: [] for way in DIRECTIONS}
    images_of: dict[str, list[int]] = {way: [] for way in DIRECTIONS}
    folds: list[int] = []
    for number, (images, texts) in enumerate(rules.protocol.split(source.image_of, source.images)):
        image_of, ranks = source.image_of[texts] - images[0], ranked(images, texts)
        metrics, queries = summary(ranks, rules.ties), _queries(ranks, image_of, rules.ties)
        metrics |= {name: float(one.values.mean()) for name, one in judged.items()}
        queries |= judged
        for direction, placement in ranks:
            tied[direction] += placement.tied_queries
            at_top += placement.tied_at_top
            ranks_of[direction] += placement.ranks(rules.ties).tolist()
            images_of[direction] += (queries[f"{direction}_mean_rank"].images + images[0]).tolist()
        folds += [number] * len(images)
        found.append(metrics)
        if rules.draws:
            rng = np.random.default_rng([rules.seed, number])
            sample = bootstrap(queries, len(images), rules.draws, rng)
            recalls = [sample[f"{direction}_recall@{k}"] for direction in DIRECTIONS for k in KS]
            draws.append(sample | {"rsum": np.sum(recalls, axis=0), "mean_recall": np.mean(recalls, axis=0)})
    averaged = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    intervals = {
        name: interval(np.mean([one[name] for one in draws], axis=0))
        for name in averaged
        if draws and name in draws[0]
    }
    return averaged, intervals, tied, at_top, Outcomes(ranks_of, images_of, folds)


def _queries(ranks: Ranks, image_of: NDArray[np.int64], ties: str) -> dict[str, Queries]:
    """The metrics that are means over queries, query by query."""
    queries: dict[str, Queries] = {}
    for direction, placement in ranks:
        rank = placement.ranks(ties)
        images = placement.queries if direction == "image_to_text" else image_of[placement.queries]
        queries |= {f"{direction}_recall@{k}": Queries(np.where(rank < k, 100.0, 0.0), images) for k in KS}
        queries[f"{direction}_mean_rank"] = Queries(rank + 1, images)
    return queries


def _judged(scores: Scores, source: _Source, judgements: Sequence[Judgements]) -> dict[str, Queries]:
    """Many-to-many metrics, query by query, as ``eccv_image_to_text_map@r``."""
    assert source.ids is not None
    queries: dict[str, Queries] = {}
    for one in judgements:
        for direction, judged in judge_scores(scores, one, *source.ids).items():
            ids = source.ids[DIRECTIONS.index(direction)]
            order = np.argsort(ids)
            rows = order[np.searchsorted(ids, judged.queries, sorter=order)]
            images = rows if direction == "image_to_text" else source.image_of[rows]
            queries |= {f"{one.name}_{direction}_{m}": Queries(v, images) for m, v in judged.values.items()}
    return queries
