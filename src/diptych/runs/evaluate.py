"""Evaluate runs on a split under a protocol: what ``diptych evaluate`` does."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.data.captions import Captions
from diptych.data.problems import Problems
from diptych.data.readable import LeftOut, ToBeLeftOut
from diptych.errors import DataError, SettingsError
from diptych.evaluation.cards import Card
from diptych.evaluation.evaluator import Evaluator, Retrieval
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.protocols import EvaluationProtocol
from diptych.evaluation.report import Group, Report
from diptych.evaluation.retrieval import evaluate_ensemble, evaluate_scores
from diptych.model.reranking import RerankedScores
from diptych.model.retriever import Retriever
from diptych.model.scores import MeanScores, Scores
from diptych.recipes import find_recipe
from diptych.registries import PROTOCOLS
from diptych.runs import downstream, uni_modal
from diptych.runs.reading import open_split, places_of, readable_views
from diptych.settings import from_saved
from diptych.training.checkpoint import read_run
from diptych.training.prepare import prepare


def evaluate_runs(
    runs: Sequence[Path],
    *,
    data: Sequence[str] = (),
    split: str = "val",
    protocol: str = "plain",
    judgements: Sequence[str] = (),
    ties: str = "index",
    bootstrap: int = 1000,
    depth: int | None = None,
    rerank: int = 0,
    reranker: Sequence[Path] = (),
    score_matrix: Path | None = None,
    output: Path | None = None,
    device: str = "auto",
    compute_precision: str = "no",
    strict_images: bool = False,
    equal_texts: bool = False,
    say: Callable[[torch.device], None] | None = None,
    show_progress: bool = True,
) -> Report:
    """The report of one model, or of several as an ensemble: the mean of their score matrices.

    With ``rerank`` and ``reranker``, the pair scorers of other runs judge the best of each query. ``score_matrix``
    is a file that the scores are computed into first (see ``stored_scores``). What the recipe of a run measures
    beside retrieval comes first. ``say`` is told the device. Protocols of one modality, and of all four directions,
    are those of ``runs.uni_modal``. Pictures that cannot be read are left out, told and counted on the card, or with
    ``strict_images`` an error. ``equal_texts``: see ``evaluation.evaluate.evaluate``.
    """
    if bool(rerank) != bool(reranker):
        raise SettingsError("--rerank N and --reranker RUN go together: give both, or neither.")
    if rerank and score_matrix is not None:
        raise SettingsError("--score_matrix holds all pairs, and --rerank judges a few: give one of them.")
    if depth is not None and protocol != "hashing":
        raise SettingsError(f"--depth is for the protocol hashing, not {protocol}: leave it out.")
    special = not isinstance(PROTOCOLS.find(protocol), EvaluationProtocol)
    if special and (rerank or score_matrix is not None or judgements or equal_texts):
        raise SettingsError(
            f"the protocol {protocol} has a measure of its own: leave out --rerank, --score_matrix, --judgements "
            "and --equal_texts."
        )
    if protocol in uni_modal.PROTOCOLS:
        if ties != "index":
            raise SettingsError(f"the protocol {protocol} ranks ties by index: leave out --ties.")
        report = uni_modal.evaluate_uni_modal(
            runs,
            data,
            protocol,
            lambda paths: views_of(runs, paths, split, None if strict_images else ToBeLeftOut())[0],
            bootstrap=bootstrap,
            device=device,
            compute_precision=compute_precision,
            strict_images=strict_images,
            show_progress=show_progress,
        )
        return _saved(report, output, runs)
    if special:
        report = downstream.evaluate_downstream(
            runs,
            protocol,
            data=data,
            split=split,
            ties=ties,
            bootstrap=bootstrap,
            depth=depth,
            device=device,
            compute_precision=compute_precision,
            strict_images=strict_images,
            say=say,
            show_progress=show_progress,
        )
        return _saved(report, output, runs)
    every = [*runs, *reranker]
    left_out = LeftOut()
    views = views_of(every, data, split, None if strict_images else ToBeLeftOut())
    print("".join(f"{note}\n" for note in views[0].notes), end="", file=sys.stderr, flush=True)
    models = [Retriever.from_pretrained(run, device, compute_precision) for run in every]
    for run, model in zip(reranker, models[len(runs) :], strict=True):
        if model.scorer is None:
            raise SettingsError(
                f"{run} has no pair scorer to re-rank with: give a run of 'sgr' or 'saf', for instance."
            )
    if say is not None:
        say(models[0].device)
    if not strict_images:
        views = readable_views(models, views, left_out, show_progress=show_progress)
    prepared = [
        prepare(model, view, device=str(model.device), show_progress=show_progress)
        for model, view in zip(models, views, strict=True)
    ]
    rules: dict[str, Any] = {
        "protocol": protocol, "ties": ties, "judgements": judgements, "bootstrap": bootstrap,
        "equal_texts": equal_texts,
    }  # fmt: skip
    if reranker:
        scores = _reranked(models, prepared, len(runs), rerank, show_progress)
        names = [
            " + ".join(model.fingerprint() for model in some)
            for some in (models[: len(runs)], models[len(runs) :])
        ]
        report = evaluate_scores(scores, views[0], model=f"{names[0]}, best {rerank} by {names[1]}", **rules)
    else:
        report = evaluate_ensemble(
            models,
            views[0],
            image_stores=[ready.captions.images for ready in prepared],
            text_stores=[ready.texts for ready in prepared],
            score_matrix=score_matrix,
            show_progress=show_progress,
            **rules,
        )
    own = own_evaluators(runs[0]) if len(every) == 1 else ()
    groups = [
        _under(evaluator, protocol=protocol, bootstrap=bootstrap)(
            models[0], prepared[0], show_progress=show_progress
        )
        for evaluator in own
    ]
    groups += [_counted(group, len(left_out.reasons)) for group in report.groups]
    return _saved(Report(tuple(groups)), output, runs)


def _counted(group: Group, left_out: int) -> Group:
    """A group whose card says how many pictures were left out."""
    if not left_out or not isinstance(group.card, Card):
        return group
    return dataclasses.replace(group, card=dataclasses.replace(group.card, left_out=left_out))


def _saved(report: Report, output: Path | None, runs: Sequence[Path]) -> Report:
    """The report with the folders of the runs on its cards, written where the user wants it."""
    name = " + ".join(map(str, runs))
    groups = (
        dataclasses.replace(group, card=dataclasses.replace(group.card, run=name))
        if isinstance(group.card, Card)
        else group
        for group in report.groups
    )
    report = Report(tuple(groups))
    if output is not None:
        report.save(output)
    return report


def _reranked(
    models: Sequence[Retriever], prepared: Sequence[Prepared], quick: int, k: int, show_progress: bool
) -> Scores:
    """The scores of the first ``quick`` models, the best k of each query judged by the pair scorers of the others."""
    first: list[Scores] = [
        model.scores(ready.captions.images, ready.texts, show_progress=show_progress)
        for model, ready in zip(models[:quick], prepared, strict=False)
    ]
    proposing = first[0] if quick == 1 else MeanScores(first)
    judged: list[Scores] = []
    for model, ready in zip(models[quick:], prepared[quick:], strict=True):
        assert model.scorer is not None
        images = model.encode_image_features(ready.captions.images, show_progress=show_progress)
        texts = model.encode_text_features(ready.texts, show_progress=show_progress)
        judged.append(
            RerankedScores(
                proposing, model.scorer, images, texts, k,
                device=model.device, precision=model.precision, show_progress=show_progress,
            )
        )  # fmt: skip
    return judged[0] if len(judged) == 1 else MeanScores(judged)


def own_evaluators(run: Path) -> Sequence[Evaluator]:
    """What the recipe of a run measures beside retrieval."""
    if not (run / "run.json").is_file():
        return ()
    found = read_run(run)
    recipe = find_recipe(found["recipe"])
    if recipe is None or recipe.evaluators is None:
        return ()
    evaluators = recipe.evaluators(from_saved(recipe.settings, found["settings"]))
    return [evaluator for evaluator in evaluators if not isinstance(evaluator, Retrieval)]


def _under(evaluator: Evaluator, **rules: Any) -> Evaluator:
    """The evaluator with the rules that the user gave, those of them it has."""
    known: dict[str, Any] = getattr(evaluator, "__dataclass_fields__", {})
    chosen = {name: value for name, value in rules.items() if name in known}
    return dataclasses.replace(evaluator, **chosen) if chosen else evaluator  # type: ignore[type-var]


def views_of(
    runs: Sequence[Path], data: Sequence[str], split: str, problems: Problems | None = None
) -> list[Captions]:
    """What each run reads of one split: the same texts in the same order.

    ``data`` is one data set for all, one per run (region and grid features of the same images), or none: what the
    first run was trained on.
    """
    data = places_of(runs, data)
    if len(data) not in (1, len(runs)):
        raise SettingsError(f"{len(data)} data sets for {len(runs)} models: give one for all, or one each.")
    views = [open_split(path, split, problems) for path in data]
    for other in views[1:]:
        if list(other.texts) != list(views[0].texts) or list(other.image_of) != list(views[0].image_of):
            raise DataError(f"{other.name} and {views[0].name} do not hold the same texts in the same order.")
    return views if len(views) == len(runs) else views * len(runs)
