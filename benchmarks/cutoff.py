"""Error rates of the cut-off: held-out texts of a data set asked of all its images, with and without an answer.

    python benchmarks/cutoff.py demo/run --data emoji --label category

Each text of ``--split`` is asked of the collection as it is, where a match exists, and of the collection without its
image, or without every image of the same ``--label``, where none does. First fixed settings of ``--chance``, then
the line that the captions of ``--calibrate`` draw, which has not seen the texts that judge it. With ``--alike Q``,
other good answers are left out as well, both to draw the line and to judge it: images one of whose texts is as near
to the text asked as the Q-quantile of the cosines between texts of one image. Of several runs (seeds), the mean and
how far they are from it at most.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.formats import open_captions
from diptych.errors import SettingsError
from diptych.index.query.cutoff import (
    TOLERABLE,
    Calibration,
    background,
    calibrate,
)
from diptych.model.retriever import Retriever
from diptych.training.prepare import prepare

CHANCES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


@dataclass(frozen=True, slots=True)
class CutoffRates:
    """Error rates of the cut-off at one setting of ``chance``, each over ``queries`` questions.

    ``false_none``: a match is there and "nothing matches" is said. ``false_match``: none is there and one is
    claimed.
    """

    chance: float
    false_none: float
    false_match: float
    queries: int


def measure_cutoff(
    scores: Any,
    relevant: Sequence[Sequence[int]],
    without: Sequence[Sequence[int]] | None = None,
    chances: Sequence[float] = CHANCES,
) -> list[CutoffRates]:
    """Error rates on held-out queries with known answers, for several settings of the cut-off.

    ``scores`` is (queries, items) and ``relevant`` the items that answer each query. Each query is asked
    twice: of the whole collection, where saying "nothing matches" is false, and of the collection without its
    answers (or without ``without``: every item that comes near an answer), where a match is false.
    """
    matrix: NDArray[np.float64] = np.asarray(scores, np.float64)
    missed, claimed = np.zeros(len(chances)), np.zeros(len(chances))
    for row, out in zip(matrix, relevant if without is None else without, strict=True):
        rest = np.delete(row, list(out))
        missed += 1 - _claims(row, chances)
        claimed += _claims(rest, chances)
    n = max(1, len(matrix))
    return [
        CutoffRates(chance, float(none) / n, float(match) / n, len(matrix))
        for chance, none, match in zip(chances, missed, claimed, strict=True)
    ]


def _claims(values: NDArray[np.float64], chances: Sequence[float]) -> NDArray[np.float64]:
    """1 for each setting at which a match would be claimed, else 0."""
    found = background(values, len(values))
    if found is None:
        raise SettingsError(f"a collection of {len(values)} items is too small to measure the cut-off.")
    return np.array([float(values.max() >= found.cutoff(chance)) for chance in chances])


def main() -> None:
    """Print one line for each setting of the cut-off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of trained models")
    parser.add_argument("--data", default="emoji")
    parser.add_argument("--split", default="test", help="the split whose texts are asked, or 'all'")
    parser.add_argument("--calibrate", default="val", help="the split whose texts draw the line")
    parser.add_argument("--label", help="leave out every image that shares this label with the answer")
    parser.add_argument("--alike", type=float, metavar="Q", help="leave out other good answers too (0 to 1)")
    given = parser.parse_args()
    captions = open_captions(given.data)
    splits = np.array([captions.splits[image] for image in captions.image_of])
    asked = np.flatnonzero((splits == given.split) | (given.split == "all"))
    drawing = np.flatnonzero(splits == given.calibrate)
    own = [[int(image)] for image in captions.image_of]
    out = own
    if given.label:
        values = np.array([str(value) for value in captions.labels[given.label]])
        out = [np.flatnonzero(values == values[image]).tolist() for (image,) in own]
    fixed: list[list[CutoffRates]] = []
    lines: list[tuple[Calibration, float, float]] = []
    for run in given.runs:
        model = Retriever.from_pretrained(run)
        ready = prepare(model, captions, show_progress=False)
        images, texts = (
            model.encode_image(ready.captions.images).numpy(),
            model.encode_text(ready.texts).numpy(),
        )
        scores = texts[asked] @ images.T
        drawn_without = own
        if given.alike is not None:
            out = drawn_without = alike(texts, captions.image_of, given.alike)
        fixed.append(measure_cutoff(scores, [own[n] for n in asked], [out[n] for n in asked]))
        drawn = calibrate(texts[drawing], [drawn_without[n] for n in drawing], images)
        if drawn is not None:
            lines.append((drawn, *judged(drawn, scores, [out[n] for n in asked])))
    print(
        f"{captions.name}: {len(captions.images)} images, {len(asked)} texts of the split {given.split}, "
        f"{len(fixed)} runs"
    )
    print(f"without: {'images of the same ' + given.label if given.label else 'the image of the text'}")
    print(f"{'chance':>12}{'match denied':>20}{'match claimed':>20}")
    for n, chance in enumerate(CHANCES):
        same = [rates[n] for rates in fixed]
        denied, claimed = spread([one.false_none for one in same]), spread([one.false_match for one in same])
        print(f"{chance:12.2f}{denied:>20}{claimed:>20}")
    if lines:
        denied, claimed = spread([line[1] for line in lines]), spread([line[2] for line in lines])
        print(f"{'calibrated':>12}{denied:>20}{claimed:>20}")
        on = sum(line[0].usable for line in lines)
        print(
            f"on {len(drawing)} texts of the split {given.calibrate} itself: {lines[0][0]}; "
            f"on in {on} of {len(lines)} runs (both errors at most {100 * TOLERABLE:.0f} %)"
        )


def alike(texts: np.ndarray, image_of: np.ndarray, share: float) -> list[list[int]]:
    """For each text, its image and those that have a text as near to it as texts of one image are to each other."""
    order = np.argsort(image_of, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(image_of[order])) + 1)
    cosines = [(texts[group] @ texts[group].T)[np.triu_indices(len(group), 1)] for group in groups]
    least = float(np.quantile(np.concatenate(cosines), share))
    return [
        np.union1d(image_of[texts @ text >= least], [image_of[n]]).tolist() for n, text in enumerate(texts)
    ]


def judged(line: Calibration, scores: np.ndarray, out: list[list[int]]) -> tuple[float, float]:
    """The shares of texts whose match is denied, and for which one is claimed without its answers."""
    denied = claimed = 0
    for row, gone in zip(scores.astype(np.float64), out, strict=True):
        whole, rest = background(row, len(row)), np.delete(row, gone)
        left = background(rest, len(rest))
        assert whole is not None
        assert left is not None
        denied += row.max() < whole.calibrated(line)
        claimed += rest.max() >= left.calibrated(line)
    return denied / len(scores), claimed / len(scores)


def spread(shares: list[float]) -> str:
    """The mean of some shares in percent, and how far the farthest is from it."""
    mean = sum(shares) / len(shares)
    farthest = max(abs(share - mean) for share in shares)
    return f"{100 * mean:.1f} ± {100 * farthest:.1f} %" if len(shares) > 1 else f"{100 * mean:.1f} %"


if __name__ == "__main__":
    main()
