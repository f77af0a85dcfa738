"""Speed: how long a query takes with a dual encoder, a pair scorer and a re-ranked dual encoder, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from diptych.data.captions import Captions
from diptych.devices import autocast
from diptych.errors import SettingsError
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import table_text
from diptych.evaluation.retrieval import evaluate_scores
from diptych.model.reranking import RerankedScores
from diptych.model.retriever import Retriever
from diptych.model.scores import EmbeddingScores, MeanScores, PairScores, Scores, evaluating
from diptych.progress import track
from diptych.reports.charts import MARKS, Line, check_output, picture_of_lines, save_picture
from diptych.runs.evaluate import pair_scores
from diptych.runs.show import open_runs
from diptych.training.prepare import prepare
from diptych.types import Features

GALLERIES = (10, 100, 1_000, 10_000, 100_000)
TOP = 10  # answers of a query
CHUNK = 512  # images a pair scorer sees at a time
LEAST = 3  # queries timed, the fastest counts
INCHES = (6.4, 4.4)  # of a picture
Query = Callable[[str, int], None]  # a text and the number of images in the gallery


@dataclass(frozen=True)
class Contestant:
    """One way to search: its milliseconds by gallery, its RSUM, and how many thousand pairs it scores in a second."""

    name: str
    times: dict[int, float]
    measured: int  # galleries; the times of the others are extrapolated
    rsum: float
    thousand_pairs: float


def show_speed(
    runs: Sequence[Path],
    output: Path,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    rerank: int = 50,
    count: int = 1000,
    most: int = 100_000,
    patience: float = 20.0,
    seed: int = 0,
    device: str = "auto",
    compute_precision: str = "no",
) -> str:
    """Draw two pictures beside ``output``, and return the numbers.

    Runs with a pair scorer are pair scorers; each other run is a dual encoder, and re-ranked by all pair scorers
    together where there are any. Galleries up to ``most`` repeat the images of the split. Times are those of one text
    after another, encoding included; a gallery that would take longer than ``patience`` seconds per query is
    extrapolated. RSUM is over the first ``count`` images drawn with ``seed``, with all their texts.
    """
    check_output(output)
    names, models, views = open_runs(
        runs, data, split, device, compute_precision,
        cut=lambda view: _draw_sample(view, count, seed),
    )  # fmt: skip
    ready = [
        prepare(model, view, device=str(model.device)) for model, view in zip(models, views, strict=True)
    ]
    sizes = [n for n in GALLERIES if n <= most]
    if not sizes:
        raise SettingsError(f"--most {most} leaves no gallery to time: give {GALLERIES[0]} or more.")
    contestants = [
        _timed(name, query, scores, views[0], sizes, patience)
        for name, query, scores in _ways(names, models, ready, rerank)
    ]
    places = [output.with_stem(f"{output.stem}-{end}") for end in ("queries", "recall")]
    _draw(contestants, places)
    return _table(contestants, views[0], places)


def _ways(
    names: Sequence[str],
    models: Sequence[Retriever],
    ready: Sequence[Prepared],
    rerank: int,
) -> Iterator[tuple[str, Query, Scores]]:
    """The name of each way to search, a query in it, and its scores of the whole split."""
    scorers = [n for n, model in enumerate(models) if model.scorer is not None]
    judges = [pair_scores(models[n], ready[n]) for n in scorers]
    for n in (n for n in range(len(models)) if n not in scorers):
        quick = models[n].scores(ready[n].captions.images, ready[n].texts, show_progress=True)
        assert isinstance(quick, EmbeddingScores)
        look = _vector_query(models[n], quick)
        yield names[n], look, quick
        if judges:
            name = f"{names[n]}, top {rerank} by {' + '.join(names[m] for m in scorers)}"
            judged = [RerankedScores(quick, one, rerank) for one in judges]

            def query(text: str, images: int, look: Query = look) -> None:
                look(text, images)
                for m, judge in zip(scorers, judges, strict=True):
                    _pair_query(models[m], judge)(text, min(rerank, images))

            yield name, query, MeanScores.of(judged)
    for m, judge in zip(scorers, judges, strict=True):
        yield names[m], _pair_query(models[m], judge), judge


def _vector_query(model: Retriever, scores: EmbeddingScores) -> Query:
    """Encode a text, and find its best images in a gallery, which repeats those of the split: one product."""

    @lru_cache(maxsize=1)
    def gallery(images: int) -> torch.Tensor:
        return scores.image.repeat(-(-images // len(scores.image)), 1)[:images]

    def query(text: str, images: int) -> None:
        vector = model.encode_text([text])[0].to(scores.image.device)
        (gallery(images) @ vector).topk(min(TOP, images))

    return query


def _pair_query(model: Retriever, scores: PairScores) -> Query:
    """Encode a text, and look at every image of a gallery beside it, a chunk at a time."""
    some = scores.images.take(torch.arange(min(CHUNK, scores.shape[0]))).to(scores.device)

    def query(text: str, images: int) -> None:
        words = model.encode_text_features([text]).take(torch.tensor([0])).to(scores.device)
        parts, size = [], len(some.mask)
        with torch.inference_mode(), evaluating(scores.scorer), autocast(scores.device, scores.precision):
            for start in range(0, images, size):
                seen = slice(min(size, images - start))
                parts.append(scores.scorer(Features(some.values[seen], some.mask[seen]), words)[:, 0])
        torch.cat(parts).topk(min(TOP, images))

    return query


def _timed(
    name: str,
    query: Query,
    scores: Scores,
    captions: Captions,
    sizes: Sequence[int],
    patience: float,
) -> Contestant:
    """Times of queries by gallery, and what the whole split says."""
    times: dict[int, float] = {}
    texts, measured, last = captions.texts[: LEAST + 1], 0, 0
    for images in track(sizes, f"time {name}", len(sizes)):
        expected = times[last] * images / last if last else 0.0
        if expected / 1000 > patience:
            times[images] = expected
        else:
            query(texts[-1], images)  # the first call loads kernels and caches
            times[images] = 1000 * min(_seconds(query, text, images) for text in texts[:LEAST])
            measured += 1
        last = images
    report = evaluate_scores(scores, captions, bootstrap=0)
    return Contestant(
        name, times, measured, report.metrics["rsum"], report.speed["thousand_pairs_per_second"]
    )


def _seconds(query: Query, text: str, images: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    query(text, images)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _draw_sample(captions: Captions, count: int, seed: int) -> Captions:
    """At most ``count`` images of a split with their texts."""
    if count >= len(captions.images):
        return captions
    rows = np.sort(np.random.default_rng(seed).choice(len(captions.images), count, replace=False))
    return captions.subset(rows.tolist())


def _draw(contestants: Sequence[Contestant], places: Sequence[Path]) -> None:
    """Milliseconds per text query against the images (VSE∞, Fig. 3); RSUM against pairs per second (CODER, Fig. 4)."""
    times, recall = [], []
    for colour, one in enumerate(contestants):
        images, milliseconds, end = list(one.times), list(one.times.values()), one.measured
        mark = MARKS[colour % len(MARKS)]
        times.append(Line(one.name, images[:end], milliseconds[:end], colour=colour, mark=mark, size=4))
        if end < len(images):
            guessed = slice(end - 1, None)
            times.append(Line("", images[guessed], milliseconds[guessed], colour=colour, style=":", mark=""))
        recall.append(
            Line(one.name, [one.thousand_pairs], [one.rsum], colour=colour, style="none", mark=mark, size=8)
        )
    dotted = "dotted: extrapolated" if len(times) > len(contestants) else ""
    draw = partial(picture_of_lines, "", inches=INCHES)
    queries = draw("images", "milliseconds per text query", times, logarithmic="xy", legend=dotted)
    save_picture(queries, places[0])
    save_picture(draw("thousand pairs per second", "RSUM", recall, logarithmic="x"), places[1])


def _table(contestants: Sequence[Contestant], captions: Captions, places: Sequence[Path]) -> str:
    sizes = list(contestants[0].times)
    rows = [["ms per text query", *(f"{n:,} images" for n in sizes), "RSUM", "k pairs/s"]]
    for one in contestants:
        marks = ["" if n < one.measured else "*" for n in range(len(sizes))]
        times = [f"{t:,.1f}{mark}" for t, mark in zip(one.times.values(), marks, strict=True)]
        rows.append([one.name, *times, f"{one.rsum:.1f}", f"{one.thousand_pairs:,.1f}"])
    guessed = any(one.measured < len(sizes) for one in contestants)
    return table_text(
        rows,
        *(["* extrapolated from the gallery before it"] if guessed else []),
        f"RSUM: {len(captions.images)} images and {len(captions.texts)} texts of {captions.name}",
        *map(str, places),
    )
