"""Compare runs, or reports saved before: what ``diptych compare`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.errors import SettingsError
from diptych.evaluation.cards import Card
from diptych.evaluation.compare import Comparison, compare
from diptych.evaluation.report import Report
from diptych.runs.evaluate import evaluate_runs


def compare_runs(
    first: Sequence[Path], second: Sequence[Path], *, draws: int = 10_000, **options: Any
) -> Comparison:
    """Second against first, each one or several seeds: a saved report (a file), or a run (a folder) to evaluate now.

    Without ``second`` the first two are compared. ``options`` go to ``evaluate_runs``.
    """
    if not second:
        if len(first) != 2:
            raise SettingsError(
                f"{len(first)} results and no --with: give two, or those of one side, then --with and the others."
            )
        first, second = first[:1], first[1:]
    for path in first:
        if any(path.resolve() == other.resolve() for other in second):
            raise SettingsError(f"{path} is on both sides: give different runs.")
    reports = [[_report(path, options) for path in side] for side in (first, second)]
    names = [
        [_name(path, report) for path, report in zip(side, found, strict=True)]
        for side, found in zip((first, second), reports, strict=True)
    ]
    return compare(reports[0], reports[1], names=(names[0], names[1]), draws=draws)


def _report(path: Path, options: dict[str, Any]) -> Report:
    return evaluate_runs([path], bootstrap=1000, **options) if path.is_dir() else Report.load(path)


def _name(path: Path, report: Report) -> str:
    """The folder of the run: as given, as the report says, or else the report's own name."""
    run = report.card.run if isinstance(report.card, Card) else ""
    return str(path) if path.is_dir() or not run else run
