"""Evaluate one run under a protocol with a measure of its own: videos, hashing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.labels.hash_labels import COLUMN
from diptych.data.readable import LeftOut, ToBeLeftOut
from diptych.data.readers.hashing_lists import RANKED
from diptych.errors import DataError, SettingsError
from diptych.evaluation.evaluator import Evaluator, measure
from diptych.evaluation.hash_retrieval import HashRetrieval
from diptych.evaluation.hashing import TOP
from diptych.evaluation.report import Report
from diptych.model.retriever import Retriever
from diptych.names import called
from diptych.registries import PROTOCOLS
from diptych.runs.reading import open_split, places_of, readable_views, split_of
from diptych.training.checkpoint import read_run
from diptych.training.prepare import prepare


def evaluate_downstream(
    runs: Sequence[Path],
    protocol: str,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    ties: str = "index",
    bootstrap: int = 1000,
    depth: int | None = None,
    device: str = "auto",
    compute_precision: str = "no",
    strict_images: bool = False,
    say: Callable[[torch.device], None] | None = None,
    show_progress: bool = True,
) -> Report:
    """The report of one run under a protocol that is an evaluator: that of videos, of hashing, or a plugin's."""
    if len(runs) != 1:
        raise SettingsError(
            f"the protocol {protocol} takes one model, not {len(runs)}: evaluate them one by one."
        )
    (run,) = runs
    judge = evaluator_named(protocol, ties=ties, bootstrap=bootstrap)
    place, others = places_of(runs, data)[0], None
    problems = None if strict_images else ToBeLeftOut()
    if protocol == "hashing":
        whole = open_captions(place, problems=problems)
        asked = split_of(whole, split)
        others = database_of(whole, asked)
    else:
        asked = open_split(place, split, problems)
    model = Retriever.from_pretrained(run, device, compute_precision)
    if say is not None:
        say(model.device)
    if not strict_images:
        asked = readable_views([model], [asked], LeftOut(), show_progress=show_progress)[0]
        if others is not None:
            others = readable_views([model], [others], LeftOut(), show_progress=show_progress)[0]
    ready = prepare(model, asked, device=str(model.device), show_progress=show_progress)
    if others is None:
        return measure([judge], model, ready, show_progress=show_progress)
    settings = read_run(run)["settings"] if (run / "run.json").is_file() else {}
    database = prepare(model, others, device=str(model.device), show_progress=show_progress).captions
    column = str(settings.get("label_column", COLUMN))
    hashing = HashRetrieval(column=column, top=TOP if depth is None else depth, bootstrap=bootstrap)
    return Report((hashing.ranked(model, ready.captions, database, show_progress=show_progress),))


def evaluator_named(protocol: str, **rules: Any) -> Evaluator:
    """The evaluator that a protocol is; a class gets the rules that it has arguments for."""
    found: Any = PROTOCOLS.find(protocol)
    made = called(found, f"the protocol {protocol}", **rules) if isinstance(found, type) else found
    if not callable(made):
        raise SettingsError(
            f"the protocol '{protocol}' is a {type(made).__name__}: give an EvaluationProtocol or an evaluator."
        )
    return cast(Evaluator, made)


def database_of(whole: Captions, queries: Captions) -> Captions:
    """The images that queries are ranked against: those that the data marks, in other data all but the queries."""
    asked = set(queries.image_ids)
    marked = whole.labels.get(RANKED, [True] * len(whole.images))
    rows = [
        n
        for n, (id, ranked) in enumerate(zip(whole.image_ids, marked, strict=True))
        if ranked and id not in asked
    ]
    if not rows:
        raise DataError(
            f"{whole.name} has no images beside the {len(asked)} queries: hashing needs a database to rank."
        )
    return whole.subset(rows)
