"""Ranks by counting against the argsort loop of published code, on the same scores, in one process.

Run: ``python benchmarks/ranks.py`` (5,000 images, 25,000 texts, 1024-d: a minute) or with ``--small``. Ranks
must be identical before a ratio is printed: with a stable sort for every query, with the unstable sort of
published code for every query without ties. Also counts how often evaluation encodes an image.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from sys import path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.data.captions import Captions, ImageStore
from diptych.data.text import TextStore
from diptych.evaluation.evaluate import evaluate
from diptych.evaluation.metrics import Ranks, count_ranks
from diptych.model.scores import EmbeddingScores, Scores, Where, vector_scores

T = TypeVar("T")
Order = Callable[[NDArray[np.float32]], NDArray[np.intp]]


class Recorded(EmbeddingScores):
    """Scores that keep every tile they give, so that the loop sorts the very same numbers."""

    def __init__(self, image: Tensor, text: Tensor) -> None:
        super().__init__(image, text)
        self.matrix = np.empty(self.shape, np.float32)

    def tile(self, images: Where, texts: Where) -> Tensor:
        """The tile, recorded; texts come in order here, so both sides are slices."""
        part = super().tile(images, texts)
        self.matrix[images, texts] = part.numpy()
        return part


def vectors(images: int, texts: int, dim: int) -> tuple[Tensor, Tensor]:
    """Unit vectors; texts lie around their image, far enough to make ranks of every size."""
    image = torch.nn.functional.normalize(torch.randn(images, dim), dim=1)
    text = image[torch.arange(texts) * images // texts] + 10 * torch.randn(texts, dim) / dim**0.5
    return image, torch.nn.functional.normalize(text, dim=1)


def published(row: NDArray[np.float32]) -> NDArray[np.intp]:
    """Published code: ascending, then reversed; equal scores in any order."""
    return np.argsort(row)[::-1]


def stable(row: NDArray[np.float32]) -> NDArray[np.intp]:
    """By (score descending, index ascending)."""
    return np.argsort(-row, kind="stable")


def loop(
    scores: NDArray[np.float32], image_of: NDArray[np.int64], order: Order
) -> tuple[NDArray[Any], NDArray[Any]]:
    """One argsort and one search for each query."""
    texts_of = [np.flatnonzero(image_of == image) for image in range(len(scores))]
    image_to_text = np.empty(len(scores))
    for image, row in enumerate(scores):
        ranked = order(row)
        image_to_text[image] = min(np.where(ranked == text)[0][0] for text in texts_of[image])
    text_to_image = np.empty(len(image_of))
    for text, column in enumerate(np.ascontiguousarray(scores.T)):
        text_to_image[text] = np.where(order(column) == image_of[text])[0][0]
    return image_to_text, text_to_image


def timed(work: Callable[[], T], repeats: int = 1) -> tuple[T, float]:
    """The result and the shortest time in seconds."""
    shortest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        shortest = min(shortest, time.perf_counter() - start)
    return result, shortest


def peak_of(work: Callable[[], T]) -> tuple[T, float]:
    """The result and the most memory it took beyond what was resident before, in MB; NaN where unknown."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present; Linux only
    except OSError:
        return work(), float("nan")
    before = _resident("VmRSS")
    result = work()
    return result, (_resident("VmHWM") - before) / 1000


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def identical(ranks: Ranks, found: tuple[NDArray[Any], NDArray[Any]], *, untied_only: bool) -> int:
    """Assert equal ranks; the number of queries compared."""
    compared = 0
    for (direction, placement), theirs in zip(ranks, found, strict=True):
        chosen = placement.tied == 0 if untied_only else np.ones(len(theirs), bool)
        assert np.array_equal(placement.ranks()[chosen], theirs[chosen]), f"{direction}: ranks differ"
        compared += int(chosen.sum())
    return compared


class Store:
    """Images that count how often they are read."""

    def __init__(self, image: Tensor) -> None:
        self.image, self.reads = image, 0

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: int) -> NDArray[Any]:
        self.reads += 1
        row: NDArray[Any] = self.image[index].numpy()
        return row

    def content_key(self, index: int) -> str:
        """The row number: these images never change."""
        return str(index)


class Passing:
    """A model that hands its vectors on, reading each item it is asked to encode."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def encode_image(
        self, images: ImageStore, *, batch_size: int = 64, show_progress: bool = False
    ) -> Tensor:
        """(N, D)."""
        return torch.from_numpy(np.stack([np.asarray(images[i]) for i in range(len(images))]))

    def encode_text(
        self, texts: Sequence[str] | TextStore, *, batch_size: int = 256, show_progress: bool = False
    ) -> Tensor:
        """(M, D)."""
        return self.text[: len(texts)]

    def scores(self, images: ImageStore, texts: Sequence[str] | TextStore, **options: Any) -> Scores:
        """Dot products."""
        return vector_scores(self, images, texts, **options)

    def fingerprint(self) -> str:
        """A name."""
        return "passing"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, time, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--small", action="store_true", help="500 images, 2,500 texts, 64-d")
    args = parser.parse_args(arguments)
    images, dim = (500, 64) if args.small else (args.images, args.dim)
    texts = 5 * images

    torch.manual_seed(0)
    image, text = vectors(images, texts, dim)
    image_of = np.repeat(np.arange(images), 5)
    print(f"{images:,} images, {texts:,} texts, {dim}-d, {torch.get_num_threads()} threads")

    count_ranks(EmbeddingScores(image[:200], text[:1000]), image_of[:1000])  # the first call loads kernels
    ranks, extra = peak_of(lambda: count_ranks(EmbeddingScores(image, text), image_of))
    _, from_vectors = timed(lambda: count_ranks(EmbeddingScores(image, text), image_of), 3)
    recorded = Recorded(image, text)
    count_ranks(recorded, image_of)
    scores = recorded.matrix
    again, from_matrix = timed(lambda: count_ranks(scores, image_of), 3)
    _, product = timed(lambda: image @ text.T, 3)

    rows = []
    for name, order, untied_only in (("unstable", published, True), ("stable", stable, False)):
        found, slow = timed(lambda order=order: loop(scores, image_of, order))  # type: ignore[misc]
        compared = identical(ranks, found, untied_only=untied_only)
        identical(again, found, untied_only=untied_only)
        print(f"{name} argsort loop: identical ranks for {compared:,} of {images + texts:,} queries")
        rows.append((f"ranks of a score matrix, {name} loop", slow, from_matrix))
        rows.append((f"vectors to ranks, {name} loop", slow + product, from_vectors))
    print(f"\n{'work':<42}{'loop s':>9}{'ours s':>9}{'ratio':>8}")
    for name, slow, fast in rows:
        print(f"{name:<42}{slow:>9.2f}{fast:>9.3f}{slow / fast:>7.1f}×")
    matrix = images * texts * 4 / 1e6
    print(
        f"\npeak extra memory, vectors to ranks: {extra:.0f} MB (the score matrix alone is {matrix:.0f} MB)"
    )

    store = Store(image)
    captions = Captions(
        store,
        ["a text"] * texts,
        image_of,
        [str(i) for i in range(images)],
        ["test"] * images,
        name="benchmark",
    )
    report, seconds = timed(lambda: evaluate(Passing(text), captions))
    print(f"evaluate: {store.reads:,} images encoded for {images:,} images (published code: {texts:,}),")
    print(
        f"          {seconds:.2f} s with {report.card.bootstrap:,} bootstrap resamples, {report.groups[0].speed_text()}"
    )


if __name__ == "__main__":
    main()
