"""TREC runs and qrels: ranked lists and judgements as text files, read and written.

======  ==================================================================================
run     ``query Q0 item rank score tag`` in each line; items rank by descending score
qrels   ``query 0 item relevance`` in each line; relevant where the last number is above 0
======  ==================================================================================

Queries and items go by the ids of the images and of the texts; texts without ids of their own are called ``IMAGE#0``,
``IMAGE#1``, … in the order of the texts of their image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.data.captions import Captions
from diptych.data.corrections import text_names
from diptych.errors import DataError
from diptych.evaluation.judgements import Judgements, top_lists
from diptych.evaluation.metrics import KS
from diptych.model.scores import MatrixScores, Scores
from diptych.storage import write_text

ROUNDING = 1e-5  # by which the scores of a pair in two runs may differ
Queries = Literal["images", "texts"]
"""The side that asks; the other side is ranked."""


def write_run(
    path: str | Path, scores: Scores, captions: Captions, queries: Queries, *, depth: int = 100
) -> None:
    """Write the first ``depth`` items of each query of one side; ties rank by index, items at −∞ are left out."""
    names = _names(captions)
    asked, ranked = names[queries], names["texts" if queries == "images" else "images"]
    every, dim = torch.arange(len(asked)), int(queries == "images")
    lists, values = top_lists(scores, every, min(depth, len(ranked)), dim)
    lines = [
        f"{query} Q0 {ranked[item]} {place} {score!r} diptych\n"
        for query, items, found in zip(asked, lists.tolist(), values.tolist(), strict=True)
        for place, (item, score) in enumerate(zip(items, found, strict=True), 1)
        if score > -math.inf
    ]
    write_text(Path(path), "".join(lines))


def read_runs(
    captions: Captions, *, image_to_text: str | Path | None = None, text_to_image: str | Path | None = None
) -> MatrixScores:
    """The scores of one or two runs over these captions; pairs that no run lists score −∞.

    Both directions are ranked, so a single run must list every pair. Of two runs, each query needs its first ten: what
    is not listed then stands behind, and recall up to 10 is exact; ranks behind the lists are not. A pair that both
    list must have one score.
    """
    matrix = np.full((len(captions.images), len(captions.texts)), np.nan)
    paths: dict[Queries, str | Path | None] = {"images": image_to_text, "texts": text_to_image}
    for queries, path in paths.items():
        if path is None:
            continue
        found = np.full_like(matrix, np.nan)
        for row, column, score, where in _pairs(Path(path), captions, queries, 6, 4):
            if not math.isnan(found[row, column]):
                raise DataError(f"{where}: the pair is listed twice: keep one line for each pair.")
            found[row, column] = score
        known = ~np.isnan(found)
        _check_depth(Path(path), known if queries == "images" else known.T, captions, queries)
        both = known & ~np.isnan(matrix)
        if not np.allclose(matrix[both], found[both], rtol=ROUNDING, atol=ROUNDING):
            raise DataError(f"{image_to_text} and {path} give a pair two scores: use the same for both.")
        matrix[known] = found[known]
    if None in paths.values() and np.isnan(matrix).any():
        raise DataError(
            f"{image_to_text or text_to_image} lists some of the pairs, and both directions are ranked: give a run of "
            "each direction, or one that lists every pair."
        )
    scores = MatrixScores(np.where(np.isnan(matrix), -np.inf, matrix))
    scores.kind = "run"
    return scores


def run_queries(path: str | Path, captions: Captions) -> Queries:
    """The side that asks in a run: that of the first query's id."""
    query = (_content(path).split(maxsplit=1) or [""])[0]
    return "images" if query in captions.image_ids else "texts"


def _content(path: str | Path) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): give a text file.") from error


def write_qrels(path: str | Path, captions: Captions, queries: Queries) -> None:
    """Write the pairs of the captions as judgements."""
    names = _names(captions)
    lines = []
    for row, image in enumerate(captions.image_of.tolist()):
        pair = names["images"][image], names["texts"][row]
        query, item = pair if queries == "images" else pair[::-1]
        lines.append(f"{query} 0 {item} 1\n")
    write_text(Path(path), "".join(lines))


def read_qrels(path: str | Path, captions: Captions, queries: Queries) -> Judgements:
    """The judgements of a file; what is relevant one way is relevant the other way."""
    rows = _pairs(Path(path), captions, queries, 4, 3)
    pairs = [(row, column) for row, column, relevance, _ in rows if relevance > 0]
    if not pairs:
        raise DataError(f"{path} has no relevant pair: give lines 'query 0 item 1'.")
    return Judgements.of_rows("qrels", pairs)


def _names(captions: Captions) -> dict[str, list[str]]:
    names = {"images": [str(id) for id in captions.image_ids], "texts": text_names(captions)}
    for side, ids in names.items():
        spaced = next((id for id in ids if not id or id.split() != [id]), None)
        if spaced is not None:
            raise DataError(f"the id '{spaced}' of the {side} has a space, TREC files have none: rename it.")
    return names


def _pairs(
    path: Path, captions: Captions, queries: Queries, fields: int, value: int
) -> Iterator[tuple[int, int, float, str]]:
    """(image row, text row, value, where it stands) of each line of ``fields`` words."""
    rows = {side: {id: row for row, id in enumerate(ids)} for side, ids in _names(captions).items()}
    query, item = ("images", "texts") if queries == "images" else ("texts", "images")
    for number, line in enumerate(_content(path).splitlines(), 1):
        words, where = line.split(), f"{path}, line {number}"
        if not words:
            continue
        try:
            score = float(words[value]) if len(words) == fields else math.nan
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise DataError(
                f"{where} is not {fields} words with a finite number at place {value + 1}: correct the line."
            )
        for side, id in ((query, words[0]), (item, words[2])):
            if id not in rows[side]:
                raise DataError(f"{where}: {captions.name} has no '{id}' among its {side}: give its own ids.")
        pair = rows[query][words[0]], rows[item][words[2]]
        yield *(pair if queries == "images" else pair[::-1]), score, where


def _check_depth(path: Path, known: NDArray[np.bool_], captions: Captions, queries: Queries) -> None:
    """Refuse lists of a query that are too short: what is not listed would count as right or wrong by chance."""
    needed, lengths = min(max(KS), known.shape[1]), known.sum(axis=1)
    rows = np.unique(captions.image_of) if queries == "images" else np.arange(len(known))
    short = rows[lengths[rows] < needed]
    if len(short):
        query = _names(captions)[queries][short[0]]
        raise DataError(f"{path} lists {lengths[short[0]]} items for '{query}': list {needed} for each.")
