"""Pairs of sentences with gold similarities, in SentEval's layout: STS 2012–2016, STS-B and SICK-R.

================================================  ==========================================================
``downstream/STS/STS12-en-test/STS.input.X.txt``  two sentences per line, separated by a tab, for each sub-file X
``downstream/STS/STS12-en-test/STS.gs.X.txt``     the gold score of each line; an empty line has none and is skipped
``downstream/STS/STSBenchmark/sts-test.csv``      tab-separated: score in column 5, sentences in columns 6 and 7
``downstream/SICK/SICK_test_annotated.txt``       a header, then pair, sentence A, sentence B, score
================================================  ==========================================================

A set that is not there is named, never guessed: of a year with a sub-file missing nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych.errors import DataError

YEARS = {
    "STS12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "STS13": ("FNWN", "headlines", "OnWN"),  # without SMT, as SentEval
    "STS14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "STS15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "STS16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
SEVEN = (*YEARS, "STS-B", "SICK-R")  # the sets whose test splits papers average


@dataclass(frozen=True)
class Sentences:
    """Pairs of one file: row i of ``first`` and ``second`` with its gold similarity."""

    name: str
    first: Sequence[str]
    second: Sequence[str]
    gold: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.gold)


@dataclass(frozen=True)
class SentenceSet:
    """One data set and split, of one or several files."""

    name: str
    split: str
    files: Sequence[Sentences]

    def __len__(self) -> int:
        return sum(len(file) for file in self.files)


@dataclass(frozen=True)
class SentEval:
    """The sets a folder holds, and what it lacks of the seven, in words."""

    sets: Sequence[SentenceSet]
    missing: Sequence[str] = field(default_factory=tuple)

    @property
    def complete(self) -> bool:
        """Whether all seven test sets are there, so that their average can be compared with papers."""
        return not self.missing


def is_senteval(folder: str | Path) -> bool:
    """Whether a folder is SentEval's ``data`` or its ``downstream``."""
    return _root(Path(folder)) is not None


def read_senteval(folder: str | Path) -> SentEval:
    """Every STS set of a SentEval ``data`` folder (or of its ``downstream``), and what is missing."""
    if not Path(folder).is_dir():
        raise DataError(f"{folder} is no folder: give the one that holds downstream/STS and downstream/SICK.")
    root = _root(Path(folder))
    if root is None:
        raise DataError(
            f"{folder} holds no downstream/STS and no downstream/SICK: give the folder that SentEval calls data."
        )
    sets: list[SentenceSet] = []
    missing: list[str] = []
    for year, names in YEARS.items():
        place = root / "STS" / f"{year}-en-test"
        files = [(f"STS.input.{name}.txt", f"STS.gs.{name}.txt") for name in names]
        absent = [file for pair in files for file in pair if not (place / file).is_file()]
        if absent:
            lacks = "" if len(absent) == 2 * len(names) else f" lacks {', '.join(absent)}"
            missing.append(f"{year} ({place.relative_to(root.parent)}{lacks})")
            continue
        parts = [
            _sub_file(name, place / lines, place / gold)
            for name, (lines, gold) in zip(names, files, strict=True)
        ]
        sets.append(SentenceSet(year, "test", parts))
    for name, split, file in (
        ("STS-B", "test", "STS/STSBenchmark/sts-test.csv"),
        ("STS-B", "dev", "STS/STSBenchmark/sts-dev.csv"),
        ("SICK-R", "test", "SICK/SICK_test_annotated.txt"),
        ("SICK-R", "trial", "SICK/SICK_trial.txt"),
    ):
        path = root / file
        if path.is_file():
            rows = _table(path, 0, 7, (5, 6, 4)) if name == "STS-B" else _table(path, 1, 4, (1, 2, 3))
            sets.append(SentenceSet(name, split, [_sentences(path.stem, path, rows)]))
        elif split == "test":
            missing.append(f"{name} {split} ({path.relative_to(root.parent)})")
    if not sets:
        raise DataError(
            f"{folder} holds none of the STS sets (looked for downstream/STS and downstream/SICK): give the "
            "folder that SentEval calls data."
        )
    return SentEval(sets, missing)


def pairs_to_train(folder: str | Path) -> int:
    """Pairs of STS-B's training split, which no evaluation reads; 0 where the file is missing."""
    root = _root(Path(folder))
    path = root / "STS" / "STSBenchmark" / "sts-train.csv" if root else None
    return len(text_lines(path)) if path and path.is_file() else 0


def _root(folder: Path) -> Path | None:
    """The folder called ``downstream``."""
    places = (folder / "downstream", folder)
    return next((place for place in places if (place / "STS").is_dir() or (place / "SICK").is_dir()), None)


def _sub_file(name: str, path: Path, gold_path: Path) -> Sentences:
    """One sub-file of a year: sentences and gold scores line by line in two files."""
    lines, golds = text_lines(path), text_lines(gold_path)
    if len(lines) != len(golds):
        raise DataError(
            f"{gold_path} has {len(golds):,} lines for the {len(lines):,} pairs of {path.name}: the two files "
            "do not belong together, copy both again."
        )
    rows = []
    for number, (line, gold) in enumerate(zip(lines, golds, strict=True), 1):
        if gold.strip():
            first, second = _cells(path, number, line, 2)[:2]
            rows.append((first, second, _score(gold_path, number, gold)))
    return _sentences(name, path, rows)


def _table(path: Path, skip: int, least: int, columns: tuple[int, int, int]) -> list[tuple[str, str, float]]:
    """Both sentences and the score of each line, behind a header."""
    rows, (first, second, score) = [], columns
    for number, line in enumerate(text_lines(path)[skip:], skip + 1):
        cells = _cells(path, number, line, least)
        rows.append((cells[first], cells[second], _score(path, number, cells[score])))
    return rows


def _sentences(name: str, path: Path, rows: Sequence[tuple[str, str, float]]) -> Sentences:
    if not rows:
        raise DataError(f"{path} holds no pair with a gold score: copy it again.")
    first, second, gold = zip(*rows, strict=True)
    return Sentences(name, list(first), list(second), np.array(gold))


def text_lines(path: Path) -> list[str]:
    """Lines that end in a newline only: sentences contain other separators that ``splitlines`` would take."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start + 1}): copy it again.") from error
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _cells(path: Path, number: int, line: str, least: int) -> list[str]:
    """Tab-separated cells, runs of white space in each made one space."""
    cells = [" ".join(cell.split()) for cell in line.split("\t")]
    if len(cells) < least:
        raise DataError(f"{path}:{number} has {len(cells)} columns, not {least}: separate them by tabs.")
    return cells


def _score(path: Path, number: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}:{number} has the gold score '{text.strip()[:20]}': write a number.")
    return value


def texts_of(sets: Sequence[SentenceSet]) -> list[str]:
    """Every distinct sentence of some sets, in order: what a model has to encode."""
    files = [file for one in sets for file in one.files]
    return list(dict.fromkeys(text for file in files for text in (*file.first, *file.second)))
