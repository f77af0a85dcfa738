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
    results = [[side] if isinstance(side, Report | str | Path) else list(side) for side in (a, b)]
    (first, second), (one, two) = _parted(_read(results, options))
    saved = not any(isinstance(result, Report) for side in results for result in side)
    return compare_reports(first, second, names=(one, two) if saved else None, draws=draws, detect=detect)


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
            "one result and no --with: give two, or those of one side, then --with and the others."
        )
    sides = _read([results, *others] if others else [[one] for one in results], options)
    if not others and len(results) > 2:
        sides = _by_system([one for (one,) in sides])
    reports, names = _parted(sides)
    if len(sides) == 2 and metric is None:
        return compare_reports(reports[0], reports[1], names=(names[0], names[1]), draws=draws, detect=detect)
    return rank(reports, names=names, metric=metric, draws=draws, detect=detect)


Side = list[tuple[str, Report]]
"""The results of one system with their names, one for each seed."""


def _parted(sides: Sequence[Side]) -> tuple[list[list[Report]], list[list[str]]]:
    return [[one for _, one in side] for side in sides], [[name for name, _ in side] for side in sides]


def _read(sides: Sequence[Sequence[Result]], options: dict[str, Any]) -> list[Side]:
    """The results of every side; one that stands twice, or among seeds of another, is refused."""
    paths = [Path(one) for side in sides for one in side if not isinstance(one, Report)]
    places = [one.resolve() for one in paths]
    twice = next((one for one, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise SettingsError(f"{twice} is given twice: give different runs.")
    found = [[_open_report(one, options) for one in side] for side in sides]
    for side in found:
        systems = [_system(report) for _, report in side]
        other = next((n for n, one in enumerate(systems) if one and systems[0] and one != systems[0]), None)
        if other is not None:
            raise SettingsError(
                f"{side[other][0]} differs from {side[0][0]} in more than the seed, so they are not one system: write "
                "--with before each system."
            )
    return found


def _by_system(results: Side) -> list[Side]:
    """Results whose cards differ only in the seed, side by side; a result without such a card is a system alone."""
    sides: dict[str, Side] = {}
    for number, (name, report) in enumerate(results):
        sides.setdefault(_system(report) or f"result {number}", []).append((name, report))
    if len(sides) < 2:
        raise SettingsError(
            f"these {len(results)} results differ only in the seed, so they are one system: give another one too."
        )
    return list(sides.values())


def _open_report(result: Result, options: dict[str, Any]) -> tuple[str, Report]:
    """A report with the folder of its run: as given, as the report says, or else the report's own name."""
    if not isinstance(result, Report) and (place := Path(result)).is_dir():
        return str(place), evaluate_runs([place], bootstrap=1000, **options)
    report = result if isinstance(result, Report) else Report.load(result)
    run = report.card.run if isinstance(report.card, Card) else ""
    return run or ("" if isinstance(result, Report) else str(result)), report


def _system(report: Report) -> str:
    return report.card.system if isinstance(report.card, Card) else ""
