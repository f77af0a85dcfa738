"""How well an audit finds planted errors: AUC, precision, the expected number with its interval, a permuted shard.

    python benchmarks/audit.py flickr8k --image_size 176 --draws 20

Features are computed first and kept in the cache; the seconds are CPU time with the features there.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from diptych.audit.findings import lost_order, missing_positives, near_pictures
from diptych.audit.fit import find_wrong, fit_features
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.runs.audit import _vectors, place_of

Rows = NDArray[np.int64]


def exchanged_texts(image_of: Rows, share: float, rng: np.random.Generator) -> Rows:
    """Which text stands in each place, with a share of single texts exchanged."""
    source = np.arange(len(image_of))
    rows = rng.choice(len(source), round(share * len(source)), replace=False)
    source[rows] = np.roll(rows, 1)
    return source


def exchanged_images(image_of: Rows, share: float, rng: np.random.Generator) -> Rows:
    """Which text stands in each place, with a share of images given another image's texts; all have equally many."""
    images = int(image_of.max()) + 1
    owner = np.arange(images)
    rows = rng.choice(images, round(share * images), replace=False)
    owner[rows] = np.roll(rows, 1)
    return texts_of(owner, len(image_of))


def texts_of(owner: Rows, texts: int) -> Rows:
    """The texts of the images ``owner``, where image i has texts i·k to i·k + k − 1."""
    per = texts // len(owner)
    return (owner[:, None] * per + np.arange(per)).ravel()


def auc(score: NDArray[np.float64], bad: NDArray[np.bool_]) -> float:
    """The chance that a wrong pair scores above a right one; ties count half."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    return float((rank[bad].sum() - bad.sum() * (bad.sum() + 1) / 2) / bad.sum() / (~bad).sum())


def row(
    name: str,
    x: NDArray[np.float32],
    v: NDArray[np.float32],
    image_of: Rows,
    kind: str,
    share: float,
    draws: int,
) -> str:
    """One line: means over draws of planted errors."""
    plant = exchanged_texts if kind == "texts" else exchanged_images
    areas, precisions, covered, halves, expected, seconds = [], [], 0, [], [], []
    for seed in range(draws):
        source = plant(image_of, share, np.random.default_rng(seed))
        bad = image_of[source] != image_of
        began = time.process_time()
        wrong = find_wrong(fit_features(x, v[source], image_of))
        seconds.append(time.process_time() - began)
        order = np.lexsort((wrong.z, -wrong.probability))
        areas.append(auc(wrong.probability, bad))
        precisions.append(bad[order[: bad.sum() // 2]].mean())
        covered += int(wrong.low <= bad.sum() <= wrong.high)
        halves.append((wrong.high - wrong.low) / 2 / bad.sum())
        expected.append(wrong.expected / bad.sum())
    return (
        f"| {name}, {share:.0%} of {kind} | {np.mean(areas):.4f} (least {min(areas):.4f}) | {np.mean(precisions):.3f} "
        f"| {np.mean(expected):.2f} | {covered} of {draws} | {np.mean(halves):.0%} (most {max(halves):.0%}) "
        f"| {np.mean(seconds):.1f} |"
    )


def shard(captions: Captions, x: NDArray[np.float32], v: NDArray[np.float32]) -> str:
    """Permute the images of the third shard, and what the audit says of it."""
    places = [place_of(captions.images, image) for image in range(len(captions.images))]
    name = list(dict.fromkeys(places))[2]
    rows = np.flatnonzero(np.array(places) == name)
    owner = np.arange(len(places))
    owner[rows] = np.random.default_rng(0).permutation(rows)
    fit = fit_features(x, v[texts_of(owner, len(v))], captions.image_of)
    found = [
        f"rows {one.first} to {one.last} ({'/'.join(dict.fromkeys(places[one.first : one.last + 1]))}), "
        f"shift {one.shift}, inside {one.inside}"
        for one in lost_order(fit, find_wrong(fit))
    ]
    return f"permuted {name} (rows {rows[0]} to {rows[-1]}): {'; '.join(found) or 'not found'}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--image_size", type=int, default=176)
    parser.add_argument("--draws", type=int, default=20)
    options = parser.parse_args()
    captions = open_captions(options.data)
    every_x, every_v = _vectors(captions, None, options.image_size, "cpu")
    splits = np.array(captions.splits)
    print(
        "| planted | AUC | precision, first half | expected / planted | in the interval | half-width | CPU s |"
    )
    print("|---|---|---|---|---|---|---|")
    for split in ("train", "val"):
        part = captions.split(split)
        x = every_x[splits == split]
        v = every_v[splits[captions.image_of] == split]
        for kind, share in (("texts", 0.05), ("images", 0.05), ("images", 0.2)):
            print(row(split, x, v, part.image_of, kind, share, options.draws), flush=True)
    part = captions.split("train")
    x, v = every_x[splits == "train"], every_v[splits[captions.image_of] == "train"]
    began = time.process_time()
    fit = fit_features(x, v, part.image_of)
    wrong = find_wrong(fit)
    missing, _ = missing_positives(fit, wrong)
    near_pictures(x)
    seconds = time.process_time() - began
    print(
        f"as it is: {wrong.expected:.0f} wrong pairs expected ({wrong.low:.0f} to {wrong.high:.0f}); ", end=""
    )
    print(f"{len(missing):,} missing positives; all of it in {seconds:.1f} s of CPU")
    print(shard(part, x, v))


if __name__ == "__main__":
    main()
