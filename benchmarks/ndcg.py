"""NDCG@500 of a whole gallery in tiles against the loop over queries, on the same scores, in one process.

Run: ``python benchmarks/ndcg.py`` (5,000 images, 25,000 texts, 80 labels: a minute) or with ``--small``. Both must
give the same NDCG before a ratio is printed. The loop is what published code does: for each query two
products, with the vectors and with the labels of the gallery, one sort of its scores, one sort of its relevances, and
a sum over the first 500 of each in Python. ``array sums`` is the same loop with those two sums left to numpy.
Processor time is printed too: other work on the machine changes it less than it changes the ratio of the times.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from sys import path

import numpy as np
import torch
from numpy.typing import NDArray

path.insert(0, str(Path(__file__).resolve().parents[1]))
path.insert(0, str(Path(__file__).resolve().parent))

from ranks import peak_of, timed

from diptych.evaluation.labels import DEPTH, judge_labels
from diptych.model.scores import EmbeddingScores

CHECKED = 500  # queries of either direction that are compared one by one


def collection(
    images: int, per_image: int, labels: int, seed: int = 0
) -> tuple[NDArray[np.float32], torch.Tensor, torch.Tensor]:
    """Labels as frequent as COCO's (2.9 per image on average), and noisy label vectors of images and of texts."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, labels + 1) ** 0.9
    chance = np.minimum(0.9, 2.9 * share / share.sum())
    rows = (rng.random((images, labels)) < chance).astype(np.float32)
    rows[rows.sum(1) == 0, 0] = 1
    noisy = [
        torch.from_numpy(
            np.repeat(rows, copies, axis=0) + 0.4 * rng.random((images * copies, labels), np.float32)
        )
        for copies in (1, per_image)
    ]
    image, text = (torch.nn.functional.normalize(side, dim=1) for side in noisy)
    return rows, image, text


def loop(
    vectors: tuple[NDArray[np.float32], NDArray[np.float32]],
    asked: NDArray[np.float32],
    gallery: NDArray[np.float32],
    arrays: bool,
    scores: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """One query at a time; ``vectors`` are those of the queries and of the gallery, ``scores`` their products."""
    depth = min(DEPTH, len(gallery))
    discount = 1 / np.log2(np.arange(2, depth + 2))
    found = np.zeros(len(asked))
    for query, vector in enumerate(vectors[0]):
        row = vectors[1] @ vector if scores is None else scores[query]
        relevance = gallery @ asked[query]
        ranked = np.argsort(-row, kind="stable")[:depth]
        best = np.sort(relevance)[::-1][:depth]
        if arrays:
            gain, ideal = float(relevance[ranked] @ discount), float(best @ discount)
        else:
            gain, ideal = _summed(relevance[ranked]), _summed(best)
        found[query] = 100 * gain / ideal if ideal else 0.0
    return found


def _summed(gains: NDArray[np.float32]) -> float:
    total = 0.0
    for place, gain in enumerate(gains.tolist(), 1):
        total += gain / math.log2(place + 1)
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per direction, the ratio of both together, and the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="500 images and 2,500 texts")
    images = 500 if parser.parse_args(arguments).small else 5000
    labels, image, text = collection(images, 5, 80)
    text_labels = np.repeat(labels, 5, axis=0)
    scores = EmbeddingScores(image, text)
    judge_labels(EmbeddingScores(image[:64], text[:320]), labels[:64], text_labels[:320])  # warm up

    def tiles() -> object:
        return judge_labels(scores, labels, text_labels, average_precision=False)

    _, peak = peak_of(tiles)
    busy = time.process_time()
    ours, quick = timed(tiles, repeats=3)
    busy = (time.process_time() - busy) / 3
    sides = image.numpy(), text.numpy()
    times, processor = {}, {}
    for name, arrays in (("published loop", False), ("array sums", True)):
        started = time.process_time()
        image_loop, first = timed(lambda arrays=arrays: loop(sides, labels, text_labels, arrays))
        text_loop, second = timed(lambda arrays=arrays: loop(sides[::-1], text_labels, labels, arrays))
        times[name], processor[name] = first + second, time.process_time() - started
    # the very scores of the tiles: a product with one vector rounds otherwise, which swaps near neighbours
    some = min(CHECKED, len(image))
    rows, columns = scores.tile(slice(some), slice(None)), scores.tile(slice(None), slice(some))
    exact = {
        "image_to_text": loop((sides[0][:some], sides[1]), labels[:some], text_labels, True, rows.numpy()),
        "text_to_image": loop(
            (sides[1][:some], sides[0]), text_labels[:some], labels, True, columns.numpy().T
        ),
    }
    for (direction, theirs), whole in zip(exact.items(), (image_loop, text_loop), strict=True):
        mine = ours[direction].ndcg  # type: ignore[index]
        assert np.allclose(mine[:some], theirs, atol=1e-9), f"{direction}: NDCG differs"
        assert abs(mine.mean() - whole.mean()) < 1e-3, f"{direction}: the mean NDCG differs"
        print(f"{direction}: NDCG@{DEPTH} {mine.mean():.4f}, {some:,} queries compared one by one")
    print(f"{len(image):,} × {len(text):,}, {labels.shape[1]} labels, {torch.get_num_threads()} threads")
    print(
        f"tiles {quick:.2f} s ({busy:.2f} s of processor time), {peak:.0f} MB; all with the products of vectors"
    )
    for name, seconds in times.items():
        print(
            f"{name} {seconds:.2f} s, {seconds / quick:.1f} times as long "
            f"({processor[name]:.2f} s of processor time, {processor[name] / busy:.1f} times)"
        )


if __name__ == "__main__":
    main()
