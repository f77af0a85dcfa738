"""Lines with intervals: metrics over epochs, or over the values of a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diptych.reports.charts import DPI, figure_class
from diptych.reports.page import COLOURS


@dataclass(frozen=True)
class Line:
    """One line: a value for each x, and half the width of its interval where there is one (0 for none)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float]
    colour: int = 0
    dashed: bool = False


def picture_of_lines(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], ticks: Sequence[str] = ()
) -> Any:
    """One panel; ``ticks`` name the values 0, 1, 2, … of x where they are not numbers of a scale."""
    figure = figure_class()(figsize=(8, 4.5), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for line in lines:
        colour = COLOURS[line.colour % len(COLOURS)]
        style = "--" if line.dashed else "-"
        axes.plot(line.x, line.y, style, color=colour, marker="o", markersize=3, label=line.name)
        if any(line.spread):
            low = [y - s for y, s in zip(line.y, line.spread, strict=True)]
            high = [y + s for y, s in zip(line.y, line.spread, strict=True)]
            axes.fill_between(line.x, low, high, color=colour, alpha=0.12, linewidth=0)
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    axes.set_title(title, parse_math=False, loc="left")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    return figure
