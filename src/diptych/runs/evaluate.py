"""The one pipeline of ``diptych evaluate``: open, load, leave out what cannot be read, prepare, measure, card, save."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.held_out import split_of
from diptych.data.problems import LeftOut, ToBeLeftOut
from diptych.devices import pick_device
from diptych.encoders.dual import is_dual_encoder
from diptych.encoders.known_names import CLASS_WORDS, is_open_clip
from diptych.encoders.pretrained import load_config
from diptych.entries import MODEL
from diptych.errors import SettingsError
from diptych.evaluation.cards import Card
from diptych.evaluation.compare import detection
from diptych.evaluation.evaluate import Retrieval
from diptych.evaluation.hubness import bank_of, inverted_softmax
from diptych.evaluation.judgements import check_corrections
from diptych.evaluation.prepared import Prepared, PreparedScores
from diptych.evaluation.report import Group, Report
from diptych.evaluation.retrieval import check_captions, scored_by
from diptych.evaluation.significance import unpaired
from diptych.evaluation.sts import Sts, TextEncoder
from diptych.model.named import text_teacher
from diptych.model.reranking import RerankedScores
from diptych.model.retriever import Retriever
from diptych.model.scores import MeanScores, PairScores, Scores
from diptych.progress import echo
from diptych.runs.measures import EvaluationRequest, Measure, measures_of
from diptych.runs.reading import database_of, places_of, readable_views, views_of
from diptych.storage import expanded
from diptych.training.checkpoint import noise_of, system_of
from diptych.training.prepare import prepare
from diptych.vectors.manifest import is_vectors

NOT_OF_VECTORS = (
    "data", "depth", "judgements", "rerank", "reranker", "score_matrix", "hubness", "equal_texts", "strict_images",
)  # fmt: skip
"""Options that need the data, a model, or all scores at once."""


def evaluate_runs(runs: Sequence[Path], **options: Any) -> Report:
    """The report of one model, of several as an ensemble (the mean of their scores), or of a folder of vectors.

    ``options`` are the fields of ``EvaluationRequest``. What the recipe of a run measures beside retrieval is measured
    too, in the order of its training, so that the first metric is the one that chose the best epoch.
    """
    request = EvaluationRequest(**options)
    of_vectors = any(is_vectors(run) for run in runs)
    report = _vectors(runs, request) if of_vectors else _models(runs, request)
    if request.output is not None:
        report.save(request.output)
    return report


def detection_of(report: Report, gain: float) -> list[str]:
    """How many queries show a gain over this result, where both are measured on queries of their own."""
    kept = [one for group in report.groups if (one := group.outcomes) is not None and len(one.folds) > 1]
    if not kept:
        raise SettingsError("--detect needs the ranks of two images, which retrieval has: leave it out.")
    return [
        *detection(unpaired(kept[0]), gain),
        "  this is an upper bound, for two results on different queries; on the same queries fewer are enough: "
        "diptych compare A B --detect.",
    ]


def _vectors(folders: Sequence[Path], request: EvaluationRequest) -> Report:
    """The report of a folder of vectors; options that mean nothing for vectors are refused."""
    from diptych.evaluation.shards import evaluate_vectors
    from diptych.vectors.on_ray import connected

    if len(folders) > 1:
        raise SettingsError("a folder of vectors is evaluated alone: give one, or runs for an ensemble.")
    for name in NOT_OF_VECTORS:
        if getattr(request, name):
            raise SettingsError(f"--{name} needs a model, {folders[0]} holds vectors: leave it out.")
    if request.compute_precision != "no":
        raise SettingsError("--compute_precision is for encoding, and these vectors exist: leave it out.")
    rules: dict[str, Any] = {
        "split": request.split, "protocol": request.protocol, "ties": request.ties, "bootstrap": request.bootstrap,
        "device": request.device,
    }  # fmt: skip
    if request.ray is None:
        return evaluate_vectors(folders[0], **rules, show_progress=request.show_progress)
    with connected(request.ray) as cluster:
        return evaluate_vectors(expanded(folders[0]).resolve(), **rules, run=cluster.run)


def _models(runs: Sequence[Path], request: EvaluationRequest) -> Report:
    measures, data = measures_of(runs, request)
    every = [*runs, *request.reranker]
    views, others = _open_data(every, data, measures, request)
    models = [_load_model(run, measures, request) for run in every]
    for run, model in zip(request.reranker, models[len(runs) :], strict=True):
        if model.scorer is None:
            raise SettingsError(
                f"{run} has no pair scorer to re-rank with: give a run of 'sgr' or 'saf', for instance."
            )
    if request.say is not None and isinstance(models[0], Retriever):
        request.say(models[0].device)
    views, left_out = _readable(models, views, request)
    others, more_left_out = _readable(models, others, request)
    prepared = _prepared(models, views, request)
    database = _prepared(models, others, request)
    groups: list[Group] = []
    with _score(models, prepared, len(runs), measures, request) as scored:
        if request.hubness and scored is not None:
            scored = _rescored(models, scored, every, data, request)
        for one in measures:
            ranked = database[0].captions if one.others else None
            ready: Any = replace(prepared[0], others=ranked, scored=scored) if prepared else None
            group = one.evaluator(models[0], ready, show_progress=request.show_progress)
            if one.captions:
                group = replace(group, card=group.card.leaving_out(left_out + more_left_out * one.others))
            groups.append(group)
    return Report(tuple(_told_apart(groups, measures, runs)))


# --- open, load, leave out, prepare


def _open_data(
    runs: Sequence[Path], data: Sequence[str], measures: Sequence[Measure], request: EvaluationRequest
) -> tuple[Sequence[Captions], Sequence[Captions]]:
    """What each run reads of the split, and the other images of the data where an evaluator ranks them."""
    if not any(one.captions for one in measures):
        return [], []
    problems, split = None if request.strict_images else ToBeLeftOut(), request.split or "val"
    if request.judgements:
        check_corrections(request.judgements, places_of(runs, data)[0])
    others: list[Captions] = []
    if any(one.others for one in measures):
        whole = open_captions(places_of(runs, data)[0], problems=problems)
        views = [split_of(whole, split)]
        others = [database_of(whole, views[0])]
    else:
        views = views_of(runs, data, split, problems)
    echo("".join(f"{note}\n" for note in views[0].notes), err=True, nl=False)
    return views, others


def _load_model(run: Path, measures: Sequence[Measure], request: EvaluationRequest) -> Any:
    """The model; for text matching alone, a text encoder will do."""
    if all(isinstance(one.evaluator, Sts) for one in measures) and not _is_model(run):
        teacher = text_teacher(str(run))
        teacher.encoder.to(pick_device(request.device))
        return TextEncoder(str(run), teacher)
    return Retriever.from_pretrained(run, request.device, request.compute_precision)


def _is_model(run: Path) -> bool:
    """Whether it is a model of two towers: a run, a model folder, or a pretrained dual encoder."""
    if (run / "run.json").is_file() or str(run) == CLASS_WORDS:
        return True
    config = run / "config.json"
    if config.is_file() and b'"retriever"' in MODEL.read(config):
        return True
    return is_dual_encoder(run) and (is_open_clip(run) or hasattr(load_config(str(run)), "vision_config"))


def _readable(
    models: Sequence[Retriever], views: Sequence[Captions], request: EvaluationRequest
) -> tuple[Sequence[Captions], int]:
    """What can be read of it, and the number of pictures that cannot."""
    if request.strict_images or not views:
        return views, 0
    left_out = LeftOut()
    views = readable_views(models[: len(views)], views, left_out, show_progress=request.show_progress)
    return views, len(left_out.reasons)


def _prepared(
    models: Sequence[Retriever], views: Sequence[Captions], request: EvaluationRequest
) -> list[Prepared]:
    return [
        prepare(model, view, device=str(model.device), show_progress=request.show_progress)
        for model, view in zip(models, views, strict=False)
    ]


# --- score


@contextmanager
def _score(
    models: Sequence[Retriever],
    prepared: Sequence[Prepared],
    quick: int,
    measures: Sequence[Measure],
    request: EvaluationRequest,
) -> Iterator[PreparedScores | None]:
    """The scores of the first ``quick`` models, re-ranked by the others, where retrieval is measured."""
    rules = [one.evaluator.rules for one in measures if isinstance(one.evaluator, Retrieval)]
    if not rules:
        yield None
        return
    check_captions(prepared[0].captions, rules)
    if request.reranker:
        yield _reranked(models, prepared, quick, request)
        return
    ready = [(one.captions.images, one.texts) for one in prepared]
    with scored_by(
        models, prepared[0].captions, ready, score_matrix=request.score_matrix, show_progress=request.show_progress
    ) as scored:  # fmt: skip
        yield scored


def _rescored(
    models: Sequence[Retriever],
    scored: PreparedScores,
    runs: Sequence[Path],
    data: Sequence[str],
    request: EvaluationRequest,
) -> PreparedScores:
    """The scores with hubs scored down, by the images and texts of another split."""
    assert request.hubness
    problems = None if request.strict_images else ToBeLeftOut()
    drawn = [bank_of(view) for view in views_of(runs, data, request.hubness, problems)]
    views, _ = _readable(models, drawn, request)
    bank = _mean_scores(models, _prepared(models, views, request), request.show_progress)
    return inverted_softmax(scored, bank, request.hubness, beta=request.hubness_beta)


def _mean_scores(models: Sequence[Retriever], prepared: Sequence[Prepared], show_progress: bool) -> Scores:
    return MeanScores.of(
        [
            model.scores(ready.captions.images, ready.texts, show_progress=show_progress)
            for model, ready in zip(models, prepared, strict=True)
        ]
    )


def _reranked(
    models: Sequence[Retriever], prepared: Sequence[Prepared], quick: int, request: EvaluationRequest
) -> PreparedScores:
    """The scores of the first ``quick`` models, the best of each query judged by the pair scorers of the others."""
    began, show = time.perf_counter(), request.show_progress
    proposing = _mean_scores(models[:quick], prepared[:quick], show)
    judged = [
        RerankedScores(proposing, pair_scores(model, ready, show), request.rerank, show_progress=show)
        for model, ready in zip(models[quick:], prepared[quick:], strict=True)
    ]
    names = [" + ".join(one.fingerprint() for one in side) for side in (models[:quick], models[quick:])]
    scores = MeanScores.of(judged)
    name = f"{names[0]}, best {request.rerank} by {names[1]}"
    return PreparedScores(scores, name, seconds=time.perf_counter() - began)


def pair_scores(model: Retriever, ready: Prepared, show_progress: bool = True) -> PairScores:
    """The scores of a model's pair scorer."""
    assert model.scorer is not None
    images = model.encode_image_features(ready.captions.images, show_progress=show_progress)
    texts = model.encode_text_features(ready.texts, show_progress=show_progress)
    return PairScores(model.scorer, images, texts, model.device, model.precision)


# --- card


def _told_apart(
    groups: Sequence[Group], measures: Sequence[Measure], runs: Sequence[Path]
) -> Iterator[Group]:
    """The groups with the folders of the runs and their noise on the cards; two of one name name their protocol."""
    names = [group.name for group in groups]
    run, noise = " + ".join(map(str, runs)), tuple(one for one in map(noise_of, runs) if one and one.wrong)
    system = system_of(runs[0]) if len(runs) == 1 else ""
    for one, group in zip(measures, groups, strict=True):
        card = replace(group.card, noise=noise)
        card = replace(card, run=run, system=system) if isinstance(card, Card) else card
        group = replace(group, card=card)
        yield group.under(one.protocol) if names.count(group.name) > 1 else group
