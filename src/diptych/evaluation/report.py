"""A result that carries its protocol: groups of metrics with intervals, each with the card of what it stands for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diptych import notebook
from diptych.data.corrections import Noise
from diptych.errors import DataError, SettingsError
from diptych.evaluation.cards import Card, Facts, direction_words
from diptych.evaluation.metrics import DIRECTIONS, KS
from diptych.storage import MISREAD, parse_json, write_text

FORMAT = 2  # version of the JSON file; version 1 had a single group, of retrieval


@dataclass(frozen=True, slots=True)
class Layout:
    """A table of a group: its head, and for each row a label and the metric of each cell ("" leaves it empty)."""

    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of every query of a retrieval result, for a paired comparison with another one.

    By direction: the rank of each query (0 is the first, ties by the rule of the card) and the row of its image;
    ``folds`` has the fold of each image.
    """

    ranks: Mapping[str, Sequence[float]]
    images: Mapping[str, Sequence[int]]
    folds: Sequence[int]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON, each list in one line."""
        return {
            "ranks": {way: " ".join(f"{rank:g}" for rank in ranks) for way, ranks in self.ranks.items()},
            "images": {way: " ".join(map(str, images)) for way, images in self.images.items()},
            "folds": " ".join(map(str, self.folds)),
        }

    @staticmethod
    def read(content: Mapping[str, Any]) -> Outcomes:
        """What ``to_json`` gave."""
        ranks = {way: [float(rank) for rank in text.split()] for way, text in content["ranks"].items()}
        images = {way: [int(row) for row in text.split()] for way, text in content["images"].items()}
        return Outcomes(ranks, images, [int(fold) for fold in content["folds"].split()])


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics measured together under one protocol, higher is better for the ``primary`` one.

    ``speed`` has ``images_per_second``, ``texts_per_second`` (encoding), ``thousand_pairs_per_second``
    (scoring alone) and ``seconds`` (all of it), where they were measured. Without ``tables`` every metric is a row.
    """

    name: str
    metrics: Mapping[str, float]
    primary: str
    card: Card | Facts
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    speed: Mapping[str, float] = field(default_factory=dict)
    tables: Sequence[Layout] = ()
    digits: int = 1  # behind the point, in tables
    outcomes: Outcomes | None = None

    def __post_init__(self) -> None:
        for name in (self.primary, *(cell for table in self.tables for _, row in table.rows for cell in row)):
            if name and name not in self.metrics:
                known = ", ".join(self.metrics) or "none"
                raise SettingsError(
                    f"the evaluator '{self.name}' names the metric '{name}': its metrics are {known}."
                )

    def under(self, protocol: str) -> Group:
        """The group as one of several protocols: each name begins with the protocol's, as in ``coco-1k_rsum``."""

        def named(name: str) -> str:
            return name and f"{protocol}_{name}"

        tables = [
            Layout(
                [table.head[0] or protocol, *table.head[1:]],
                [(label, [named(cell) for cell in row]) for label, row in table.rows],
            )
            for table in self.tables
        ]
        return replace(
            self,
            name=named(self.name),
            metrics={named(name): value for name, value in self.metrics.items()},
            primary=named(self.primary),
            intervals={named(name): value for name, value in self.intervals.items()},
            tables=tuple(tables),
        )

    def interval_text(self, name: str) -> str:
        """``38.3–44.1``, or nothing where a metric has no interval."""
        if name not in self.intervals:
            return ""
        low, high = self.intervals[name]
        return f"{low:.1f}–{high:.1f}"

    def cell(self, name: str) -> str:
        """A metric with its interval, as tables show it."""
        if not name:
            return ""
        interval = self.interval_text(name)
        return f"{self.metrics[name]:.{self.digits}f}" + (f" ({interval})" if interval else "")

    def cells(self) -> list[list[list[str]]]:
        tables = self.tables or [Layout(["", self.name], [(name, [name]) for name in self.metrics])]
        return [
            [list(table.head), *([label, *(self.cell(name) for name in row)] for label, row in table.rows)]
            for table in tables
        ]

    def speed_text(self) -> str:
        """``812 images/s, 4,021 texts/s, ...``, what was measured of it."""
        units = {
            "images_per_second": "{:,.0f} images/s"
            + (" from features that were computed before" if "from_features" in self.speed else ""),
            "texts_per_second": "{:,.0f} texts/s",
            "thousand_pairs_per_second": "{:,.0f} thousand pairs/s",
            "seconds": "{:.2f} s in all",
        }
        return ", ".join(unit.format(self.speed[name]) for name, unit in units.items() if name in self.speed)

    def lines(self) -> list[str]:
        warning = self.card.warning()
        return [
            *self.card.lines(),
            *([f"speed: {self.speed_text()}"] if self.speed else []),
            *([f"warning: {warning}"] if warning else []),
        ]


@dataclass(frozen=True, slots=True)
class Report:
    """One or several groups of metrics of a model; the first group's primary metric is the report's.

    Example::

        report = diptych.evaluate("runs/photos", "photos")
        report.save("report.json")
        print(report.metrics["rsum"], Report.load("report.json") == report)
    """

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise SettingsError("a report needs at least one group of metrics: give an evaluator.")
        counts = Counter(name for group in self.groups for name in group.metrics)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise SettingsError(
                f"two evaluators return a metric called '{twice[0]}': give each of them names of its own."
            )

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for group in self.groups for name, value in group.metrics.items()}

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Their 95 % intervals, where they have one."""
        return {name: value for group in self.groups for name, value in group.intervals.items()}

    @property
    def primary_metric(self) -> str:
        """The metric by which models are chosen."""
        return self.groups[0].primary

    @property
    def card(self) -> Card | Facts:
        return self.groups[0].card

    @property
    def speed(self) -> Mapping[str, float]:
        return self.groups[0].speed

    @property
    def warning(self) -> str:
        """The first warning of a group, else empty."""
        return next((warning for group in self.groups if (warning := group.card.warning())), "")

    def render(self) -> str:
        """The report as aligned plain text."""
        return self._text(aligned_rows, "")

    def to_markdown(self) -> str:
        """The report as Markdown tables."""
        return self._text(markdown_rows, "* ")

    def _text(self, rows: Callable[[Sequence[Sequence[str]]], Iterable[str]], mark: str) -> str:
        parts: list[str] = []
        for group in self.groups:
            parts += ["\n".join(rows(table)) for table in group.cells()]
            parts.append("\n".join(f"{mark}{line}" for line in group.lines()))
        return "\n\n".join(parts)

    __str__ = render

    def __repr__(self) -> str:
        name, facts = self.primary_metric, self.card.described()
        about = [f"{fact} {facts[fact]}" for fact in ("protocol", "data", "split", "images") if fact in facts]
        return f"Report({', '.join([f'{name} {self.metrics[name]:.1f}', *about])})"

    def _repr_html_(self) -> str:
        return "".join(
            "".join(notebook.table(table) for table in group.cells()) + notebook.notes(group.lines())
            for group in self.groups
        )

    def interval_text(self, name: str) -> str:
        """``38.3–44.1``, or nothing where a metric has no interval."""
        return self.group_of(name).interval_text(name)

    def group_of(self, name: str) -> Group:
        """The group that has this metric."""
        return next(group for group in self.groups if name in group.metrics)

    def card_fields(self) -> dict[str, str]:
        """The card of the first group in words, with the speed and any warning."""
        warning = {"warning": self.warning} if self.warning else {}
        return self.card.described() | {"speed": self.groups[0].speed_text()} | warning

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, in one piece; ``Report.load`` gives an equal one."""
        groups = [
            {
                **asdict(replace(group, outcomes=None)),
                "kind": type(group.card).__name__,
                "outcomes": None if group.outcomes is None else group.outcomes.to_json(),
            }
            for group in self.groups
        ]
        content = {"format": FORMAT, "groups": groups}
        write_text(Path(path), json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    @staticmethod
    def load(path: str | Path) -> Report:
        """The report that ``save`` wrote, in this version or before it knew groups."""
        try:
            content = parse_json(Path(path).read_text("utf-8"))
            found = content["format"]
            if found == 1:
                content = {"groups": [{**content, "name": "retrieval", "primary": "rsum", "kind": "Card"}]}
            elif found != FORMAT:
                raise DataError(f"{path} has format {found}, this version reads {FORMAT}: update diptych.")
            return Report(tuple(_group(group) for group in content["groups"]))
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): give a saved report.") from error
        except MISREAD as error:
            raise DataError(f"{path} is not a saved report ({error}): evaluate again.") from error


def _group(content: Mapping[str, Any]) -> Group:
    card = dict(content["card"])
    card["noise"] = tuple(Noise.read(one) for one in card.get("noise", ()))
    if content["kind"] == "Card":
        card["texts_per_image"] = tuple(card["texts_per_image"])
        card["judged"] = tuple(card.get("judged", ()))
    made: Card | Facts = Card(**card) if content["kind"] == "Card" else Facts(**card)
    tables = tuple(
        Layout(table["head"], [(label, names) for label, names in table["rows"]])
        for table in content.get("tables", ())
    )
    if content["kind"] == "Card" and not tables:
        tables = retrieval_tables(content["metrics"])
    return Group(
        name=content["name"],
        metrics=content["metrics"],
        primary=content["primary"],
        card=made,
        intervals={name: (low, high) for name, (low, high) in content["intervals"].items()},
        speed=content["speed"],
        tables=tables,
        digits=content.get("digits", 1),
        outcomes=Outcomes.read(content["outcomes"]) if content.get("outcomes") else None,
    )


def retrieval_tables(metrics: Mapping[str, float]) -> tuple[Layout, ...]:
    """The tables of a retrieval result: recall, then one for each set of judgements."""
    kinds = [f"recall@{k}" for k in KS] + ["median_rank", "mean_rank"]
    heads = [f"R@{k}" for k in KS] + ["median rank", "mean rank"]
    tables = [
        Layout(["", *heads], [(direction_words(d), [f"{d}_{kind}" for kind in kinds]) for d in DIRECTIONS]),
        Layout(["", "RSUM", "mean recall"], [("both", ["rsum", "mean_recall"])]),
    ]
    suffix = f"_{DIRECTIONS[0]}_map@r"
    for judged in (name.removesuffix(suffix) for name in metrics if name.endswith(suffix)):
        kinds = ["map@r", "r_precision", *(f"recall@{k}" for k in KS)]
        rows = [(direction_words(d), [f"{judged}_{d}_{kind}" for kind in kinds]) for d in DIRECTIONS]
        tables.append(Layout([judged, "mAP@R", "R-Precision", *(f"R@{k}" for k in KS)], rows))
    return tuple(tables)


def table_text(table: Sequence[Sequence[str]], *below: str) -> str:
    """A plain table with sentences below it."""
    return "\n".join([*aligned_rows(table), *below])


def markdown_rows(table: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a Markdown table; numbers to the right, the first row is the head."""
    yield f"| {' | '.join(table[0])} |"
    yield f"|{'---|' + '---:|' * (len(table[0]) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in table[1:])


def aligned_rows(table: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a plain table; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
