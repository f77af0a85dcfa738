"""Check a claimed number: scores under every protocol that people confuse. What ``diptych judge`` does.

Each reading of the scores is a choice of images, texts and pairs, which the evaluator of ``diptych evaluate`` measures;
there is no metric here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.data.arrays import as_rows, check_rows, read_array, unit_rows
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.problems import ToBeLeftOut
from diptych.errors import DataError, SettingsError
from diptych.evaluation.cards import Card, direction_words
from diptych.evaluation.metrics import DIRECTIONS, KS
from diptych.evaluation.protocols import EvaluationProtocol
from diptych.evaluation.report import aligned_rows
from diptych.evaluation.retrieval import evaluate_scores
from diptych.evaluation.score_matrix import read_scores
from diptych.evaluation.trec import Queries, read_runs, run_queries, write_qrels, write_run
from diptych.model.scores import EmbeddingScores, Fold, MatrixScores, Scores

FOLD = 1000  # images of COCO's "1K"
ASSUMED = (1, 5)  # texts per image that programs take for granted
BETTER = 2.0  # times the RSUM that another order of the rows must give to be listed
RECALLS = [f"{way}_recall@{k}" for way in DIRECTIONS for k in KS]
HEADS = [f"{way} R@{k}" for way in ("i→t", "t→i") for k in KS]
ROUNDS = 50  # of joining rows and images; what is left keeps its order
BLOCK = 1024  # rows of a matrix looked at together

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Reading:
    """One way to read the scores, in words, with the metrics that it gives."""

    name: str
    metrics: Mapping[str, float]
    tied: bool = False  # whether ties decide some of it
    turned: bool = False  # whether the directions are exchanged

    def exchanged(self) -> Reading:
        """The same where image → text and text → image are taken for each other."""
        one, two = DIRECTIONS
        turned = {
            (name.replace(one, two) if one in name else name.replace(two, one)): value
            for name, value in self.metrics.items()
        }
        return Reading(f"{self.name}, transposed", turned, self.tied, turned=True)


@dataclass(frozen=True)
class Claim:
    """A number that somebody printed, with its digits; ``metric`` is empty where they did not say which it is."""

    text: str
    metric: str

    @staticmethod
    def read(text: str) -> Claim:
        """``81.7``, or ``rsum=480.3``."""
        metric, _, number = text.rpartition("=")
        if not re.fullmatch(r"\d+(\.\d+)?", number):
            raise SettingsError(f"--claimed {text} is no number: give 81.7, or image_to_text_recall@1=81.7.")
        return Claim(number, metric)

    def among(self, reading: Reading) -> list[str]:
        """The metrics of a reading that are printed like that."""
        if self.metric and self.metric not in reading.metrics:
            raise SettingsError(f"--claimed names {self.metric}: use one of {', '.join(reading.metrics)}.")
        names = [self.metric] if self.metric else [*RECALLS, "rsum", "mean_recall"]
        half = 0.5 * 0.1 ** len(self.text.partition(".")[2]) + 1e-9
        return [name for name in names if abs(reading.metrics[name] - float(self.text)) <= half]

    def nearest(self, readings: Sequence[Reading]) -> str:
        """The number that comes nearest, in words."""
        _, value, name, order = min(
            (abs(reading.metrics[name] - float(self.text)), reading.metrics[name], name, reading.name)
            for reading in readings
            for name in ([self.metric] if self.metric else RECALLS)
        )
        return f"nearest to {self.text}: {value:.2f}, {_in_words(name)} under '{order}'."


@dataclass(frozen=True)
class Verdict:
    """The readings of some scores, the right one first, and what they say of the claims."""

    readings: Sequence[Reading]
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()

    @property
    def given_by(self) -> list[tuple[Reading, list[list[str]]]]:
        """The readings that give every claim, each with the metrics that do."""
        named = any(claim.metric for claim in self.claims)  # else a number is found in its own direction
        every = [reading for reading in self.readings if named or not reading.turned]
        found = [(reading, [claim.among(reading) for claim in self.claims]) for reading in every]
        return [(reading, metrics) for reading, metrics in found if self.claims and all(metrics)]

    def render(self) -> str:
        rows = [
            [one.name, *(f"{one.metrics[name]:.1f}" for name in [*RECALLS, "rsum"])] for one in self.readings
        ]
        table = aligned_rows([["", *HEADS, "RSUM"], *rows])
        return "\n".join([*table, "", *self.notes, *self._answer()])

    def _answer(self) -> Iterator[str]:
        if not self.claims:
            return
        claimed = " and ".join(f"{claim.metric} {claim.text}".strip() for claim in self.claims)
        for reading, metrics in self.given_by:
            which = ", ".join(_in_words(name) for names in metrics for name in names)
            yield f"{claimed}: given by '{reading.name}' ({which})."
        if not self.given_by:
            yield f"{claimed}: none of these {len(self.readings)} readings gives that."
            yield from (claim.nearest(self.readings) for claim in self.claims)
        if len(self.claims) == 1 and not self.claims[0].metric and float(self.claims[0].text) <= 100:
            values = {round(reading.metrics[name], 1) for reading in self.readings for name in RECALLS}
            yield (
                f"{len(values) / 10:.0f} % of the numbers from 0.0 to 100.0 stand somewhere in this table: name the "
                f"metric (--claimed {RECALLS[0]}={self.claims[0].text}) or give several --claimed."
            )


def judge(
    files: Sequence[Path],
    data: str,
    *,
    split: str = "test",
    claimed: Sequence[str] = (),
    fold: int = FOLD,
    trec: Path | None = None,
) -> Verdict:
    """Measure the scores of a file under every reading; see ``readings``.

    ``files`` are a score matrix (images, texts), the vectors of the images and of the texts, or one or two TREC runs.
    ``trec`` is a folder that the scores are written to, as runs and qrels.
    """
    claims = [Claim.read(text) for text in claimed]
    captions = open_captions(data, split=split, problems=ToBeLeftOut())
    subject, notes = fitted_scores(_read(files, captions), captions, fold)
    if trec is not None:
        _write(trec, subject, captions)
    if not subject.complete:
        notes.append("The runs do not list every pair, so folds, single texts and orders cannot be judged.")
    return Verdict(list(readings(subject, fold)), claims, notes)


@dataclass(frozen=True)
class Subject:
    """Scores with the image of each text (M,) and the ids of the images; ``complete``: of every pair."""

    scores: Scores
    image_of: Rows
    ids: Sequence[str]
    complete: bool = True

    def part(self, images: Rows, texts: Rows, image_of: Rows) -> Subject:
        fold = Fold(self.scores, torch.from_numpy(images), torch.from_numpy(texts))
        return Subject(fold, image_of, [self.ids[row] for row in images], self.complete)

    def measure(self, name: str, folds: int = 1, ties: str = "index") -> Reading:
        protocol = EvaluationProtocol(name, folds=folds)
        report = evaluate_scores(self.scores, self.image_of, protocol=protocol, ties=ties, bootstrap=0)
        assert isinstance(report.card, Card)
        return Reading(name, report.metrics, any(report.card.tied_queries.values()))


def readings(subject: Subject, fold: int = FOLD) -> Iterator[Reading]:
    """Every reading: all images, the first fold and the mean over folds, each with what people get wrong."""
    images = subject.scores.shape[0]
    lost = list(_orders(subject)) if subject.complete else []
    galleries = [(f"all {images:,} images", images, 1)]
    if subject.complete and images > fold:
        galleries.append((f"the first {fold:,} images", fold, 1))
        if images % fold == 0:
            galleries.append((f"{images // fold} folds of {fold:,} images", images, images // fold))
    for name, count, folds in galleries:
        texts = np.flatnonzero(subject.image_of < count)
        owner = subject.image_of[texts]
        if not np.bincount(owner // (count // folds), minlength=folds).all():
            continue  # nothing can be asked of a fold without a text
        right = subject if count == images else subject.part(np.arange(count), texts, owner)
        yield from _variants(right, name, folds)
        for order, rows in lost:
            other = subject.part(rows[:count], texts, owner)
            yield other.measure(f"{name}, {order}", folds)


def _variants(right: Subject, name: str, folds: int) -> Iterator[Reading]:
    """One gallery: as it is right, and with one mistake."""
    reading = right.measure(name, folds)
    yield reading
    if reading.tied:
        for ties, side in (("strict", "for"), ("pessimistic", "against")):
            yield right.measure(f"{name}, ties broken {side} the model", folds, ties)
    yield reading.exchanged()
    if not right.complete:
        return
    owner, images = right.image_of, np.arange(right.scores.shape[0])
    counts = np.bincount(owner, minlength=len(images))
    described, first = np.unique(owner, return_index=True)
    if counts.max() > 1:
        single = right.part(images, first, described)
        yield single.measure(f"{name}, first text only", folds)
        order = np.argsort(owner, kind="stable")
        repeated = right.part(owner[order], order, np.arange(len(order)))
        if len(order) % folds == 0:
            times = f"{counts.max()} times" if counts.min() == counts.max() else "once for each text"
            for ties, copies in (("strict", ""), ("index", ", copies before the own one count")):
                yield repeated.measure(f"{name}, images repeated {times}{copies}", folds, ties)
    for assumed in ASSUMED:
        count = min(len(images), len(owner) // assumed)
        pairs = np.repeat(np.arange(count), assumed)
        if count and count % folds == 0 and not np.array_equal(pairs, owner):
            texts = "1 text" if assumed == 1 else f"{assumed} texts"
            other = right.part(images[:count], np.arange(len(pairs)), pairs)
            yield other.measure(f"{name}, {texts} per image assumed", folds)


# --- an order that was lost


def _orders(subject: Subject) -> Iterator[tuple[str, Rows]]:
    """The order that the rows are in, as the row of every image, where they fit it better than that of the data."""
    numbers = [re.findall(r"\d+", id) for id in subject.ids]
    orders = {"rows sorted by id": np.argsort(np.argsort(np.array(subject.ids), kind="stable"))}
    if all(numbers):
        by_number = np.argsort([int(one[-1]) for one in numbers], kind="stable")
        orders["rows sorted by the number in their id"] = np.argsort(by_number)
    orders["row order lost: the order that fits best"] = _best_order(subject)
    texts, usual = np.arange(len(subject.image_of)), subject.measure("").metrics["rsum"]
    for order, rows in orders.items():
        other = subject.part(rows, texts, subject.image_of).measure("")
        if other.metrics["rsum"] > BETTER * usual:
            yield order, rows
            return


def _best_order(subject: Subject) -> Rows:
    """The row of each image: rows and images that fit each other best are joined, then the best of the rest."""
    images = subject.scores.shape[0]
    described, counts = np.unique(subject.image_of, return_counts=True)
    order = torch.from_numpy(np.argsort(subject.image_of, kind="stable"))
    starts = np.cumsum(counts) - counts
    blocks = [subject.scores.tile(slice(start, start + BLOCK), order) for start in range(0, images, BLOCK)]
    means = np.concatenate([np.add.reduceat(block.numpy(), starts, axis=1) for block in blocks]) / counts
    means -= means.mean(axis=0)
    row_of = np.full(images, -1, np.int64)
    for _ in range(ROUNDS):
        if not (open_images := np.flatnonzero(row_of[described] < 0)).size:
            break
        best = means[:, open_images].argmax(axis=0)  # the row of each image
        back = means[best].argmax(axis=1)  # the image of each such row
        agreed = back == open_images
        row_of[described[open_images[agreed]]] = best[agreed]
        means[best[agreed]] = means[:, open_images[agreed]] = -np.inf
    row_of[row_of < 0] = np.setdiff1d(np.arange(images), row_of)
    return row_of


# --- files


def _read(files: Sequence[Path], captions: Captions) -> Scores:
    """The scores of the files; pairs that runs do not list score −∞."""
    arrays = [path.suffix == ".npy" for path in files]
    if all(arrays) and len(files) == 1:
        scores = read_scores(files[0])
        for start in range(0, scores.shape[0], BLOCK):
            wrong = torch.nonzero(~torch.isfinite(scores.tile(slice(start, start + BLOCK), slice(None))))
            if len(wrong):
                row, column = wrong[0].tolist()
                raise DataError(
                    f"{files[0]} holds NaN or infinity (row {start + row}, column {column}): write finite scores."
                )
        return scores
    if all(arrays) and len(files) == 2:
        sides = [_vectors(path) for path in files]
        return EmbeddingScores(sides[0], sides[1])
    if any(arrays) or len(files) > 2:
        raise SettingsError(
            f"{len(files)} files: give a score matrix (.npy), the vectors of images and of texts (two .npy), or one or "
            "two TREC runs."
        )
    runs = {run_queries(path, captions): path for path in files}
    if len(runs) < len(files):
        raise SettingsError(f"{files[0]} and {files[1]} are runs of the same direction: give one of each.")
    return read_runs(captions, image_to_text=runs.get("images"), text_to_image=runs.get("texts"))


def _vectors(path: Path) -> torch.Tensor:
    rows = as_rows(read_array(path), str(path))
    check_rows(rows, str(path))
    return torch.from_numpy(unit_rows(rows))


def fitted_scores(scores: Scores, captions: Captions, fold: int) -> tuple[Subject, list[str]]:
    """The scores of the captions, or of those that the file has by its shape; and what was found of the file."""
    owner, ids = captions.image_of, captions.image_ids
    first = np.unique(owner, return_index=True)[1]
    shapes: dict[tuple[int, int], tuple[str, int, Rows]] = {}
    for images, part in ((len(ids), ""), (min(fold, len(ids)), f"the first {fold:,} images only")):
        for texts, which in (
            (np.arange(len(owner)), ""),
            (first, "one text of each image, taken for the first"),
        ):
            kept = texts[owner[texts] < images]
            held = ", ".join(filter(None, [part, which]))
            shapes.setdefault((images, len(kept)), (held, images, kept))
    shape, notes = scores.shape, []
    if shape not in shapes and shape[::-1] in shapes:
        scores, shape = _turned(scores), shape[::-1]
        notes.append("The file is transposed: it holds (texts, images).")
    if shape not in shapes and (copies := _copies(scores, owner)) is not None:
        scores = Fold(scores, torch.from_numpy(copies), torch.arange(shape[1]))
        shape = scores.shape
        notes.append("Each image stands in the file once for each of its texts: copies are left out.")
    if shape not in shapes:
        raise DataError(
            f"the scores are {shape[0]:,} × {shape[1]:,}, but {captions.name} has {len(ids):,} images and "
            f"{len(owner):,} texts: give the scores (images, texts) of this split."
        )
    held, images, texts = shapes[shape]
    if held:
        notes.append(f"The file holds {held}.")
    listed = scores.kind != "run" or bool(torch.isfinite(scores.tile(slice(None), slice(None))).all())
    return Subject(scores, owner[texts], ids[:images], listed), notes


def _turned(scores: Scores) -> Scores:
    if isinstance(scores, EmbeddingScores):
        return EmbeddingScores(scores.text, scores.image)
    assert isinstance(scores, MatrixScores)
    return MatrixScores(scores.matrix.T)


def _copies(scores: Scores, owner: Rows) -> Rows | None:
    """The first row of each image, where the file has a row for each text and those of an image are equal."""
    if scores.shape != (len(owner), len(owner)):
        return None
    _, first, image = np.unique(owner, return_index=True, return_inverse=True)
    for start in range(0, len(owner), BLOCK):
        rows = torch.arange(start, min(start + BLOCK, len(owner)))
        same = torch.from_numpy(first[image[rows.numpy()]])
        if not torch.equal(scores.tile(rows, slice(None)), scores.tile(same, slice(None))):
            return None
    return first


def _write(folder: Path, subject: Subject, captions: Captions) -> None:
    """The scores as runs of both directions, with qrels."""
    if subject.scores.shape != (len(captions.images), len(captions.texts)):
        raise SettingsError("--trec needs the scores of every image and text: give all, or leave --trec out.")
    folder.mkdir(parents=True, exist_ok=True)
    sides: dict[str, Queries] = {DIRECTIONS[0]: "images", DIRECTIONS[1]: "texts"}
    for way, side in sides.items():
        write_run(folder / f"{way}.run", subject.scores, captions, side)
        write_qrels(folder / f"{way}.qrels", captions, side)


def _in_words(metric: str) -> str:
    """``image → text R@1``."""
    way = next((way for way in DIRECTIONS if metric.startswith(way)), "")
    rest = metric.removeprefix(f"{way}_").replace("recall@", "R@").replace("_", " ").replace("rsum", "RSUM")
    return f"{direction_words(way)} {rest}".strip()
