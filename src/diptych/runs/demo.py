"""The demonstration: train two models on emoji pictures, evaluate, index, search, and write one HTML report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.errors import IndexFault
from diptych.evaluation.cards import direction_words
from diptych.evaluation.evaluate import evaluate
from diptych.evaluation.metrics import DIRECTIONS, KS
from diptych.evaluation.report import Report, aligned_rows
from diptych.index.engines.opening import open_index
from diptych.index.ingest.build import index_collection
from diptych.index.models import open_model
from diptych.index.query.search import Searcher
from diptych.model.retriever import Retriever
from diptych.model.runtime_export import add_runtime
from diptych.progress import counted, echo
from diptych.recipes import RECIPES
from diptych.reports.grids import Showcase, random_order
from diptych.reports.page import Answer, QueryCard, Section, page
from diptych.runs.train import resumed_settings, start_or_resume
from diptych.runtime.folder import find_runtime
from diptych.storage import write_text
from diptych.training.checkpoint import has_state
from diptych.training.log import read_log
from diptych.training.prepare import prepare

SEARCHES = (
    "something to drink",
    "rainy weather",
    "a musical instrument",
    "fruit",
    "a laughing face",
    "an insect",
)
MISSES, ANSWERS = 5, 6  # queries of each direction that were missed, and answers to each query
SIZE = 176  # pixels of the square pictures, for both models: the frozen network reads each picture once
PHOTOS: dict[str, Any] = {"patience": 3, "image_size": SIZE}
VSE_INFINITY: dict[str, Any] = {
    "text_encoder": "minilm", "train_text": False, "dim": 512, "epochs": 8, "decay_epoch": 6, "image_size": SIZE,
}  # fmt: skip
"""Frozen encoders, whose outputs are cached and shared."""


@dataclass(frozen=True)
class DemoModel:
    """A trained model of the demonstration, its scores (images, texts) of the held-out pairs, and its report."""

    name: str
    run: Path
    report: Report
    scores: torch.Tensor


def run_demo(folder: Path, data: str = "emoji", **changes: Any) -> None:
    """Everything once; a second run reuses the trained models and the index.

    ``data`` has pictures and a test split; ``changes`` go over the settings of both models.
    """
    began = time.perf_counter()
    captions = open_captions(data)
    held_out = captions.split("test")
    echo(
        f"{len(captions.images):,} pictures with {len(captions.texts):,} texts; {len(held_out.images)} pictures of "
        "other concepts are held out"
    )
    _step(1, "photos, the recipe for small collections: train and evaluate")
    best = _train_model("photos", folder / "photos", data, held_out, {**PHOTOS, **changes})
    _step(2, "VSE∞, the method of a paper, on the same features: train and evaluate")
    paper = _train_model("vse-infinity", folder / "run", data, held_out, {**VSE_INFINITY, **changes})
    models = [best, paper]
    for model in models:
        model.report.save(folder / f"report-{model.name}.json")
    echo()
    for line in aligned_rows(_numbers(models)):
        echo(line)
    _step(3, "index all pictures with the better model, and search them")
    if find_runtime(best.run) is None:  # its encoders for searches without torch
        echo(add_runtime(best.run))
    index = folder / "emoji.index"
    searches = _searches(best, captions, index)
    write_text(folder / "report.html", render(models, captions, held_out, searches, index))
    echo(f"report: {folder / 'report.html'}   ({time.perf_counter() - began:.0f} s)")
    echo(f'search: diptych search {index} "birthday party"   |   in a browser: diptych serve {index}')


def _step(number: int, what: str) -> None:
    echo(f"\n[{number}/3] {what}")


def _train_model(name: str, run: Path, data: str, held_out: Captions, wanted: dict[str, Any]) -> DemoModel:
    """A model by its recipe's name: trained, or taken up where an earlier demonstration stopped."""
    recipe = RECIPES[name]
    known = {field.name for field in dataclasses.fields(recipe.settings)}
    fresh = recipe.settings(**{key: value for key, value in wanted.items() if key in known})
    settings = resumed_settings(recipe, run, {}) if has_state(run) else fresh
    start_or_resume(recipe, settings, data, run)
    retriever = Retriever.from_pretrained(run)
    cached = prepare(retriever, held_out)
    report = evaluate(retriever, cached.captions, text_store=cached.texts)
    images, texts = retriever.encode_image(cached.captions.images), retriever.encode_text(cached.texts)
    return DemoModel(name, run, report, retriever.similarity(images, texts))


def _searches(model: DemoModel, captions: Captions, place: Path) -> list[QueryCard]:
    """What words find in the index of the whole collection, which is made or brought up to date first."""
    name, showcase = str(model.run.resolve()), Showcase(captions)
    served = open_model(name)
    try:
        index_collection(served, captions, place, model_name=name, show_progress=True)
    except IndexFault as fault:
        raise IndexFault(f"{fault} For a new demo, delete {place.parent}: 'make clean' does.") from fault
    rows = {str(id): row for row, id in enumerate(captions.image_ids)}
    cards = []
    with open_index(place) as opened:
        searcher = Searcher(opened, served)
        for query in SEARCHES:
            hits = searcher.search(query, k=ANSWERS, kind="image", chance=None)
            found = [(rows[hit.item.id], hit.score) for hit in hits]
            answers = [
                Answer(showcase.name(row), score, False, showcase.picture(row)) for row, score in found
            ]
            echo(f'"{query}": ' + ", ".join(answer.text for answer in answers))
            cards.append(QueryCard(query, answers))
    return cards


def _numbers(models: Sequence[DemoModel]) -> list[Sequence[str]]:
    """A table, a model in each column: recall in both directions, and their sum with its interval."""
    rows: list[Sequence[str]] = [("", *(model.name for model in models))]
    for way in DIRECTIONS:
        for at in KS:
            values = (model.report.metrics[f"{way}_recall@{at}"] for model in models)
            rows.append((f"{direction_words(way)} R@{at}", *(f"{value:.1f}" for value in values)))
    rsum = [f"{model.report.metrics['rsum']:.1f} ({model.report.interval_text('rsum')})" for model in models]
    return [*rows, ("RSUM", *rsum)]


def render(
    models: Sequence[DemoModel],
    captions: Captions,
    held_out: Captions,
    searches: Sequence[QueryCard],
    index: Path,
) -> str:
    """The HTML report: searches, numbers, misses; then curves, metrics and protocol of each model."""
    best, showcase = models[0], Showcase(held_out)
    curves = {}
    for model in models:
        lines = read_log(model.run / "log.jsonl")
        points = [(line["epoch"] + 1, line["validation_rsum"]) for line in lines if "validation_rsum" in line]
        curves[f"{model.name}: validation RSUM over epochs"] = points
    heads, *rows = _numbers(models)
    return page(
        "Diptych: search in emoji",
        f"A model learned from {len(captions.split('train').images):,} OpenMoji pictures with their names, without a "
        f"GPU. Here it searches all {len(captions.images):,} of them; further down are its numbers and its mistakes on "
        "pictures of concepts that it never saw.",
        [
            Section("Searches in words", "These show what the model is good at; its mistakes follow below.", searches),
            Section("Held-out numbers", _numbers_text(models, held_out), table=(heads, rows)),
            _misses(showcase, "text_to_image", best.scores.T),
            _misses(showcase, "image_to_text", best.scores),
        ],
        commands=f'diptych serve {index}\ndiptych search {index} "birthday party"\n'
        f"diptych search {index} ./picture.png\ndiptych evaluate {best.run} --data {held_out.name} --split test",
        curves=curves,
        reports={model.name: _protocol(model.report) for model in models},
    )  # fmt: skip


def _protocol(report: Report) -> tuple[list[tuple[str, str, str]], dict[str, str]]:
    """Every metric with its value and its interval, and the card."""
    metrics = report.metrics.items()
    return [
        (name, f"{value:.1f}", report.interval_text(name)) for name, value in metrics
    ], report.card_fields()


def _numbers_text(models: Sequence[DemoModel], held_out: Captions) -> str:
    """What the table of numbers says, in sentences."""
    found, pictures = models[0].report.metrics, len(held_out.images)
    first, ten = found["text_to_image_recall@1"], found["text_to_image_recall@10"]
    return (
        "photos, the model of the searches, is ridge regression on frozen features followed by a few epochs; "
        "vse-infinity is VSE∞ on the same features. "
        f"Both were measured on {pictures} pictures and {len(held_out.texts)} texts of concepts that neither "
        f"saw while training. Given a text, {models[0].name} puts the right picture first for {first:.0f} % of the "
        f"texts, and among the first ten for {ten:.0f} % (by chance: {min(100.0, 1000 / pictures):.1f} %). R@10 is "
        "that share in percent; RSUM is the sum of R@1, R@5 and R@10 of both directions, with its 95 % interval."
    )


def _misses(showcase: Showcase, direction: str, scores: torch.Tensor) -> Section:
    """Queries without a right picture or text among the first answers, in a random order; a text with its picture.

    ``scores`` has a row for each query.
    """
    data, of_text, missed = showcase.data, direction == "text_to_image", []
    for row in random_order(len(scores)).tolist():
        answers = showcase.answers(direction, row, scores[row], ANSWERS)
        if not any(answer.right for answer in answers):
            name = data.texts[row] if of_text else showcase.name(row)
            picture = showcase.picture(int(data.image_of[row]) if of_text else row)
            missed.append(QueryCard(name, answers, picture))
    query, answer = ("text", "picture") if of_text else ("picture", "text")
    sentence = f"For every held-out {query}, a right {answer} is among the first {ANSWERS}."
    if missed:
        sentence = (
            f"For {counted(len(missed), f'held-out {query}')}, no right {answer} is among the first {ANSWERS} answers. "
            f"Here are some, drawn at random; the right {answer} stands with the query."
        )
    return Section(f"Misses: {direction_words(direction)}", sentence, missed[:MISSES])
