"""A score matrix on disk: computed a block of images at a time, with progress, and resumed after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.cache.rows import RowFile
from diptych.data.arrays import ranges, read_array
from diptych.devices import autocast
from diptych.entries import CACHE
from diptych.errors import DataError
from diptych.model.reranking import candidates
from diptych.model.scores import MatrixScores, MeanScores, PairScores, Scores, Where, check_scores, evaluating
from diptych.progress import track
from diptych.storage import MISREAD, parse_json, write_text

IMAGES, TEXTS = 512, 2048  # pairs computed at once
BLOCK_BYTES = 64 << 20  # most bytes of scores between two writes
EXACT = 16  # best pairs of each query that are computed again in float32 where the scores are not
CPU_CHUNK, GPU_CHUNK = 64, 2048  # pairs computed again at once; on a CPU what its caches hold


def stored_scores(
    scores: Scores,
    path: Path,
    identity: dict[str, Any],
    tile: Callable[[Where, Where], Tensor] | None = None,
    *,
    show_progress: bool = False,
) -> MatrixScores:
    """``scores`` (N, M) as a float32 ``.npy`` file, and the scores read from it.

    The file is a ``RowFile`` whose key is ``identity`` (which models, which data), the kind of score and the precision:
    a run that was killed goes on there, a finished file is read, and a file of other models, data or precision is
    refused. ``.json`` beside the finished file says the same for people. Memory holds one block of pairs, whatever N
    and M. Scores of a pair scorer in half precision are refined at the end: the best 16 of every query are computed
    again in float32. ``tile`` takes the place of ``scores.tile`` (to time it).
    """
    path = path if path.suffix == ".npy" else path.with_name(f"{path.name}.npy")
    rough = refinable(scores)
    precision = "+".join(part.precision for part in rough) or "no"
    key = {**identity, "score": scores.kind, "shape": list(scores.shape), "precision": precision}
    logged = RowFile(path, key).held_key()
    found, done, refined = _read_card(path, logged is not None)
    for held in (logged, found):
        if held not in (None, key):
            known = held if isinstance(held, dict) else {}
            other = next((name for name in key if known.get(name) != key[name]), "content")
            had, wanted = known.get(other), key.get(other)
            raise DataError(f"{path} is of another {other} ({had}, not {wanted}): give another file.")
    if not refined or logged is not None:
        with RowFile(path, key, dtype="<f4", overwrite=found is not None) as file:
            if not file.finished:
                _fill(file, scores, scores.tile if tile is None else tile, done, show_progress)
                if rough:
                    written = file.change()
                    _refine(rough, written, show_progress)
                    written.flush()
                file.finish()
                card = {**key, "done": file.progress.done, "refined": True}
                write_text(path.with_suffix(".json"), json.dumps(card))
    matrix = read_array(path, "c")
    if matrix.shape != scores.shape or matrix.dtype != np.float32:
        raise DataError(f"{path} is {matrix.dtype} {matrix.shape}, not float32 {scores.shape}: remove it.")
    stored = MatrixScores(torch.from_numpy(matrix))
    stored.kind = scores.kind
    return stored


def read_scores(path: Path) -> MatrixScores:
    """The scores (images, texts) of a ``.npy`` file, of ``stored_scores`` or of another program."""
    matrix, card = read_array(path, "c"), path.with_suffix(".json")
    try:
        known = parse_json(CACHE.read(card)) if card.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{card} cannot be read ({error}): remove it, or give the card of these scores."
        ) from error
    if isinstance(known, dict) and known.get("done", len(matrix)) != len(matrix):
        raise DataError(
            f"{path} holds the scores of {known['done']} of {len(matrix)} images: finish it with --score_matrix first."
        )
    return MatrixScores(torch.from_numpy(matrix))


def _read_card(path: Path, logged: bool) -> tuple[dict[str, Any] | None, int, bool]:
    """The key of the card beside a matrix, the images done, and whether they are refined; no key without a card.

    Earlier versions wrote no log: the card alone says how much of the matrix, under its own name, is computed.
    """
    card = path.with_suffix(".json")
    if not card.exists():
        if path.exists() and not logged:
            raise DataError(f"{path} is there without {card.name}: give another file, or remove it.")
        return None, 0, False
    try:
        found = parse_json(CACHE.read(card))
        done, refined = int(found.pop("done")), bool(found.pop("refined"))
    except MISREAD as error:
        raise DataError(f"{card} is damaged ({error}): remove it and {path.name}, and run again.") from error
    if done and not path.exists() and not logged:
        raise DataError(f"{card} is there, but {path.name} beside it is not: remove it, and run again.")
    return found, done, refined


def _fill(
    file: RowFile,
    scores: Scores,
    tile: Callable[[Where, Where], Tensor],
    done: int,
    show_progress: bool,
) -> None:
    """Append the rows that are missing; ``done`` of them an earlier version may have left under the file's own name."""
    images, texts = scores.shape
    file.reserve(images, (texts,))
    size = max(1, min(IMAGES, BLOCK_BYTES // (4 * texts)))
    if file.path.exists():
        earlier = read_array(file.path)
        for some in ranges(file.progress.rows, done, size):
            file.append(earlier[some.start : some.stop], len(some))
    for some in track(ranges(file.progress.rows, images, size), "score pairs", show=show_progress):
        rows, block = slice(some.start, some.stop), np.empty((len(some), texts), np.float32)
        for asked in ranges(0, texts, TEXTS):
            columns = slice(asked.start, asked.stop)
            block[:, columns] = (
                check_scores(tile(rows, columns), scores.shape, rows, columns).float().cpu().numpy()
            )
        file.append(block, len(block))


def refinable(scores: Scores) -> list[PairScores]:
    """The members of pair scores in half precision that can score single pairs, which ``stored_scores`` refines.

    None where one cannot.
    """
    parts = scores.parts if isinstance(scores, MeanScores) else [scores]
    found = [
        part
        for part in parts
        if isinstance(part, PairScores) and part.precision != "no" and part.scorer.refines
    ]
    return found if len(found) == len(parts) else []


def _refine(members: list[PairScores], matrix: NDArray[np.float32], show_progress: bool) -> None:
    """The best pairs of every image and of every text again, in float32."""
    rows, columns = candidates(MatrixScores(torch.from_numpy(matrix)), EXACT)
    first = members[0].texts
    sizes = (first.bounds[1:] - first.bounds[:-1])[columns]
    order = sizes.argsort(stable=True)  # texts of one length side by side
    size = CPU_CHUNK if members[0].device.type == "cpu" else GPU_CHUNK
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    for part in track(parts, "refine", len(parts), show_progress):
        image, text = rows[part], columns[part]
        found = torch.zeros(len(part))
        for scores in members:
            with torch.inference_mode(), evaluating(scores.scorer), autocast(scores.device, "no"):
                found += scores.scorer.pairs(
                    scores.images.take(image).to(scores.device), scores.texts.take(text).to(scores.device)
                ).cpu()
        matrix[image.numpy(), text.numpy()] = (found / len(members)).numpy()
