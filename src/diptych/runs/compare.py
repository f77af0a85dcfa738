"""Compare runs, or reports saved before: what ``diptych compare`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.errors import SettingsError
from diptych.evaluation.cards import Card
from diptych.evaluation.compare import Comparison
from diptych.evaluation.compare import compare as compare_reports
from diptych.evaluation.report import Report
from diptych.runs.evaluate import evaluate_runs

Result = Report | str | Path
"""A report, the file that one was saved in, or the folder of a run, which is evaluated."""


def compare(
    a: Result | Sequence[Result], b: Result | Sequence[Result], *, draws: int = 10_000, **options: Any
) -> Comparison:
    """The metrics of two results side by side: b − a, with its 95 % interval and the p of a paired test.

    A result is a ``Report``, the path of a saved one, or the folder of a run, which is evaluated now with ``options``
    (``data``, ``split``, ``protocol``, ``device``); give several seeds of a side as a list. Results under different
    protocols are refused. ``draws`` is the number of resamples, 0 for none.

    Example::

        print(diptych.compare("first.json", "second.json"))
        change = {row.metric: row.change for row in diptych.compare(report_a, report_b).rows}
    """
    first, second = (_several(side) for side in (a, b))
    paths = {one.resolve() for one in second if isinstance(one, Path)}
    twice = next((one for one in first if isinstance(one, Path) and one.resolve() in paths), None)
    if twice is not None:
        raise SettingsError(f"{twice} is on both sides: give different runs.")
    reports = [[_report(one, options) for one in side] for side in (first, second)]
    names = None
    if all(isinstance(one, Path) for one in (*first, *second)):
        names = tuple(
            [_name(one, report) for one, report in zip(side, found, strict=True)]
            for side, found in zip((first, second), reports, strict=True)
        )
    return compare_reports(reports[0], reports[1], names=names, draws=draws)  # type: ignore[arg-type]


def compare_runs(first: Sequence[Path], second: Sequence[Path], **options: Any) -> Comparison:
    """``compare`` for the results of a command line: without ``second`` the first two are compared."""
    if second:
        return compare(first, second, **options)
    if len(first) != 2:
        raise SettingsError(
            f"{len(first)} results and no --with: give two, or those of one side, then --with and the others."
        )
    return compare(first[0], first[1], **options)


def _several(side: Result | Sequence[Result]) -> list[Report | Path]:
    results = [side] if isinstance(side, Report | str | Path) else list(side)
    return [one if isinstance(one, Report) else Path(one) for one in results]


def _report(result: Report | Path, options: dict[str, Any]) -> Report:
    if isinstance(result, Report):
        return result
    return evaluate_runs([result], bootstrap=1000, **options) if result.is_dir() else Report.load(result)


def _name(result: Report | Path, report: Report) -> str:
    """The folder of the run: as given, as the report says, or else the report's own name."""
    run = report.card.run if isinstance(report.card, Card) else ""
    return str(result) if (isinstance(result, Path) and result.is_dir()) or not run else run
