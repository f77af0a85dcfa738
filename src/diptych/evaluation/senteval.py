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
from collections.abc import Iterator, Sequence
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
    """One data set and split, of one or several files. ``averaged``: one of the seven that papers average."""

    name: str
    split: str
    files: Sequence[Sentences]
    averaged: bool

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
    return any((place / "STS").is_dir() or (place / "SICK").is_dir() for place in _places(Path(folder)))


def read_senteval(folder: str | Path) -> SentEval:
    """Every STS set of a SentEval ``data`` folder (or of its ``downstream``), and what is missing."""
    root = _root(Path(folder))
    sets: list[SentenceSet] = []
    missing: list[str] = []
    for year, names in YEARS.items():
        place = root / "STS" / f"{year}-en-test"
        absent = [
            file for name in names for file in (_input(name), _gold(name)) if not (place / file).is_file()
        ]
        if len(absent) == 2 * len(names):
            missing.append(f"{year} ({place.relative_to(root.parent)})")
        elif absent:
            missing.append(f"{year} ({place.relative_to(root.parent)} lacks {', '.join(absent)})")
        else:
            sets.append(SentenceSet(year, "test", [_sub_file(place, name) for name in names], averaged=True))
    benchmark, sick = root / "STS" / "STSBenchmark", root / "SICK"
    for name, split, path, averaged in (
        ("STS-B", "test", benchmark / "sts-test.csv", True),
        ("STS-B", "dev", benchmark / "sts-dev.csv", False),
        ("SICK-R", "test", sick / "SICK_test_annotated.txt", True),
        ("SICK-R", "trial", sick / "SICK_trial.txt", False),
    ):
        if path.is_file():
            file = _sts_b(path) if name == "STS-B" else _sick(path)
            sets.append(SentenceSet(name, split, [file], averaged))
        elif averaged:
            missing.append(f"{name} {split} ({path.relative_to(root.parent)})")
    if not sets:
        raise DataError(
            f"{folder} holds none of the STS sets (looked for downstream/STS and downstream/SICK): give the "
            "folder that SentEval calls data."
        )
    return SentEval(sets, missing)


def _root(folder: Path) -> Path:
    """The folder called ``downstream``."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder: give the one that holds downstream/STS and downstream/SICK."
        )
    for place in _places(folder):
        if (place / "STS").is_dir() or (place / "SICK").is_dir():
            return place
    raise DataError(
        f"{folder} holds no downstream/STS and no downstream/SICK: give the folder that SentEval calls data."
    )


def _places(folder: Path) -> tuple[Path, Path]:
    return folder / "downstream", folder


def _input(name: str) -> str:
    return f"STS.input.{name}.txt"


def _gold(name: str) -> str:
    return f"STS.gs.{name}.txt"


def _sub_file(place: Path, name: str) -> Sentences:
    """One sub-file of a year: sentences and gold scores line by line in two files."""
    path, gold_path = place / _input(name), place / _gold(name)
    lines, golds = _lines(path), _lines(gold_path)
    if len(lines) != len(golds):
        raise DataError(
            f"{gold_path} has {len(golds):,} lines for the {len(lines):,} pairs of {path.name}: the two files "
            "do not belong together, copy both again."
        )
    rows = []
    for number, (line, gold) in enumerate(zip(lines, golds, strict=True), 1):
        if gold.strip():
            first, second = _columns(path, number, line, 2)[:2]
            rows.append((first, second, _score(gold_path, number, gold)))
    return _sentences(name, path, rows)


def _sts_b(path: Path) -> Sentences:
    rows = []
    for number, line in enumerate(_lines(path), 1):
        cells = _columns(path, number, line, 7)
        rows.append((cells[5], cells[6], _score(path, number, cells[4])))
    return _sentences(path.stem, path, rows)


def _sick(path: Path) -> Sentences:
    rows = []
    for number, line in enumerate(_lines(path)[1:], 2):
        cells = _columns(path, number, line, 4)
        rows.append((cells[1], cells[2], _score(path, number, cells[3])))
    return _sentences(path.stem, path, rows)


def _sentences(name: str, path: Path, rows: Sequence[tuple[str, str, float]]) -> Sentences:
    if not rows:
        raise DataError(f"{path} holds no pair with a gold score: copy it again.")
    first, second, gold = zip(*rows, strict=True)
    return Sentences(name, list(first), list(second), np.array(gold))


def _lines(path: Path) -> list[str]:
    """Lines that end in a newline only: sentences contain other separators that ``splitlines`` would take."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start + 1}): copy it again.") from error
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _columns(path: Path, number: int, line: str, least: int) -> list[str]:
    """Tab-separated cells, runs of white space in each made one space."""
    cells = [" ".join(cell.split()) for cell in line.split("\t")]
    if len(cells) < least:
        raise DataError(
            f"{path}:{number} has {len(cells)} columns, {least} are needed: columns are separated by tabs."
        )
    return cells


def _score(path: Path, number: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}:{number} has the gold score '{text.strip()[:20]}', which is not a number.")
    return value


def texts_of(sets: Sequence[SentenceSet]) -> list[str]:
    """Every distinct sentence of some sets, in order: what a model has to encode."""
    return list(dict.fromkeys(_all(sets)))


def _all(sets: Sequence[SentenceSet]) -> Iterator[str]:
    for one in sets:
        for file in one.files:
            yield from file.first
            yield from file.second
