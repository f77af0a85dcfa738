"""What a table is run on: data by name, split and protocol of each cell; and what must be right before it starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from diptych.data.formats import open_captions, separate_splits
from diptych.data.held_out import open_split, training_splits
from diptych.data.problems import Absent, ToBeLeftOut
from diptych.errors import SettingsError
from diptych.evaluation.evaluate import check_data
from diptych.evaluation.protocols import EvaluationProtocol, rules_of
from diptych.evaluation.retrieval import check_captions
from diptych.evaluation.senteval import is_senteval
from diptych.names import unknown_name
from diptych.registries import PROTOCOLS, RECIPES
from diptych.runs.columns import counts_of
from diptych.runs.train import checked_method, noisy
from diptych.settings import TrainingSettings, parse_value, setting_names, to_json
from diptych.tables import PaperTable, TableGroup, TableRow
from diptych.training.teachers import Teachers

NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.+)", re.DOTALL)
BARE = ""  # the name of data that were given without one


@dataclass(frozen=True)
class TableRequest:
    """What a user asks for: which rows, on which data and split, under which protocol, with which settings.

    ``changes`` are settings that win over a row's, ``vary`` has the values of settings that every row is repeated
    with. ``published`` asks for the table's own presets and protocols, where a row or a flag names none.
    """

    data: Mapping[str, str] = field(default_factory=dict)
    split: str | None = None
    protocol: str | None = None
    judgements: Sequence[str] = ()
    seeds: int = 1
    rows: Sequence[str] = ()
    preset: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    vary: Mapping[str, Sequence[str]] = field(default_factory=dict)
    published: bool = False
    show_progress: bool = True


@dataclass(frozen=True)
class Cell:
    """One row in the columns of one group: the data to train on, by name and path, and what is measured there."""

    row: TableRow
    group: TableGroup
    name: str
    path: str
    other: tuple[str, ...] = ()  # paths of the data that are measured, where they are not the one to train on
    members: tuple[Cell, ...] = ()


def data_by_name(given: Sequence[str]) -> dict[str, str]:
    """``NAME=PATH`` arguments by name; a path alone has the empty name."""
    found: dict[str, str] = {}
    for one in given:
        named = NAMED.fullmatch(one)
        name, path = (named[1], named[2]) if named else (BARE, one)
        if name in found:
            what = f"named {name}" if name else "without a name"
            raise SettingsError(f"two --data are {what} ({found[name]}, {path}): give each its own name.")
        found[name] = path
    return found


def table_data(table: PaperTable, given: Mapping[str, str]) -> dict[str, str]:
    """The path of each data set that the table names; a path without a name is what its first rows train on."""
    known = table.data
    wrong = next((name for name in given if name and name not in known), None)
    if wrong is not None:
        has = f"it takes {', '.join(known)}" if known else "it reads none"
        raise SettingsError(f"the table {table.name} has no data named '{wrong}': {has}.")
    found = {name: path for name, path in given.items() if name}
    if BARE in given:
        if not known:
            raise SettingsError(f"the table {table.name} reads no data: leave out --data {given[BARE]}.")
        first = table.groups[0].train or known[0]
        forms = [name for name in known if name.startswith(f"{first}-")]  # where no row reads the plain form
        own = [first] if first in known else forms or known[:1]
        found = {**dict.fromkeys(own, given[BARE]), **found}
    return found


def varied(table: PaperTable, rows: Sequence[TableRow], vary: Mapping[str, Sequence[str]]) -> list[TableRow]:
    """The rows, each one once for every combination of the values of ``--vary`` that its recipe takes.

    Where rows differ in nothing else than what is varied, their own names say nothing, and one of each value is left.
    """
    alike = len({(row.recipe, row.preset, row.reads, row.mean_of) for row in table.rows}) == 1
    nameless = alike and all(row.switches and row.switches.keys() <= vary.keys() for row in table.rows)
    found: dict[str, TableRow] = {}
    for row in rows:
        members = [table.row(name) for name in row.mean_of] or [row]
        kinds = [RECIPES[one.recipe].settings for one in members if one.recipe]
        known = [name for name in vary if kinds and all(name in setting_names(kind) for kind in kinds)]
        for values in product(*(vary[name] for name in known)) if known else ():
            named = dict(zip(known, values, strict=True))
            words = ", ".join(f"{name} = {value}" for name, value in named.items())
            made = replace(row, name=words if nameless else f"{row.name}, {words}", published={})
            if row.mean_of:
                made = replace(made, mean_of=tuple(f"{name}, {words}" for name in row.mean_of))
            else:
                switches = {name: parse_value(kinds[0], name, value) for name, value in named.items()}
                made = replace(made, switches={**row.switches, **switches})
            found[made.name] = made
        if not known:
            found[row.name] = row
    return [*found.values()]


def protocol_of(group: TableGroup, wanted: TableRequest) -> str:
    """The protocol of a group: as asked for, the table's own, or plain where neither is asked for."""
    if not isinstance(PROTOCOLS.find(group.protocol), EvaluationProtocol):
        return group.protocol
    return wanted.protocol or (group.protocol if wanted.published else "plain")


def split_for(cell: Cell, wanted: TableRequest) -> str:
    """The split that is measured: test, or all of COCO's test images where the protocol takes them."""
    if wanted.split is not None:
        return wanted.split
    found = PROTOCOLS.find(protocol_of(cell.group, wanted))
    coco = isinstance(found, EvaluationProtocol) and found.images == 5000
    return "testall" if coco and "testall" in separate_splits(cell.path) else "test"


def check_cells(
    table: PaperTable,
    rows: Sequence[TableRow],
    cells: Sequence[Cell],
    wanted: TableRequest,
    data: Mapping[str, str],
    to_build: Callable[[Cell], TrainingSettings | None],
) -> None:
    """Raise what running would raise, before anything is trained; what has nothing to build was built before."""
    trained = [*rows, *(table.row(name) for row in rows for name in row.mean_of)]
    known = [name for row in trained if row.recipe for name in setting_names(RECIPES[row.recipe].settings)]
    for name in (*wanted.changes, *wanted.vary):
        if name not in known and name in wanted.vary:
            raise unknown_name("setting", name, known, "one of the table's flags, as in epochs=10,20")
        if name not in known:
            raise SettingsError(f"no row of table {table.name} has the setting {name}: leave out --{name}.")
    if not cells and not all(row.published_only for row in rows):
        raise SettingsError(
            f"the table {table.name} has nothing to measure: give {_wanting(table, rows, data)}."
        )
    built: set[str] = set()
    for cell in [one for whole in cells for one in (whole.members or (whole,))]:
        _check_measured(cell, wanted)
        if not cell.row.recipe or cell.row.module:
            continue
        settings = to_build(cell)
        if settings is None:
            continue
        key = f"{cell.row.recipe} {cell.path} {to_json(settings)} {protocol_of(cell.group, wanted)}"
        if key not in built:
            built.add(key)
            _check_built(cell, settings, wanted)


def _wanting(table: PaperTable, rows: Sequence[TableRow], data: Mapping[str, str]) -> str:
    """The data that would let one of the rows be measured; of several that a group measures, one is enough."""
    ways = []
    for row, group in ((row, group) for group in table.groups for row in rows if row.measured_in(group)):
        needs = [name for name in table.needs(row, group) if name not in group.data[1:]]
        ways.append(" and ".join(f"--data {name}=PATH" for name in needs if name not in data))
    return ", or ".join(dict.fromkeys(ways))


def _check_measured(cell: Cell, wanted: TableRequest) -> None:
    """Whether the data can be measured under the group's protocol."""
    if cell.group.kind != "test":
        return
    name = protocol_of(cell.group, wanted)
    found: Any = PROTOCOLS.find(name)
    for place in cell.other:
        if hasattr(found, "reads") and not found.reads(Path(place)):
            raise SettingsError(f"the protocol {name} does not read {place}: give {found.wants}.")
        if is_senteval(place):
            sets = tuple(counts_of(place))
            if not any(metric.startswith(sets) for metric in cell.group.columns):
                heads = [
                    head for metric, head in cell.group.columns.items() if not metric.endswith("_average")
                ]
                raise SettingsError(
                    f"{place} has none of the sets {', '.join(heads)}: give SentEval's data folder with one of them."
                )
    if isinstance(found, EvaluationProtocol):
        judged = list(wanted.judgements or cell.group.judgements)
        view = open_split(cell.path, split_for(cell, wanted), Absent())
        check_captions(view, rules_of(protocol=name, judgements=judged))


def _check_built(cell: Cell, settings: TrainingSettings, wanted: TableRequest) -> None:
    """Whether the method can be built, trained and validated, and its measures read the split."""
    problems = None if settings.strict_images else ToBeLeftOut()  # noise counts the images that are missing
    parts, _ = noisy(training_splits(open_captions(cell.path, problems=problems)), settings.noise)
    method, _ = checked_method(RECIPES[cell.row.recipe], settings, parts)
    for teachers in (one for one in method.targets if isinstance(one, Teachers)):
        teachers.check(parts[0])
    found: Any = PROTOCOLS.find(protocol_of(cell.group, wanted))
    for place in cell.other:
        if hasattr(found, "check_folder"):
            found.check_folder(method.retriever, place)
    if cell.group.kind == "test" and not cell.other:
        view = open_split(cell.path, split_for(cell, wanted), Absent())
        check_data(method.evaluators, method.retriever, view)
