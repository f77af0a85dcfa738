"""Compare runs, or reports saved before: what ``diptych compare`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.errors import SettingsError
from diptych.evaluation.cards import Card
from diptych.evaluation.compare import Comparison, Ranking, rank
from diptych.evaluation.compare import compare as compare_reports
from diptych.evaluation.report import Report
from diptych.runs.evaluate import evaluate_runs

Result = Report | str | Path
"""A report, the file that one was saved in, or the folder of a run, which is evaluated."""


def compare(
    a: Result | Sequence[Result],
    b: Result | Sequence[Result],
    *,
    draws: int = 10_000,
    detect: float | None = None,
    **options: Any,
) -> Comparison:
    """The metrics of two results side by side: b − a, with its 95 % interval and the p of a test.

    A result is a ``Report``, the path of a saved one, or the folder of a run, which is evaluated now with ``options``
    (``data``, ``split``, ``protocol``, ``device``); give several seeds of a side as a list. Results under different
    protocols are refused. ``draws`` is the number of resamples, 0 for none. With ``detect``, a gain, the notes say how
    many queries and seeds it takes to see it.

    Example::

        print(diptych.compare("first.json", "second.json"))
        change = {row.metric: row.change for row in diptych.compare(report_a, report_b).rows}
    """
    sides = [_several(side) for side in (a, b)]
    reports, names = _read(sides, options)
    heads = (names[0], names[1]) if all(isinstance(one, Path) for side in sides for one in side) else None
    return compare_reports(reports[0], reports[1], names=heads, draws=draws, detect=detect)


def compare_runs(
    results: Sequence[Path],
    others: Sequence[Sequence[Path]] = (),
    *,
    metric: str | None = None,
    draws: int = 10_000,
    detect: float | None = None,
    **options: Any,
) -> Comparison | Ranking:
    """``compare`` for the results of a command line, of any number of systems.

    Without ``others``, two results are two systems, and of more those whose cards differ only in the seed are one.
    """
    if not others and len(results) < 2:
        raise SettingsError(
            f"{len(results)} results and no --with: give two, or those of one side, then --with and the others."
        )
    sides = [list(results), *map(list, others)] if others else [[one] for one in results]
    reports, names = _read(sides, options)
    if not others and len(results) > 2:
        reports, names = _by_system(reports, names)
    if len(reports) == 2 and metric is None:
        return compare_reports(reports[0], reports[1], names=(names[0], names[1]), draws=draws, detect=detect)
    return rank(reports, names=names, metric=metric, draws=draws, detect=detect)


def _several(side: Result | Sequence[Result]) -> list[Report | Path]:
    results = [side] if isinstance(side, Report | str | Path) else list(side)
    return [one if isinstance(one, Report) else Path(one) for one in results]


def _read(
    sides: Sequence[Sequence[Report | Path]], options: dict[str, Any]
) -> tuple[list[list[Report]], list[list[str]]]:
    """The reports of every side and their names; a result that stands twice, or among seeds of another, is refused."""
    paths = [one for side in sides for one in side if isinstance(one, Path)]
    places = [one.resolve() for one in paths]
    twice = next((one for one, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise SettingsError(f"{twice} is given twice: give different runs.")
    reports = [[_report(one, options) for one in side] for side in sides]
    names = [
        [_name(one, report) for one, report in zip(side, found, strict=True)]
        for side, found in zip(sides, reports, strict=True)
    ]
    for found, heads in zip(reports, names, strict=True):
        systems = [_system(report) for report in found]
        other = next((n for n, one in enumerate(systems) if one and systems[0] and one != systems[0]), None)
        if other is not None:
            raise SettingsError(
                f"{heads[other]} differs from {heads[0]} in more than the seed, so they are not one system: write "
                "--with before each system."
            )
    return reports, names


def _by_system(
    reports: Sequence[Sequence[Report]], names: Sequence[Sequence[str]]
) -> tuple[list[list[Report]], list[list[str]]]:
    """Results whose cards differ only in the seed, side by side; a result without such a card is a system alone."""
    sides: dict[str, list[int]] = {}
    for number, (report,) in enumerate(reports):
        sides.setdefault(_system(report) or f"result {number}", []).append(number)
    if len(sides) < 2:
        raise SettingsError(
            f"these {len(reports)} results differ only in the seed, so they are one system: give another one too."
        )
    systems = list(sides.values())
    return (
        [[reports[number][0] for number in side] for side in systems],
        [[names[number][0] for number in side] for side in systems],
    )


def _report(result: Report | Path, options: dict[str, Any]) -> Report:
    if isinstance(result, Report):
        return result
    return evaluate_runs([result], bootstrap=1000, **options) if result.is_dir() else Report.load(result)


def _system(report: Report) -> str:
    return report.card.system if isinstance(report.card, Card) else ""


def _name(result: Report | Path, report: Report) -> str:
    """The folder of the run: as given, as the report says, or else the report's own name."""
    run = report.card.run if isinstance(report.card, Card) else ""
    return str(result) if (isinstance(result, Path) and result.is_dir()) or not run else run
