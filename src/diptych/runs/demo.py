"""The demonstration: train VSE∞ on emoji pictures, evaluate, index, search, and write one HTML report."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.errors import Interrupted
from diptych.evaluation.evaluate import evaluate
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Report
from diptych.index.engines.opening import open_index
from diptych.index.ingest.build import index_collection
from diptych.index.query.search import Searcher
from diptych.model.adapter import TorchModel
from diptych.model.retriever import Retriever
from diptych.recipes import RECIPES
from diptych.reports.grids import Shown, drawn
from diptych.reports.page import QueryCard, page
from diptych.runs.runtime_export import add_runtime
from diptych.runs.train import resumed_settings, run_recipe
from diptych.runtime.folder import find_runtime
from diptych.storage import write_text
from diptych.training.checkpoint import has_state
from diptych.training.log import read_log
from diptych.training.prepare import prepare

QUERIES = ("a cat laughing with tears", "something to drink", "rainy weather", "playing music")
SEARCHES = ("an animal", "something to eat", "a vehicle", "sports")
SHOWN, ANSWERS = 8, 6  # queries of each direction in the report, and answers of each
SETTINGS: dict[str, Any] = {
    "text_encoder": "minilm", "train_text": False, "dim": 512, "epochs": 14, "decay_epoch": 10, "image_size": 176,
}  # fmt: skip
"""Frozen encoders, whose outputs are cached: a few minutes on two cores."""


def run_demo(folder: Path, data: str = "emoji", **changes: Any) -> None:
    """Everything once; a second run reuses the trained model and the index.

    ``data`` has pictures and a test split; ``changes`` go over ``SETTINGS``.
    """
    began = time.perf_counter()
    recipe, run, index = RECIPES["vse-infinity"], folder / "run", folder / "emoji.index"
    resume = has_state(run)
    settings = resumed_settings(recipe, run, {}) if resume else recipe.settings(**{**SETTINGS, **changes})
    captions = open_captions(data)
    print(
        f"{len(captions.images)} pictures, {len(captions.texts)} texts, split by concept; VSE∞ in {run}",
        flush=True,
    )
    try:
        run_recipe(recipe, settings, data, run, resume=resume)
    except Interrupted as note:
        raise Interrupted(f"stopped and saved in {run}: run the same command again to go on.") from note
    if find_runtime(run) is None:
        print(add_runtime(run), flush=True)
    retriever = Retriever.from_pretrained(run)

    held_out = captions.split("test")
    cached = prepare(retriever, held_out)
    report = evaluate(retriever, cached.captions, text_store=cached.texts)
    report.save(folder / "report.json")
    print(report.render())

    served = TorchModel(retriever)
    index_collection(served, captions, index, model_name=str(run.resolve()), show_progress=True)
    with open_index(index) as opened:
        searcher = Searcher(opened, served)
        for query in QUERIES:
            hits = searcher.search(query, k=5, kind="image")
            print(f'"{query}": ' + ", ".join(hit.item.text.splitlines()[0] for hit in hits))
    write_text(folder / "report.html", render(retriever, held_out, cached, report, run, index))
    print(f"report: {folder / 'report.html'}   ({time.perf_counter() - began:.0f} s)")
    print(f'search: diptych search {index} "birthday party"   |   in a browser: diptych serve {index}')


def render(
    retriever: Retriever, held_out: Captions, cached: Prepared, report: Report, run: Path, index: Path
) -> str:
    """The HTML report of a demonstration run."""
    lines = read_log(run / "log.jsonl")
    loss = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    rsum = [(line["epoch"] + 1, line["validation_rsum"]) for line in lines if "validation_rsum" in line]
    images, texts = retriever.encode_image(cached.captions.images), retriever.encode_text(cached.texts)
    scores, shown = retriever.similarity(images, texts), Shown(held_out)
    return page(
        title="Diptych: VSE∞ on emoji",
        introduction=_introduction(report, len(held_out.images), len(held_out.texts)),
        metrics=[
            (name, f"{value:.1f}", report.interval_text(name)) for name, value in report.metrics.items()
        ],
        card=report.card_fields(),
        curves={"training loss over steps": loss, "validation RSUM over epochs": rsum},
        grids={
            "Searches in words": _searches(retriever, shown, images),
            "Text → image": _text_queries(shown, scores),
            "Image → text": _image_queries(shown, scores),
        },
        commands=f'diptych search {index} "birthday party"\ndiptych search {index} ./picture.png\n'
        f"diptych evaluate {run} --data {held_out.name} --split test",
    )


def _introduction(report: Report, images: int, texts: int) -> str:
    """What the numbers say, in sentences."""
    found = {at: report.metrics[f"text_to_image_recall@{at}"] for at in (1, 10)}
    named = {at: report.metrics[f"image_to_text_recall@{at}"] for at in (1, 10)}
    chance = min(100.0, 1000 / images)
    return (
        "This model was trained on OpenMoji pictures with their names and aliases. Everything below is about concepts "
        f"that it never saw while training: {images} pictures and {texts} texts.\n\n"
        f"Given a text, the right picture is the first answer for {found[1]:.0f} % of the texts and among the first "
        f"ten for {found[10]:.0f} % (by chance: {chance:.1f} %). Given a picture, a right text comes first for "
        f"{named[1]:.0f} % and is among the first ten for {named[10]:.0f} %.\n\n"
        "The first section shows searches as a user would type them; no right answers are known for them. The "
        "queries of the next two were drawn at random, so that they show hits and misses as they come."
    )


def _searches(retriever: Retriever, shown: Shown, images: torch.Tensor) -> list[QueryCard]:
    """What some words find among the pictures."""
    rows = retriever.similarity(images, retriever.encode_text(list(SEARCHES)))
    return [
        QueryCard(text, [replace(one, right=False) for one in shown.images_for(0, rows[:, n], ANSWERS)])
        for n, text in enumerate(SEARCHES)
    ]


def _text_queries(shown: Shown, scores: torch.Tensor) -> list[QueryCard]:
    texts = drawn(len(shown.data.texts))[:SHOWN].tolist()
    return [QueryCard(shown.data.texts[n], shown.images_for(n, scores[:, n], ANSWERS)) for n in texts]


def _image_queries(shown: Shown, scores: torch.Tensor) -> list[QueryCard]:
    images = drawn(len(shown.data.images))[:SHOWN].tolist()
    return [
        QueryCard(shown.name(n), shown.texts_for(n, scores[n], ANSWERS), shown.picture(n)) for n in images
    ]
