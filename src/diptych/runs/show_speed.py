"""Speed: how long a query takes with a dual encoder, a pair scorer and a re-ranked dual encoder, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from diptych.data.captions import Captions
from diptych.devices import autocast
from diptych.errors import SettingsError
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import aligned_rows
from diptych.evaluation.retrieval import evaluate_scores
from diptych.model.reranking import RerankedScores
from diptych.model.retriever import Retriever
from diptych.model.scores import EmbeddingScores, MeanScores, PairScores, Scores, evaluating
from diptych.progress import track
from diptych.reports.charts import (
    Contestant,
    Timing,
    check_output,
    picture_of_queries,
    picture_of_recall,
    save_picture,
)
from diptych.runs.show import open_runs
from diptych.training.prepare import prepare
from diptych.types import Features, Ragged

GALLERIES = (10, 100, 1_000, 10_000, 100_000)
TOP = 10  # answers of a query
CHUNK = 512  # images a pair scorer sees at a time
LEAST = 3  # queries timed, the fastest counts
Query = Callable[[str, int], None]  # a text and the number of images in the gallery


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
    show_progress: bool = True,
) -> str:
    """Draw two pictures beside ``output``, and return the numbers.

    Runs with a pair scorer are pair scorers; each other run is a dual encoder, and re-ranked by all pair scorers
    together where there are any. Galleries up to ``most`` repeat the images of the split. Times are those of one text
    after another, encoding included; a gallery that would take longer than ``patience`` seconds per query is
    extrapolated. RSUM is over the first ``count`` images drawn with ``seed``, with all their texts.
    """
    check_output(output)
    names, models, views = open_runs(
        runs,
        data,
        split,
        show_progress,
        device,
        compute_precision,
        cut=lambda view: _draw_sample(view, count, seed),
    )
    ready = [
        prepare(model, view, device=str(model.device), show_progress=show_progress)
        for model, view in zip(models, views, strict=True)
    ]
    sizes = [n for n in GALLERIES if n <= most]
    if not sizes:
        raise SettingsError(f"--most {most} leaves no gallery to time: give {GALLERIES[0]} or more.")
    contestants = [
        _timed(name, query, scores, views[0], sizes, patience, show_progress)
        for name, query, scores in _contestants(names, models, ready, rerank, show_progress)
    ]
    places = [output.with_stem(f"{output.stem}-{end}") for end in ("queries", "recall")]
    save_picture(picture_of_queries(contestants), places[0])
    save_picture(picture_of_recall(contestants), places[1])
    return _table(contestants, sizes, views[0], places)


def _contestants(
    names: Sequence[str],
    models: Sequence[Retriever],
    ready: Sequence[Prepared],
    rerank: int,
    show_progress: bool,
) -> Iterator[tuple[str, Query, Scores]]:
    """The name of each way to search, a query in it, and its scores of the whole split."""
    scorers = [n for n, model in enumerate(models) if model.scorer is not None]
    judges = [_Pairs(models[n], ready[n], show_progress) for n in scorers]
    duals = [n for n in range(len(models)) if n not in scorers]
    for n, vectors in [(n, _Vectors(models[n], ready[n], show_progress)) for n in duals]:
        yield names[n], vectors.query, vectors.scores()
        if judges:
            name = f"{names[n]}, top {rerank} by {' + '.join(names[m] for m in scorers)}"
            scores = MeanScores.of([judge.reranked(vectors.scores(), rerank) for judge in judges])

            def query(text: str, images: int, vectors: _Vectors = vectors) -> None:
                vectors.query(text, images)
                for judge in judges:
                    judge.query(text, min(rerank, images))

            yield name, query, scores
    for n, judge in zip(scorers, judges, strict=True):
        yield names[n], judge.query, judge.scores()


class _Vectors:
    """A dual encoder: one product and the best of it."""

    def __init__(self, model: Retriever, ready: Prepared, show_progress: bool) -> None:
        found = model.scores(ready.captions.images, ready.texts, show_progress=show_progress)
        assert isinstance(found, EmbeddingScores)
        self.model, self.found = model, found
        self.gallery = found.image  # repeated to the size asked for last

    def scores(self) -> Scores:
        return self.found

    def query(self, text: str, images: int) -> None:
        """Encode a text and find its best images in a gallery of ``images``."""
        if len(self.gallery) != images:
            rows = self.found.image
            self.gallery = rows.repeat(-(-images // len(rows)), 1)[:images]
        vector = self.model.encode_text([text])[0].to(self.gallery.device)
        (self.gallery @ vector).topk(min(TOP, images))


class _Pairs:
    """A pair scorer: every image of the gallery is looked at beside the text."""

    def __init__(self, model: Retriever, ready: Prepared, show_progress: bool) -> None:
        assert model.scorer is not None
        self.model, self.scorer = model, model.scorer
        self.images: Ragged = model.encode_image_features(ready.captions.images, show_progress=show_progress)
        self.texts: Ragged = model.encode_text_features(ready.texts, show_progress=show_progress)
        some = torch.arange(min(CHUNK, len(self.images)))
        self.some: Features = self.images.take(some).to(model.device)

    def scores(self) -> Scores:
        return PairScores(self.scorer, self.images, self.texts, self.model.device, self.model.precision)

    def reranked(self, quick: Scores, k: int) -> Scores:
        return RerankedScores(
            quick, self.scorer, self.images, self.texts, k,
            device=self.model.device, precision=self.model.precision,
        )  # fmt: skip

    def query(self, text: str, images: int) -> None:
        """Encode a text and score it with a number of images, a chunk at a time."""
        words = self.model.encode_text_features([text]).take(torch.tensor([0])).to(self.model.device)
        parts = []
        with (
            torch.inference_mode(),
            evaluating(self.scorer),
            autocast(self.model.device, self.model.precision),
        ):
            while images > 0:
                size = min(images, len(self.some.mask))
                seen = Features(self.some.values[:size], self.some.mask[:size])
                parts.append(self.scorer(seen, words)[:, 0])
                images -= size
        whole = torch.cat(parts)
        whole.topk(min(TOP, len(whole)))


def _timed(
    name: str,
    query: Query,
    scores: Scores,
    captions: Captions,
    sizes: Sequence[int],
    patience: float,
    show_progress: bool,
) -> Contestant:
    """Times of queries by gallery, and what the whole split says."""
    timings: list[Timing] = []
    texts = captions.texts[: LEAST + 1]
    for images in track(sizes, f"time {name}", len(sizes), show_progress):
        last = timings[-1] if timings else None
        if last is not None and last.milliseconds / 1000 * images / last.images > patience:
            timings.append(Timing(images, last.milliseconds * images / last.images, measured=False))
            continue
        query(texts[-1], images)  # the first call loads kernels and caches
        timings.append(Timing(images, 1000 * min(_seconds(query, text, images) for text in texts[:LEAST])))
    report = evaluate_scores(scores, captions, bootstrap=0)
    speed = report.groups[0].speed["thousand_pairs_per_second"]
    return Contestant(name, timings, report.metrics["rsum"], speed)


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


def _table(
    contestants: Sequence[Contestant], sizes: Sequence[int], captions: Captions, places: Sequence[Path]
) -> str:
    head = ["ms per text query", *(f"{n:,} images" for n in sizes), "RSUM", "k pairs/s"]
    rows = [head]
    for one in contestants:
        times = [f"{t.milliseconds:,.1f}{'' if t.measured else '*'}" for t in one.timings]
        rows.append([one.name, *times, f"{one.rsum:.1f}", f"{one.thousand_pairs:,.1f}"])
    guessed = any(not t.measured for one in contestants for t in one.timings)
    return "\n".join(
        [
            *aligned_rows(rows),
            *(["* extrapolated from the gallery before it"] if guessed else []),
            f"RSUM: {len(captions.images)} images and {len(captions.texts)} texts of {captions.name}",
            *(str(place) for place in places),
        ]
    )
