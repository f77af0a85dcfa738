"""Evaluate: encode each image and each text once, rank, and report under a protocol."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diptych import __version__
from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions, ImageStore
from diptych.data.corrections import file_hash
from diptych.data.text import TextStore
from diptych.errors import DataError, SettingsError
from diptych.evaluation.cards import Card, split_names
from diptych.evaluation.judgements import Ids, Judgements, judge_scores
from diptych.evaluation.metrics import (
    DIRECTIONS,
    KS,
    Ranks,
    checked_pairing,
    count_ranks,
    count_shared_ranks,
    right_pairs,
    summary,
    text_groups,
)
from diptych.evaluation.prepared import PreparedScores, Timed
from diptych.evaluation.protocols import Options, Rules, rules_of, rules_of_ranks
from diptych.evaluation.report import Group, Outcomes, Report, retrieval_tables
from diptych.evaluation.score_matrix import refinable, stored_scores
from diptych.evaluation.significance import (
    Queries,
    bootstrap,
    interval,
    over_folds,
    recall_queries,
    with_sums,
)
from diptych.model.protocol import Scorer
from diptych.model.scores import MeanScores, Scores, as_scores


def evaluate_scores(
    scores: Scores | Tensor | NDArray[Any],
    data: Captions | Sequence[int] | NDArray[np.int64],
    *,
    model: str = "unknown",
    **options: Unpack[Options],
) -> Report:
    """Report scores (images, texts) that exist already, or that a pair scorer computes tile by tile.

    ``data`` are the captions scored, or only ``image_of`` (M,); judgements and equal texts need the captions.
    ``model`` is its name on the card. ``options`` are those of ``evaluate``: ``protocol``, ``ties``, ``judgements``,
    ``bootstrap``, ``seed``, ``equal_texts``.
    """
    return report_scored(PreparedScores(as_scores(scores), model), data, rules_of(**options))


def report_scored(
    scored: PreparedScores, data: Captions | Sequence[int] | NDArray[np.int64], every: Sequence[Rules]
) -> Report:
    """A group for each of the rules. Of several, the names of metrics begin with the protocol: ``coco-1k_rsum``."""
    digest = data.fingerprint() if isinstance(data, Captions) else ""
    groups = [_group(scored, _Source.of(data, rules, scored.scores.shape, digest), rules) for rules in every]
    if len(groups) > 1:
        groups = [group.under(rules.protocol.name) for group, rules in zip(groups, every, strict=True)]
    return Report(tuple(groups))


def check_captions(captions: Captions, every: Sequence[Rules]) -> None:
    """Refuse captions that the rules do not accept, before anything is encoded."""
    for rules in every:
        _Source.of(captions, rules, (len(captions.images), len(captions.texts)), "")


Ready = tuple[ImageStore, TextStore | Sequence[str]]
"""The images and the texts of captions as one model reads them."""


@contextmanager
def scored_by(
    models: Sequence[Scorer],
    captions: Captions,
    ready: Sequence[Ready],
    *,
    score_matrix: Path | None = None,
    show_progress: bool = False,
    **options: Any,
) -> Iterator[PreparedScores]:
    """The scores of a model, or the mean of those of several, which is never held whole.

    ``ready`` has what each model reads: models may read different features of the same images. With ``score_matrix``,
    the scores are computed once into that ``.npy`` file, resumed after a kill, and ranked from there. Pair scores in
    half precision go through a temporary file, so that their best can be refined.
    """
    for images, texts in ready:
        if len(images) != len(captions.images):
            raise DataError(
                f"a model's store has {len(images)} images, the data {len(captions.images)}: give the same images."
            )
        if len(texts) != len(captions.texts):
            raise DataError(f"the store has {len(texts)} texts, not {len(captions.texts)}: prepare these.")
    if not models:
        raise SettingsError("an ensemble needs at least one member: give a model.")
    began = time.perf_counter()
    members = [
        model.scores(*stores, show_progress=show_progress, **options)
        for model, stores in zip(models, ready, strict=True)
    ]
    scores = MeanScores.of(members)
    encoding = _encoding_speed(members, len(captions.images), len(captions.texts))
    if encoding and any(isinstance(getattr(images, "store", images), ArrayStore) for images, _ in ready):
        encoding["from_features"] = 1.0
    name = " + ".join(model.fingerprint() for model in models)
    if score_matrix is None and not refinable(scores):
        yield PreparedScores(scores, name, encoding, time.perf_counter() - began)
        return
    with TemporaryDirectory() as folder:  # what is computed again in float32 must be kept until it is ranked
        path = Path(folder) / "scores.npy" if score_matrix is None else score_matrix
        timed = Timed(scores)
        identity = {"model": name, "data": captions.fingerprint()}
        stored = stored_scores(scores, path, identity, timed.tile, show_progress=show_progress)
        yield PreparedScores(stored, name, encoding, time.perf_counter() - began, timed)


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


@dataclass(frozen=True, slots=True)
class _Source:
    """What the card says of the data, with the pairing and, for judgements, the ids."""

    image_of: NDArray[np.int64]
    images: int
    name: str
    split: str
    data_hash: str
    ids: Sequence[Ids] = ()  # of images and texts, for each set of judgements
    group_of: NDArray[np.int64] | None = None  # (M,) equal texts share a number; only where that counts
    judgements: Sequence[Judgements] = ()
    repeated: int = 0  # texts that another text equals

    @staticmethod
    def of(
        data: Captions | Sequence[int] | NDArray[np.int64], rules: Rules, shape: tuple[int, int], digest: str
    ) -> _Source:
        """What was scored, once the protocol and the judgements have accepted it; ``shape`` is that of the scores."""
        if not isinstance(data, Captions):
            return _Source._bare(data, rules, shape)
        images, texts = len(data.images), len(data.texts)
        if shape != (images, texts):
            raise DataError(
                f"scores are {shape}, but the data have {images} images and {texts} texts: score these, in this order."
            )
        image_of = checked_pairing(data.image_of, images, texts)
        rules.protocol.check(image_of, images)
        for judgements in rules.judgements:
            judgements.check(images, texts)
        split = split_names(data)
        judged = [judgements.on(data) for judgements in rules.judgements]
        ids = [judgements.ids_of(data) for judgements in judged]
        groups = text_groups(data.texts) if rules.equal_texts else None
        repeated = sum(count for count in Counter(data.texts).values() if count > 1)
        return _Source(image_of, images, data.name, split, digest, ids, groups, judged, repeated)

    @staticmethod
    def _bare(data: Sequence[int] | NDArray[np.int64], rules: Rules, shape: tuple[int, int]) -> _Source:
        """Only a pairing: its hash stands for the data."""
        if rules.equal_texts:
            raise SettingsError("equal texts are found in the captions: pass them in place of image_of.")
        if rules.judgements:
            raise SettingsError("judgements need the ids of captions: pass these in place of image_of.")
        image_of, images = checked_pairing(data, *shape), shape[0]
        rules.protocol.check(image_of, images)
        digest = hashlib.sha256(f"{images}\0".encode() + image_of.tobytes()).hexdigest()[:16]
        return _Source(image_of, images, "scores", "unknown", digest)


def _group(scored: PreparedScores, source: _Source, rules: Rules) -> Group:
    began = time.perf_counter()
    sides = [Timed(one) for one in scored.directions or (scored.scores,)]

    def rank(images: NDArray[np.int64], texts: NDArray[np.int64]) -> Ranks:
        image_of, found = source.image_of[texts] - images[0], []
        for side in sides:
            part = rules.protocol.part(side, images, texts)
            if source.group_of is None:
                found.append(count_ranks(part, image_of))
            else:
                found.append(count_shared_ranks(part, *right_pairs(image_of, source.group_of[texts])))
        return Ranks(found[0].image_to_text, found[-1].text_to_image)

    group = _measure(rank, _judge(sides, source), source, rules, score=sides[0].kind, model=scored.model)
    clock = scored.computed or sides[0]
    pairs = {"thousand_pairs_per_second": clock.pairs / clock.seconds / 1000} if clock.pairs else {}
    seconds = scored.seconds + time.perf_counter() - began
    return replace(group, speed={**scored.encoding, **pairs, "seconds": seconds})


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
    speed: dict[str, float] | None = None,
    **options: Unpack[Options],
) -> Report:
    """Report ranks that were counted elsewhere, over shards of the data; ``data`` and what follows fill the card."""
    rules = rules_of_ranks(**options)
    rules.protocol.check(image_of, images)
    source = _Source(image_of, images, data, split, data_hash)
    group = _measure(lambda *_: ranks, {}, source, rules, score=score, model=model)
    return Report((replace(group, speed=speed or {}),))


def _measure(
    ranks_of_fold: Callable[[NDArray[np.int64], NDArray[np.int64]], Ranks],
    judged: dict[str, Queries],
    source: _Source,
    rules: Rules,
    *,
    score: str,
    model: str,
) -> Group:
    """Metrics averaged over the folds, with intervals (images resampled within their fold), and the card."""
    found: list[dict[str, float]] = []
    draws: list[dict[str, NDArray[np.float64]]] = []
    tied, at_top = dict.fromkeys(DIRECTIONS, 0), 0
    ranks_of: dict[str, list[float]] = {way: [] for way in DIRECTIONS}
    images_of: dict[str, list[int]] = {way: [] for way in DIRECTIONS}
    folds: list[int] = []
    for number, (images, texts) in enumerate(rules.protocol.split(source.image_of, source.images)):
        image_of, ranks = source.image_of[texts] - images[0], ranks_of_fold(images, texts)
        metrics, queries = summary(ranks, rules.ties), recall_queries(ranks, image_of, rules.ties) | judged
        metrics |= {name: float(one.values.mean()) for name, one in judged.items()}
        for way, placement in ranks:
            tied[way] += placement.tied_queries
            at_top += placement.tied_at_top
            rank, owner = placement.ranks(rules.ties), queries[f"{way}_recall@{KS[0]}"].images
            queries[f"{way}_mean_rank"] = Queries(rank + 1, owner)
            ranks_of[way] += rank.tolist()
            images_of[way] += (owner + images[0]).tolist()
        folds += [number] * len(images)
        found.append(metrics)
        rng = np.random.default_rng([rules.seed, number])
        draws += [with_sums(bootstrap(queries, len(images), rules.bootstrap, rng))] if rules.bootstrap else []
    averaged, sampled = over_folds(found, draws)
    intervals = {name: interval(sampled[name]) for name in averaged if name in sampled}
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
        bootstrap=rules.bootstrap,
        seed=rules.seed,
        version=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        equal_texts=rules.equal_texts,
        repeated_texts=source.repeated,
        judged=tuple(f"{file} ({file_hash(file)})" for one in rules.judgements if (file := one.corrections)),
    )
    outcomes, tables = Outcomes(ranks_of, images_of, folds), retrieval_tables(averaged)
    return Group("retrieval", averaged, "rsum", card, intervals, tables=tables, outcomes=outcomes)


def _judge(sides: Sequence[Scores], source: _Source) -> dict[str, Queries]:
    """Many-to-many metrics, query by query, as ``eccv_image_to_text_map@r``; ``sides`` are one, or one a direction."""
    queries: dict[str, Queries] = {}
    for one, names in zip(source.judgements, source.ids, strict=True):
        both = [judge_scores(side, one, *names) for side in sides]
        for direction, found, ids in zip(DIRECTIONS, (both[0], both[-1]), names, strict=True):
            judged = found[direction]
            order = np.argsort(ids)
            rows = order[np.searchsorted(ids, judged.queries, sorter=order)]
            images = rows if direction == "image_to_text" else source.image_of[rows]
            queries |= {f"{one.name}_{direction}_{m}": Queries(v, images) for m, v in judged.values.items()}
    return queries
