"""The tables of the papers, as data: ``papers/*.toml`` beside this module.

A file holds the tables of one paper: rows (a recipe, a preset and switches; or published numbers alone), groups of
columns, and the published numbers. ``papers/columns.toml`` says which metrics a set of columns shows. What measures a
group is its ``kind``:

============  ============================================================================================
kind          what a cell is
============  ============================================================================================
``test``      a metric of the trained run, as ``diptych evaluate`` measures it under the group's protocol
``step``      seconds and memory of training steps
``teachers``  seconds and memory of a teacher's vectors for one batch, live and from disk
``settings``  a setting of the row, or the number of parameters
``counts``    images, texts or classes of the data
``pooling``   an error of the synthetic pooling experiment (VSE∞)
============  ============================================================================================
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from diptych.errors import SettingsError

FOLDER = Path(__file__).parent / "papers"
COLUMNS_FILE, PRESETS_FILE = "columns", "presets"
MISSING = "-"  # a cell that the paper leaves empty
Kind = Literal["test", "step", "teachers", "settings", "counts", "pooling"]
_LETTERS = {"∞": "infinity", "+": " plus ", "−": " minus ", "*": " x ", "%": " percent "}


@dataclass(frozen=True)
class TableGroup:
    """Columns that are measured together: on ``data`` (default: what the rows train on) under ``protocol``."""

    name: str
    title: str
    columns: Mapping[str, str]  # metric → head
    train: str = ""  # name of the data set that the rows train on; empty where nothing is read
    data: tuple[str, ...] = ()  # names of the data that are measured, where they are others
    protocol: str = "plain"
    judgements: tuple[str, ...] = ()
    kind: Kind = "test"
    digits: int = 1


@dataclass(frozen=True)
class TableRow:
    """One row: what is trained (nothing where it is published only), and the published numbers of each group."""

    name: str
    recipe: str = ""
    preset: str = ""  # "{data}" stands for the name of the data set
    switches: Mapping[str, Any] = field(default_factory=dict)
    mean_of: tuple[str, ...] = ()  # rows whose scores are averaged
    copies: int = 1  # runs of each of them, with seeds of their own
    reads: str = ""  # another form of the data, such as "grid": --data coco-grid=PATH
    module: str = ""  # what a group of another kind than "test" measures here
    only: tuple[str, ...] = ()  # the groups it is measured in (default: all)
    note: str = ""  # what differs from the paper
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def published_only(self) -> bool:
        return not (self.recipe or self.mean_of or self.module)

    def measured_in(self, group: TableGroup) -> bool:
        return not self.published_only and (not self.only or group.name in self.only)

    def trains_on(self, group: TableGroup) -> str:
        """The name of the data set that it reads: ``coco``, or ``coco-grid`` where it reads another form."""
        if group.kind == "counts":
            return self.module
        return f"{group.train}-{self.reads}" if self.reads and group.train else group.train


@dataclass(frozen=True)
class Figure:
    """How a table is drawn: metrics (each with its words) over epochs, rows, or the speed of scoring."""

    over: Literal["epochs", "rows", "speed"]
    metrics: Mapping[str, str]
    unit: str = "%"
    x: str = ""  # what the rows are points of
    series: tuple[str, ...] = ()  # ends of the names of rows: a line each, over what stands before


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper; ``command`` stands for one that another command draws."""

    paper: str
    name: str
    title: str
    source: str  # where it stands in the paper
    groups: tuple[TableGroup, ...] = ()
    rows: tuple[TableRow, ...] = ()
    preset: str = ""  # of rows without one, for ``reproduce``
    figure: Figure | None = None
    command: str = ""
    note: str = ""

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(row.recipe for row in self.rows if row.recipe))

    @property
    def data(self) -> list[str]:
        return self.needed(self.rows)

    def needed(self, rows: Sequence[TableRow]) -> list[str]:
        """The names of the data sets that rows need, in the order of the groups."""
        cells = [(row, group) for group in self.groups for row in rows if row.measured_in(group)]
        return list(dict.fromkeys(name for row, group in cells for name in self.needs(row, group)))

    def needs(self, row: TableRow, group: TableGroup) -> list[str]:
        """The names of the data sets that a row needs for the columns of a group."""
        if row.mean_of:
            members = [name for member in row.mean_of for name in self.needs(self.row(member), group)]
            return list(dict.fromkeys(members))
        return [name for name in (row.trains_on(group), *group.data) if name]

    def row(self, name: str) -> TableRow:
        known = {row.name: row for row in self.rows}
        if name not in known:
            raise SettingsError(f"the table has no row '{name}': its rows are {'; '.join(known)}.")
        return known[name]

    def of_recipe(self, recipe: str) -> PaperTable:
        """The rows of one recipe, and the means of them alone."""
        own = {row.name for row in self.rows if row.recipe == recipe}
        rows = [row for row in self.rows if row.name in own or (row.mean_of and own.issuperset(row.mean_of))]
        groups = [group for group in self.groups if any(row.measured_in(group) for row in rows)]
        return replace(self, rows=tuple(rows), groups=tuple(groups))


def slug(name: str) -> str:
    """A name for a folder: lower-case letters, digits and single dashes; different for the rows of a table."""
    for letter, words in _LETTERS.items():
        name = name.replace(letter, words)
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def papers() -> list[str]:
    """The names of the papers."""
    return sorted({file.stem for file in FOLDER.glob("*.toml")} - {COLUMNS_FILE, PRESETS_FILE})


def main_recipe(paper: str) -> str:
    """The recipe of a paper's rows that name none; empty where the paper has no recipe of its own."""
    return str(_content(paper).get("recipe", ""))


def presets(recipe: str) -> dict[str, dict[str, Any]]:
    """The published settings of a recipe by name."""
    found = _content(PRESETS_FILE).get(recipe, {})
    return {name: _settings(found, name) for name in found}


def _settings(found: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The settings of a preset, and before them those of the one that it is like."""
    own = {key: value for key, value in found[name].items() if key not in ("help", "like")}
    return {**_settings(found, found[name]["like"]), **own} if "like" in found[name] else own


def preset_help(recipe: str) -> dict[str, str]:
    """What each preset of a recipe stands for."""
    return {name: str(one.get("help", "")) for name, one in _content(PRESETS_FILE).get(recipe, {}).items()}


def differences(recipe: str) -> dict[str, str]:
    """Settings of a recipe whose default is not the published one, each with the reason."""
    return dict(_content(PRESETS_FILE)["differs"].get(recipe, {}))


def preset(recipe: str, name: str) -> dict[str, Any]:
    """The settings of a preset; one that the recipe does not have is refused."""
    known = presets(recipe)
    if name not in known:
        has = f"choose one of {', '.join(known)}" if known else "leave out --preset"
        raise SettingsError(f"the recipe '{recipe}' has no preset '{name}': {has}.")
    return known[name]


@cache
def tables_of(name: str) -> dict[str, PaperTable]:
    """The tables of a paper, or the rows of a recipe that one paper alone has; none for any other name."""
    if name in papers():
        content = _content(name)
        return {
            key: _table(name, key, entry, str(content.get("recipe", "")), str(content["title"]))
            for key, entry in content["tables"].items()
        }
    every = [
        {key: table.of_recipe(name) for key, table in tables_of(paper).items() if name in table.recipes}
        for paper in papers()
    ]
    own = [tables for tables in every if tables]
    return own[0] if len(own) == 1 else {}


def sweep(recipe: str, data: Sequence[str] = ()) -> PaperTable:
    """A table of one row, the recipe as it is, for ``--vary`` without a table; measured as its first rows are.

    Data have any names here, and each its own columns.
    """
    own = [table.of_recipe(recipe) for paper in papers() for table in tables_of(paper).values()]
    groups = [group for table in own for group in table.groups if group.kind == "test"]
    first = groups[0] if groups else _group("data", "recall", title="")
    names = dict.fromkeys(name or "data" for name in data or [""])
    made = [replace(first, name=name, title=name, train=name) for name in names]
    row = TableRow(recipe, recipe=recipe)
    return PaperTable("", "vary", f"{recipe}, varied", "not in the paper", tuple(made), (row,))


@cache
def _content(paper: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{paper}.toml").read_text("utf-8"))


def _table(paper: str, name: str, entry: Mapping[str, Any], recipe: str, title: str) -> PaperTable:
    fields = {"source": title, **entry}
    groups = {key: _group(key, **one) for key, one in fields.pop("groups", {}).items()}
    rows = tuple(_row(groups, recipe, **one) for one in fields.pop("rows", ()))
    figure_fields = fields.pop("figure", None)
    figure = Figure(**figure_fields) if figure_fields else None
    return PaperTable(paper, name, groups=tuple(groups.values()), rows=rows, figure=figure, **fields)


def _group(name: str, columns: str, kind: Kind = "test", **given: Any) -> TableGroup:
    given |= {key: tuple(given.get(key, ())) for key in ("data", "judgements")}
    given.setdefault("train", "" if kind == "pooling" else name)
    return TableGroup(name, columns=dict(_content(COLUMNS_FILE)[columns]), kind=kind, **given)


def _row(
    groups: Mapping[str, TableGroup],
    paper_recipe: str,
    published: Mapping[str, Sequence[Any]] | None = None,
    published_only: bool = False,
    **given: Any,
) -> TableRow:
    cells = {
        name: {
            metric: float(value)
            for metric, value in zip(groups[name].columns, values, strict=True)
            if value != MISSING
        }
        for name, values in (published or {}).items()
    }
    trained = not (published_only or "mean_of" in given or "module" in given)
    given.setdefault("recipe", paper_recipe if trained else "")
    given |= {key: tuple(given.get(key, ())) for key in ("mean_of", "only")}
    return TableRow(published=cells, **given)
