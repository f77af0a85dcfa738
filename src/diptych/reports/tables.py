"""A paper's table with published and measured numbers: terminal, Markdown, LaTeX, JSON, and the picture of a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from diptych.evaluation.report import aligned_rows, markdown_rows
from diptych.evaluation.significance import half_width, mean_and_interval
from diptych.reports.charts import MARKS, Line, picture_of_lines, save_picture
from diptych.reports.page import COLOURS
from diptych.tables import Figure, PaperTable, TableGroup, TableRow

FORMAT = 2
SPEED = "speed_thousand_pairs_per_second"
Metrics = Mapping[str, float]
Histories = Mapping[str, Sequence[Sequence[Metrics]]]
"""Row name → runs → epochs → metrics by name."""


@dataclass(frozen=True)
class TableResults:
    """What was measured of a table: row → group → one set of metrics per seed; and what to say below it."""

    table: PaperTable
    groups: Sequence[TableGroup]
    rows: Sequence[TableRow]
    measured: Mapping[str, Mapping[str, Sequence[Metrics]]]
    conditions: Sequence[str]  # data, split, protocol, settings: one sentence each
    notes: Mapping[str, str] = field(default_factory=dict)  # row → what differs
    histories: Histories = field(default_factory=dict)

    def values(self, row: TableRow, group: TableGroup, metric: str) -> list[float]:
        """The values of a cell, one per seed."""
        runs = self.measured.get(row.name, {}).get(group.name, ())
        return [run[metric] for run in runs if metric in run]

    def columns(self, group: TableGroup) -> dict[str, str]:
        """The columns of a group that were published or measured for one of the rows."""
        return {
            metric: head
            for metric, head in group.columns.items()
            if any(
                metric in row.published.get(group.name, {}) or self.values(row, group, metric)
                for row in self.rows
            )
        }

    def cells(self) -> list[list[str]]:
        """The table as text: a head, then for each row what was published and what was measured."""
        several = len(self.groups) > 1
        places = [(group, *column) for group in self.groups for column in self.columns(group).items()]
        lines = [["row", "", *(f"{group.title}: {head}" if several else head for group, _, head in places)]]
        for row in self.rows:
            published, measured = list[str](), list[str]()
            for group, metric, _ in places:
                printed = row.published.get(group.name, {}).get(metric)
                published.append("" if printed is None else f"{printed:,.{group.digits}f}")
                measured.append(mean_and_interval(self.values(row, group, metric), group.digits))
            name = row.name
            if any(published) or row.published_only:
                lines.append([name, "published", *published])
                name = ""
            if not row.published_only:
                lines.append([name, "measured", *measured])
        return lines

    def sentences(self) -> Iterator[str]:
        yield from self.conditions
        if self.table.note:
            yield self.table.note
        for row in self.rows:
            if said := self.said_of(row):
                yield f"{row.name}: {said}"

    def said_of(self, row: TableRow) -> str:
        """What differs in a row: in the paper's table, and in this call."""
        return " ".join(one for one in (row.note, self.notes.get(row.name, "")) if one)

    def terminal(self) -> str:
        """A block for each group of columns: side by side they are wider than a terminal."""
        lines = [self.heading, ""]
        for group in self.groups:
            own = [row for row in self.rows if row.published.get(group.name) or row.measured_in(group)]
            (_, *head), *rows = replace(self, groups=[group], rows=own).cells()
            title = group.title if len(self.groups) > 1 else "row"
            lines += [*aligned_rows([[title, *head], *rows]), ""]
        return "\n".join([*lines, *self.sentences()])

    @property
    def heading(self) -> str:
        return f"{self.table.title} ({self.table.source})"

    def markdown(self) -> str:
        return "\n".join([self.heading, "", *markdown_rows(self.cells()), "", *self.sentences(), ""])

    def latex(self) -> str:
        head, *rows = self.cells()
        lines = [
            f"% {self.heading}",
            *(f"% {one}" for one in self.sentences()),
            rf"\begin{{tabular}}{{ll{'r' * (len(head) - 2)}}}",
            r"\toprule",
        ]
        if len(self.groups) > 1:
            spans = [rf"\multicolumn{{{len(self.columns(g))}}}{{c}}{{{_tex(g.title)}}}" for g in self.groups]
            lines.append(" & ".join(["", "", *spans]) + r" \\")
            head = ["row", "", *(one for group in self.groups for one in self.columns(group).values())]
        lines += [" & ".join(map(_tex, head)) + r" \\", r"\midrule"]
        lines += [" & ".join(map(_tex, row)) + r" \\" for row in rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "paper": self.table.paper,
            "table": self.table.name,
            "title": self.heading,
            "conditions": list(self.conditions),
            "columns": {group.name: dict(group.columns) for group in self.groups},
            "rows": {
                row.name: {
                    "published": {name: dict(values) for name, values in row.published.items()},
                    "measured": {name: list(runs) for name, runs in self.measured.get(row.name, {}).items()},
                    "note": self.said_of(row),
                }
                for row in self.rows
            },
        }

    def draw(self, output: Path) -> None:
        """Write the figure: means over the seeds of a row with 95 % intervals; published numbers are dashed."""
        figure = self.table.figure
        assert figure is not None
        names = {name for groups in self.measured.values() for name in groups}
        groups = [group for group in self.groups if group.name in names]
        rows = [row for row in self.rows if set(self.measured.get(row.name, {})) & names]
        way = {"epochs": self._over_epochs, "rows": self._over_rows, "speed": self._by_speed}[figure.over]
        lines = way(figure, rows, groups[0])
        if len(groups) > 1:  # a colour for each data set, a style for each metric
            lines = [
                replace(line, name=f"{group.title}, {line.name}", colour=number, style=("-", ":")[place % 2])
                for number, group in enumerate(groups)
                for place, line in enumerate(way(figure, rows, group))
            ]
        ticks = _ticks(figure, rows) if figure.over == "rows" else []
        label = {"speed": "thousand pairs per second", "rows": figure.x}.get(figure.over, figure.over)
        log = "x" if figure.over == "speed" else ""  # models and pair scorers are a thousandfold apart
        picture = picture_of_lines(self.table.title, label, figure.unit, lines, ticks, logarithmic=log)
        save_picture(picture, output)

    def _over_epochs(self, figure: Figure, rows: Sequence[TableRow], group: TableGroup) -> list[Line]:
        """A colour for each metric, dashes for the first row; measured on the validation split."""
        lines = []
        for number, row in enumerate(rows):
            runs = self.histories[row.name]
            epochs = min(len(run) for run in runs)  # a run that stopped early ends the line
            for colour, (metric, words) in enumerate(figure.metrics.items()):
                values = [[run[epoch][metric] for run in runs] for epoch in range(epochs)]
                x = [epoch + 1 for epoch in range(epochs)]
                lines.append(_line(f"{words}, {row.name}", x, values, colour, dashed=number == 0))
        return lines

    def _over_rows(self, figure: Figure, rows: Sequence[TableRow], group: TableGroup) -> list[Line]:
        """A colour for each metric of each series; what was published is dashed."""
        lines, ticks = list[Line](), _ticks(figure, rows)
        for series in dict.fromkeys(_series(figure, row) for row in rows):
            own = [row for row in rows if _series(figure, row) == series]
            at = {row.name: ticks.index(row.name.removesuffix(series)) for row in own}
            for metric, words in figure.metrics.items():
                name, colour = f"{words}{series}", sum(line.style == "-" for line in lines)
                measured = [self.values(row, group, metric) for row in own]
                lines.append(_line(name, [*at.values()], measured, colour))
                found = {row.name: row.published.get(group.name, {}).get(metric) for row in own}
                if printed := {at[row]: [value] for row, value in found.items() if value is not None}:
                    lines.append(_line(f"{name}, published", [*printed], [*printed.values()], colour, True))
        return lines

    def _by_speed(self, figure: Figure, rows: Sequence[TableRow], group: TableGroup) -> list[Line]:
        """A point for each row: a colour and a mark that no other row has both of."""
        ((metric, _),) = figure.metrics.items()
        points = []
        for number, row in enumerate(rows):
            speed, values = mean(self.values(row, group, SPEED)), self.values(row, group, metric)
            mark = MARKS[number // len(COLOURS) % len(MARKS)]
            point = _line(row.name, [speed], [values], number)
            points.append(replace(point, style="none", mark=mark, size=7))
        return points


def beside_earlier(earlier: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """A table as JSON, with the rows and columns of earlier calls that it does not have."""
    if "format" not in earlier:  # of earlier versions: metrics of the validation split by row
        return {**content, **({"earlier": earlier} if earlier else {})}
    rows = dict(earlier["rows"])
    for name, row in content["rows"].items():
        rows[name] = {**row, "measured": {**rows.get(name, {}).get("measured", {}), **row["measured"]}}
    return {**earlier, **content, "columns": {**earlier["columns"], **content["columns"]}, "rows": rows}


def _series(figure: Figure, row: TableRow) -> str:
    """The end of a row's name that names its line; empty where there is one line."""
    return next((f", {one}" for one in figure.series if row.name.endswith(f", {one}")), "")


def _ticks(figure: Figure, rows: Sequence[TableRow]) -> list[str]:
    return list(dict.fromkeys(row.name.removesuffix(_series(figure, row)) for row in rows))


def _line(
    name: str, x: Sequence[float], values: Sequence[Sequence[float]], colour: int, dashed: bool = False
) -> Line:
    spread, style = [half_width(one) for one in values], "--" if dashed else "-"
    return Line(name, x, [mean(one) for one in values], spread, colour, style)


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


_TEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}", "±": r"$\pm$", "∞": r"$\infty$", "→": r"$\to$", "−": "--",
    "λ": r"$\lambda$", "ρ": r"$\rho$", "ε": r"$\varepsilon$", "α": r"$\alpha$", "β": r"$\beta$", "τ": r"$\tau$",
}  # fmt: skip
