"""Pictures of speed: time per query against the size of the gallery, and recall against pairs per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diptych.reports.charts import DPI, figure_class, short_name
from diptych.reports.page import COLOURS

SIZE = (6.4, 4.4)  # inches
MARKS = "osD^vP*X"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one text query against a gallery; ``measured`` is False where it is extrapolated."""

    images: int
    milliseconds: float
    measured: bool = True


@dataclass(frozen=True)
class Contestant:
    """One way to search: its times by gallery, its RSUM, and how many thousand pairs it scores in a second."""

    name: str
    timings: Sequence[Timing]
    rsum: float
    thousand_pairs: float


def picture_of_queries(contestants: Sequence[Contestant]) -> Any:
    """Milliseconds per text query against the number of images, both logarithmic (VSE∞, Fig. 3)."""
    figure, axes = _axes()
    for number, one in enumerate(contestants):
        colour = COLOURS[number % len(COLOURS)]
        done = [t for t in one.timings if t.measured]
        guessed = done[-1:] + [t for t in one.timings if not t.measured]
        axes.plot(
            [t.images for t in done], [t.milliseconds for t in done],
            color=colour, marker=MARKS[number % len(MARKS)], markersize=4, label=short_name(one.name),
        )  # fmt: skip
        if len(guessed) > 1:
            axes.plot(
                [t.images for t in guessed], [t.milliseconds for t in guessed], color=colour, linestyle=":"
            )
    axes.set(xscale="log", yscale="log", xlabel="images", ylabel="milliseconds per text query")
    extrapolated = any(not t.measured for one in contestants for t in one.timings)
    axes.legend(frameon=False, fontsize="small", title="dotted: extrapolated" if extrapolated else None)
    return figure


def picture_of_recall(contestants: Sequence[Contestant]) -> Any:
    """RSUM against thousand pairs per second (CODER, Fig. 4)."""
    figure, axes = _axes()
    for number, one in enumerate(contestants):
        axes.plot(
            [one.thousand_pairs], [one.rsum],
            color=COLOURS[number % len(COLOURS)], marker=MARKS[number % len(MARKS)], markersize=8, linestyle="none",
            label=short_name(one.name),
        )  # fmt: skip
    axes.set(xscale="log", xlabel="thousand pairs per second", ylabel="RSUM")
    axes.legend(frameon=False, fontsize="small")
    return figure


def _axes() -> tuple[Any, Any]:
    figure = figure_class()(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    return figure, axes
