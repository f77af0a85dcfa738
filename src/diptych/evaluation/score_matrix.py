"""A score matrix on disk: computed a block of images at a time, with progress, and resumed after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.devices import autocast
from diptych.errors import DataError
from diptych.interaction.refine import pairs_at_once
from diptych.interaction.similarity_scorer import SimilarityScorer
from diptych.model.reranking import candidates
from diptych.model.scores import MatrixScores, MeanScores, PairScores, Scores, Where, check_scores, evaluating
from diptych.progress import track
from diptych.storage import storing, write_text

IMAGES, TEXTS = 512, 2048  # pairs computed between two writes
EXACT = 16  # best pairs of each query that are computed again in float32 where the scores are not


def stored_scores(
    scores: Scores,
    path: Path,
    identity: dict[str, Any],
    tile: Callable[[Where, Where], Tensor] | None = None,
    *,
    show_progress: bool = False,
) -> MatrixScores:
    """``scores`` (N, M) as a float32 ``.npy`` file, and the scores read from it.

    Beside the file, ``.json`` holds ``identity`` (which models, which data), the precision and how many images are
    done: a run that was killed goes on there, a finished file is read, and a file of other models, data or precision
    is refused. Memory holds one block of pairs, whatever N and M. Scores of a pair scorer in half precision are
    refined at the end: the best 16 of every query are computed again in float32. ``tile`` takes the place of
    ``scores.tile`` (to time it).
    """
    path = path if path.suffix == ".npy" else path.with_name(f"{path.name}.npy")
    card = path.with_suffix(".json")
    precision = "no" if not (rough := _rough(scores)) else "+".join(part.precision for part, _ in rough)
    identity = {**identity, "score": scores.kind, "shape": list(scores.shape), "precision": precision}
    done = _done(path, card, identity)
    if done == 0:  # the card first: a matrix without one is somebody else's
        write_text(card, json.dumps({**identity, "done": 0, "refined": False}))
        _reserve(path, card, scores.shape)
    matrix: Any = _opened(path, scores.shape)
    images, texts = scores.shape
    ask = scores.tile if tile is None else tile
    with storing(path):
        blocks = [slice(start, min(start + IMAGES, images)) for start in range(done, images, IMAGES)]
        for rows in track(blocks, "score pairs", len(blocks), show_progress):
            for start in range(0, texts, TEXTS):
                columns = slice(start, min(start + TEXTS, texts))
                part = check_scores(ask(rows, columns), scores.shape, rows, columns)
                matrix[rows, columns] = part.float().cpu().numpy()
            matrix.flush()  # before the card says so
            write_text(card, json.dumps({**identity, "done": rows.stop, "refined": False}))
        if rough and not _refined(card):
            _refine(rough, matrix, show_progress)
            matrix.flush()
        write_text(card, json.dumps({**identity, "done": images, "refined": True}))
    stored = MatrixScores(torch.from_numpy(matrix))
    stored.kind = scores.kind
    return stored


def refinable(scores: Scores) -> bool:
    """Whether ``stored_scores`` computes the best of these scores again: those of pair scorers in half precision."""
    return bool(_rough(scores))


def _done(path: Path, card: Path, identity: dict[str, Any]) -> int:
    """Images whose scores are in the file already; 0 where there is none."""
    if not card.exists():
        if path.exists():
            raise DataError(
                f"{path} is there, but {card.name} beside it is not: give another file, or remove it."
            )
        return 0
    try:
        found = json.loads(card.read_text("utf-8"))
        done = int(found.pop("done"))
        found.pop("refined")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{card} is damaged ({error}): remove it and {path.name}, and run again.") from error
    if found != identity:
        other = next((name for name in identity if found.get(name) != identity[name]), "content")
        held, wanted = found.get(other), identity.get(other)
        raise DataError(f"{path} holds scores of another {other} ({held}, not {wanted}): give another file.")
    if done and not path.exists():
        raise DataError(f"{card} is there, but {path.name} beside it is not: remove it, and run again.")
    return done


def _reserve(path: Path, card: Path, shape: tuple[int, int]) -> None:
    """Make a matrix of zeros that has all its room: a mapped file that meets a full disk would end the process."""
    with storing(path):
        try:
            np.lib.format.open_memmap(path, "w+", np.float32, shape)
            if hasattr(os, "posix_fallocate"):
                with path.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except BaseException:
            path.unlink(missing_ok=True)
            card.unlink(missing_ok=True)
            raise


def _opened(path: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    with storing(path):
        found: NDArray[np.float32] = np.lib.format.open_memmap(path, "r+")
    if found.shape != shape or found.dtype != np.float32:
        raise DataError(f"{path} is {found.dtype} of shape {found.shape}, not float32 of {shape}: remove it.")
    return found


def _refined(card: Path) -> bool:
    return bool(json.loads(card.read_text("utf-8"))["refined"]) if card.exists() else False


def _rough(scores: Scores) -> list[tuple[PairScores, SimilarityScorer]]:
    """The members of pair scores in half precision that can score single pairs; none where one cannot."""
    parts = scores.parts if isinstance(scores, MeanScores) else [scores]
    found = [
        (part, part.scorer)
        for part in parts
        if isinstance(part, PairScores)
        and part.precision != "no"
        and isinstance(part.scorer, SimilarityScorer)
    ]
    return found if len(found) == len(parts) else []


def _refine(
    members: list[tuple[PairScores, SimilarityScorer]], matrix: NDArray[np.float32], show_progress: bool
) -> None:
    """The best pairs of every image and of every text again, in float32."""
    rows, columns = candidates(MatrixScores(torch.from_numpy(matrix)), EXACT)
    first = members[0][0].texts
    sizes = (first.bounds[1:] - first.bounds[:-1])[columns]
    order = sizes.argsort(stable=True)  # texts of one length side by side
    size = pairs_at_once(members[0][0].device)
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    for part in track(parts, "refine", len(parts), show_progress):
        image, text = rows[part], columns[part]
        found = torch.zeros(len(part))
        for scores, scorer in members:
            with torch.inference_mode(), evaluating(scorer), autocast(scores.device, "no"):
                found += scorer.pairs(
                    scores.images.take(image).to(scores.device), scores.texts.take(text).to(scores.device)
                ).cpu()
        matrix[image.numpy(), text.numpy()] = (found / len(members)).numpy()
