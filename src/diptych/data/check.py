"""The check of a data set: everything that is wrong with it, in one report.

Errors are what reading refuses, unreadable images, and images in two splits; warnings are duplicates, near-duplicates
and images without a text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diptych.data.captions import Captions, first_of_each
from diptych.data.duplicates import Look, across, groups, near_groups, normal_text
from diptych.data.formats import Format, find, split_options
from diptych.data.problems import AllProblems, Problem
from diptych.errors import DataError
from diptych.progress import counted, printable, track
from diptych.storage import expanded

MOST_NAMES = 4  # images of a group a message names before it counts the rest


@dataclass(frozen=True)
class SplitSummary:
    """Counts of one split."""

    images: int
    texts: int
    fewest: int  # texts of an image
    most: int

    @property
    def per_image(self) -> str:
        """Texts per image in words."""
        if self.fewest == self.most:
            return str(self.most)
        return f"{self.fewest}–{self.most}, {self.texts / self.images:.2f} on average"


@dataclass(frozen=True)
class CheckReport:
    """What a check found: the format, the counts of each split, and every problem."""

    path: str
    format: str | None
    splits: dict[str, SplitSummary] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def warnings(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "warning"]

    @property
    def ok(self) -> bool:
        """Whether the data can be used as it is."""
        return not self.errors

    def render(self, limit: int | None = 10) -> str:
        """The report as text: of each kind of warning the first ``limit`` (None for all), then every error."""
        lines = [f"{self.path}: {self.format or 'no known format'}"]
        if self.splits:
            lines.append(f"  {'split':10} {'images':>9} {'texts':>9}   texts per image")
        for name, split in self.splits.items():
            lines.append(f"  {name:10} {split.images:>9,} {split.texts:>9,}   {split.per_image}")
        lines += self._list(self.warnings, limit)
        lines += self._list(self.errors, None)  # last, where they are seen
        counts = f"{counted(len(self.errors), 'error')}, {counted(len(self.warnings), 'warning')}"
        textless = self.splits and not any(split.texts for split in self.splits.values())
        fit = "ok to index, without texts to train on" if textless else "ok"
        lines.append(f"{fit if self.ok else 'not ok'}: {counts}")
        return "\n".join(lines)

    def _list(self, problems: Sequence[Problem], limit: int | None) -> Iterator[str]:
        for kind, count in Counter(problem.kind for problem in problems).items():
            of_kind = [problem for problem in problems if problem.kind == kind]
            yield f"{of_kind[0].severity}: {kind} ({count:,})"
            for problem in of_kind[:limit]:
                yield f"  {printable(str(problem))}".replace(f"{self.path}: ", "", 1)
            if limit is not None and count > limit:
                yield f"  ... and {count - limit:,} more"

    def as_dict(self) -> dict[str, Any]:
        """The whole report as a JSON value."""
        return {**asdict(self), "ok": self.ok}


def check(
    path: str | Path,
    *,
    format: str | None = None,
    open_images: bool = True,
    show_progress: bool = True,
    **options: Any,
) -> CheckReport:
    """Check a data set of any known format; without ``open_images`` only files, counts and texts are."""
    problems = AllProblems()
    path, own = split_options(path)
    options = {**own, **options}
    try:
        data_format = find(path, format, options)
    except DataError as error:
        problems.raised("format", path, error)
        return CheckReport(str(path), None, problems=problems.all)
    data_format.refuse_unknown(options)
    parts = list(_read(data_format, expanded(path), problems, options))
    for captions in parts:
        _check_texts(captions, problems)
        _check_labels(captions, problems)
        if open_images:
            _check_images(captions, problems, show_progress)
    summary = {name: split for captions in parts for name, split in _summarise(captions).items()}
    if not summary and not problems.all:
        problems.error("empty", path, "there is no image in it", data_format.description)
    return CheckReport(str(path), data_format.name, summary, list(dict.fromkeys(problems.all)))


def _read(kind: Format, place: Path, problems: AllProblems, options: dict[str, Any]) -> Iterator[Captions]:
    """All splits together, then those that are only read by themselves."""
    try:
        captions = kind.captions(place, options, problems)
        yield captions
        for split in kind.splits(place) if kind.splits else ():
            if split not in captions.splits:
                alone = kind.captions(place, {**options, "split": split}, problems)
                if len(alone.images):
                    yield alone
    except DataError as error:
        problems.raised("unreadable", place, error)


def _summarise(captions: Captions) -> dict[str, SplitSummary]:
    per_image = np.bincount(captions.image_of, minlength=len(captions.images))
    summary = {}
    for name in dict.fromkeys(captions.splits):
        counts = per_image[[split == name for split in captions.splits]]
        summary[name] = SplitSummary(len(counts), int(counts.sum()), int(counts.min()), int(counts.max()))
    return summary


def _check_texts(captions: Captions, problems: AllProblems) -> None:
    name, texts, owner = captions.name, captions.texts, captions.image_of
    without = sorted(set(range(len(captions.images))) - set(owner.tolist()))
    if without and len(without) == len(captions.images):
        problems.warn("no text", name, "no image has a text", "texts are needed to train and evaluate")
    for row in without if len(without) < len(captions.images) else ():
        problems.warn("no text", name, f"image {_name(captions, row)} has no text")
    exact = groups(texts)
    for places in exact:
        rows = sorted({int(owner[place]) for place in places})
        times_of = Counter(int(owner[place]) for place in places)
        for row in (row for row, times in times_of.items() if times > 1):
            problems.warn(
                "repeated text", name, f"image {_name(captions, row)} has '{texts[places[0]]}' twice"
            )
        if len(rows) > 1:
            problems.warn("duplicate text", name, f"'{texts[places[0]]}' belongs to {_names(captions, rows)}")
    for places in groups(map(normal_text, texts)):
        forms = list(dict.fromkeys(texts[place] for place in places))
        rows = sorted({int(owner[place]) for place in places})
        if len(forms) > 1:
            both = " and ".join(f"'{form}'" for form in forms[:2])
            problems.warn("near-duplicate text", name, f"{both} say the same, of {_names(captions, rows)}")


def _check_labels(captions: Captions, problems: AllProblems) -> None:
    for column, values in captions.labels.items():
        for row, value in enumerate(values):
            if not _is_label(value):
                message = f"image {_name(captions, row)} has {type(value).__name__} {value!r:.60} in column '{column}'"
                expected = "a finite number, a text, true, false, or a list of them, or it is not indexed"
                problems.warn("label", captions.name, message, expected)


def _is_label(value: Any, nested: bool = False) -> bool:
    """Whether an index can store a label as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return not math.isinf(value)
    if isinstance(value, list | tuple) and not nested:
        return all(_is_label(one, nested=True) for one in value)
    return value is None or isinstance(value, str | bool | int)


def _check_images(captions: Captions, problems: AllProblems, show_progress: bool) -> None:
    name = captions.name
    readable: list[int] = []
    keys: list[str] = []
    looks: list[Look] = []
    for row in track(range(len(captions.images)), "opening images", show=show_progress):
        try:
            item = captions.images[row]
            key = captions.images.content_key(row)
        except DataError as error:
            problems.raised("unreadable image", f"{name}, image {_name(captions, row)}", error)
            continue
        if isinstance(item, Image.Image):
            looks.append(Look.of(item))
        elif not np.isfinite(item).all():
            problems.error("features", name, f"image {_name(captions, row)} has features that are not finite")
        readable.append(row)
        keys.append(key)
    for places in groups(keys):
        rows = [readable[place] for place in places]
        if across(rows, captions.splits):
            message = f"one image is in several splits, as {_names(captions, rows)}"
            problems.error("in two splits", name, message, "leave it in one of them")
        else:
            problems.warn("duplicate image", name, f"{_names(captions, rows)} are the same image")
    if len(looks) < len(readable):
        return  # features, not pictures
    once = np.unique(first_of_each(keys)).tolist()
    for group in near_groups([looks[place] for place in once], show_progress):
        rows = [readable[once[place]] for place in group]
        if across(rows, captions.splits):
            message = f"{_names(captions, rows)} look the same, in several splits: a leak if they are"
            problems.warn("near-duplicate in two splits", name, message)
        else:
            problems.warn("near-duplicate image", name, f"{_names(captions, rows)} look the same")


def _name(captions: Captions, row: int) -> str:
    return f"'{captions.image_ids[row]}' ({captions.splits[row]})"


def _names(captions: Captions, rows: Sequence[int]) -> str:
    names = [_name(captions, row) for row in rows[:MOST_NAMES]]
    if len(rows) > MOST_NAMES:
        names.append(f"{len(rows) - MOST_NAMES} more")
    return "image " + names[0] if len(names) == 1 else f"images {', '.join(names[:-1])} and {names[-1]}"
