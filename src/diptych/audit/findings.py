"""What else is wrong with a data set: missing positives, doubles across splits, empty texts, an order that was lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.audit.fit import CHUNK, VOTERS, Fit, Matrix, Rows, Wrong, fit_features
from diptych.data.duplicates import across, groups, normal_text

MOST_PAIRS = 1_000_000_000  # texts × images that are compared for missing positives
NEAR = 0.85  # cosine, about the mean, of features of pictures that are nearly the same
REPEATED = 20  # images that share a text which then says nothing
RUN = 20  # images in a row, at least, whose order may be lost
EVIDENCE = 40.0  # log odds that such a run needs
MOST_EVIDENCE = 3.0  # log odds that one image can add
SHIFTS = 20  # rows that texts may have slipped by
SURE = 3.0  # standard errors by which texts must fit the images of their run better than others
NO_FIT = 0.3  # mean z below which pictures and texts have nothing to do with each other
FITS = 0.5  # share of the usual z at which a shift explains a run
FILE_NAME = re.compile(
    r"\S*\.(jpe?g|png|gif|webp|bmp|tiff?|heic)|(img|dsc|dscn|dscf|pxl|image|photo)?[\W_]*\d[\d\W_]*"
)


@dataclass(frozen=True)
class Positive:
    """A text that fits another image at least as well as its own."""

    image: int
    text: int
    score: float  # z with the picture plus agreement with its texts
    own: float


@dataclass(frozen=True)
class LostOrder:
    """A run of images, first to last, whose texts are not in their order; ``shift`` is None for a permutation.

    ``inside``: whether the texts fit other images of the run, not of elsewhere.
    """

    first: int
    last: int
    shift: int | None
    inside: bool


def missing_positives(fit: Fit, wrong: Wrong, *, seed: int = 0) -> tuple[list[Positive], int]:
    """The best other image of each text, where it fits as well as its own; best first. And how many texts were tried.

    Both must speak for it, the picture and the picture's texts. Of very large data a sample of the texts is tried.
    """
    total, most = len(fit.image_of), max(CHUNK, MOST_PAIRS // fit.images)
    starts = range(0, total, CHUNK)
    if most < total:
        some = np.random.default_rng(seed).permutation(len(starts))[: most // CHUNK]
        starts = [starts[place] for place in sorted(some.tolist())]  # type: ignore[assignment]
    own_z, own_g = wrong.z, wrong.agreement
    found: list[Positive] = []
    for start in starts:
        texts = np.arange(start, min(start + CHUNK, total))
        z, g = (
            fit.pictures.block(slice(start, start + CHUNK)),
            fit.siblings.block(slice(start, start + CHUNK)),
        )
        z[np.arange(len(texts)), fit.image_of[texts]] = -np.inf
        worse = z < own_z[texts, None]
        if own_g is not None:
            worse |= (g < own_g[texts, None]) & (fit.counts[fit.image_of[texts]] >= VOTERS)[:, None]
        both = np.where(worse, -np.inf, z + g)
        best = both.argmax(axis=1)
        values = both[np.arange(len(texts)), best]
        own = own_z[texts] + (0 if own_g is None else own_g[texts])
        found += [
            Positive(int(best[row]), int(texts[row]), float(values[row]), float(own[row]))
            for row in np.flatnonzero(np.isfinite(values) & (wrong.probability[texts] < 0.5))
        ]
    found.sort(key=lambda one: -one.score)
    return found, sum(min(CHUNK, total - start) for start in starts)


def near_pictures(x: NDArray[Any]) -> list[tuple[int, int, float]]:
    """Pairs of images whose features are nearly the same, with their cosine about the mean; nearest first."""
    rows = np.asarray(x, np.float32)
    rows = rows - rows.mean(axis=0)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)
    found = []
    for start in range(0, len(rows), CHUNK):
        near = np.triu(rows[start : start + CHUNK] @ rows[start:].T, 1)
        for one, two in zip(*np.nonzero(near >= NEAR), strict=True):
            found.append((start + int(one), start + int(two), float(near[one, two])))
    return sorted(found, key=lambda pair: -pair[2])


def leaked_texts(texts: Sequence[str], image_of: Rows, splits: Sequence[str]) -> list[list[int]]:
    """Texts of more than one split that are equal but for case and punctuation."""
    return [
        places
        for places in groups(map(normal_text, texts))
        if across([int(image_of[place]) for place in places], splits)
    ]


def empty_texts(texts: Sequence[str], image_of: Rows, image_ids: Sequence[str]) -> list[tuple[int, str]]:
    """Texts that say nothing, with the reason."""
    found: dict[int, str] = {}
    for row, text in enumerate(texts):
        plain = text.strip().casefold()
        if not any(letter.isalnum() for letter in plain):
            found[row] = "no word"
        elif plain == image_ids[int(image_of[row])].casefold() or FILE_NAME.fullmatch(plain):
            found[row] = "a file name"
    for places in groups(map(normal_text, texts)):
        images = len({int(image_of[place]) for place in places})
        if images >= REPEATED:
            found |= {place: f"the same on {images:,} images" for place in places if place not in found}
    return sorted(found.items())


def lost_order(fit: Fit, wrong: Wrong) -> list[LostOrder]:
    """Runs of images whose texts are wrong one after the other, and where the texts belong."""
    odds = np.log(np.clip(wrong.image, 1e-6, 1 - 1e-6) / np.clip(1 - wrong.image, 1e-6, 1))
    evidence = np.clip(odds, -MOST_EVIDENCE, MOST_EVIDENCE)
    usual = float(np.median(wrong.z[wrong.probability < 0.5])) if (wrong.probability < 0.5).any() else 0.0
    found = []
    while (run := _best_run(evidence)) is not None:
        first, last = run
        found.append(_explained(fit, first, last, usual))
        evidence[first : last + 1] = -MOST_EVIDENCE
    return sorted(found, key=lambda lost: lost.first)


def _best_run(evidence: NDArray[np.float64]) -> tuple[int, int] | None:
    """First and last of the run with the most evidence, None where no run has enough."""
    sums = np.concatenate([[0.0], np.cumsum(evidence)])
    lowest = np.minimum.accumulate(sums)
    end = int((sums - lowest).argmax())
    start = int(sums[: end + 1].argmin())
    if sums[end] - sums[start] < EVIDENCE or end - start < RUN:
        return None
    return start, end - 1


def _explained(fit: Fit, first: int, last: int, usual: float) -> LostOrder:
    """Whether the texts of a run fit its images under a shift, or others of the run, or none of it."""
    rows = np.arange(first, last + 1)
    by_shift = {
        shift: _fit_of_groups(fit, rows[max(0, -shift) : len(rows) - max(0, shift)], shift)
        for shift in range(-SHIFTS, SHIFTS + 1)
        if shift and abs(shift) < len(rows)
    }
    shift = max(by_shift, key=lambda one: by_shift[one])
    if usual > 0 and by_shift[shift] > FITS * usual:
        return LostOrder(first, last, shift, True)
    outside = np.setdiff1d(np.arange(fit.images), rows)
    if len(outside) < len(rows):
        return LostOrder(first, last, None, True)
    others = np.random.default_rng(0).permutation(outside)[: len(rows)]
    gain = _best_of_groups(fit, rows, rows) - _best_of_groups(fit, rows, others)
    return LostOrder(first, last, None, bool(gain.mean() > SURE * gain.std() / np.sqrt(len(gain))))


def whole_shift(x: NDArray[Any], v: NDArray[Any], image_of: Rows) -> int | None:
    """The shift of all texts under which data that fit nothing do fit, None where there is none."""
    found = {}
    for shift in (-3, -2, -1, 1, 2, 3):
        owner = (image_of + shift) % len(x)
        fit = fit_features(x, v, owner)
        found[shift] = float(fit.pictures.pairs(owner, np.arange(len(owner))).mean())
    best = max(found, key=lambda shift: found[shift])
    return best if found[best] >= NO_FIT else None


def _fit_of_groups(fit: Fit, rows: Rows, shift: int) -> float:
    """The mean z of images with the texts of the images ``shift`` rows further on."""
    texts = np.flatnonzero(np.isin(fit.image_of, rows + shift))
    return float(fit.pictures.pairs(fit.image_of[texts] - shift, texts).mean()) if len(texts) else 0.0


def _best_of_groups(fit: Fit, images: Rows, others: Rows) -> Matrix:
    """For each image, its best product with the texts of other images."""
    products: Matrix = fit.pictures.one.rows[images] @ fit.siblings.one.rows[others].T
    found: Matrix = products.max(axis=1)
    return found
