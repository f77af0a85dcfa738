"""Draw a table of runs as its paper does: metrics over epochs, or over the values of a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from diptych.evaluation.significance import half_width
from diptych.recipes.recipe import Figure, Row, Table
from diptych.reports.charts import Line, picture_of_lines, save_picture

Histories = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
"""Row name → runs → epochs → metrics by name."""


def draw_table(
    table: Table,
    rows: Sequence[Row],
    histories: Histories,
    best: Mapping[str, Sequence[Mapping[str, float]]],
    output: Path,
) -> None:
    """Write the figure of a table: means over the runs of a row, with their 95 % intervals."""
    figure = table.figure
    assert figure is not None
    lines = (
        _over_epochs(figure, rows, histories) if figure.over == "epochs" else _over_rows(figure, rows, best)
    )
    ticks = [row.name for row in rows] if figure.over == "rows" else []
    save_picture(picture_of_lines(table.title, figure.over, figure.unit, lines, ticks), output)


def _over_epochs(figure: Figure, rows: Sequence[Row], histories: Histories) -> list[Line]:
    """A colour for each metric, dashes for the first row."""
    lines = []
    for number, row in enumerate(rows):
        runs = histories[row.name]
        epochs = min(len(run) for run in runs)  # a run that stopped early ends the line
        for colour, (metric, words) in enumerate(figure.metrics.items()):
            values = [[run[epoch][metric] for run in runs] for epoch in range(epochs)]
            lines.append(
                Line(
                    f"{words}, {row.name}",
                    [epoch + 1 for epoch in range(epochs)],
                    [mean(one) for one in values],
                    [half_width(one) for one in values],
                    colour,
                    dashed=number == 0,
                )
            )
    return lines


def _over_rows(
    figure: Figure, rows: Sequence[Row], best: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[Line]:
    lines = []
    for colour, (metric, words) in enumerate(figure.metrics.items()):
        values = [[run[metric] for run in best[row.name]] for row in rows]
        lines.append(
            Line(
                words,
                list(range(len(rows))),
                [mean(v) for v in values],
                [half_width(v) for v in values],
                colour,
            )
        )
    return lines
