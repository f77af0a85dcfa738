"""Run the rows of a paper's table, several seeds each, and set published and measured numbers side by side.

The validation split chooses the epoch of a run, and the test split is measured once: its report is kept and read again.
A run's folder is named after data set, row and seed. A run of equal recipe, settings and data is not trained twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from diptych.data.corrections import data_hash, file_hash
from diptych.data.formats import open_captions
from diptych.data.held_out import open_split
from diptych.data.problems import Absent
from diptych.entries import MODEL
from diptych.errors import CheckpointError
from diptych.evaluation.report import Report, aligned_rows
from diptych.progress import counted, echo
from diptych.recipes.recipe import Recipe
from diptych.registries import RECIPES
from diptych.reports.charts import figure_class
from diptych.reports.tables import Metrics, TableResults, beside_earlier
from diptych.runs import columns
from diptych.runs.evaluate import evaluate_runs
from diptych.runs.table_plan import (
    Cell,
    TableRequest,
    check_cells,
    protocol_of,
    split_for,
    table_data,
    varied,
)
from diptych.runs.train import inherited, open_run, resumed_settings, start_or_resume
from diptych.settings import TrainingSettings, from_json, setting_names, to_json
from diptych.storage import parse_json, write_text
from diptych.tables import PaperTable, TableGroup, TableRow, preset, slug
from diptych.training.checkpoint import RunCard, check_resumable, has_state, read_run


@dataclass(frozen=True)
class Job:
    """One run to train: a row on a data set with a seed."""

    recipe: Recipe
    settings: TrainingSettings
    data: str
    folder: str  # its name

    @property
    def key(self) -> str:
        return json.dumps([self.recipe.name, self.data, to_json(self.settings)], sort_keys=True)


def plan(table: PaperTable, folder: Path, wanted: TableRequest) -> str:
    """What ``ablate`` would do, in words."""
    return _check(table, folder, wanted).plan()


def ablate(table: PaperTable, folder: Path, wanted: TableRequest) -> TableResults:
    """Train and measure a table; what was trained or measured before is used again, broken runs go on."""
    runner = _check(table, folder, wanted)
    results = runner.results()
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"table-{table.name}"
    write_text(place.with_suffix(".md"), results.markdown())
    write_text(place.with_suffix(".tex"), results.latex())
    file = place.with_suffix(".json")
    earlier = parse_json(MODEL.read(file)) if file.exists() else {}
    write_text(file, json.dumps(beside_earlier(earlier, results.json()), indent=2))
    if table.figure is not None and results.measured:
        results.draw(folder / f"figure-{table.name}.svg")
    return results


def _check(table: PaperTable, folder: Path, wanted: TableRequest) -> Runner:
    runner = Runner(table, folder, wanted)
    if table.figure is not None:
        figure_class()  # without the extra that draws, nothing is run
    runner.check()
    return runner


class Runner:
    """A table on given data."""

    def __init__(self, table: PaperTable, folder: Path, wanted: TableRequest) -> None:
        self.table, self.folder, self.wanted = table, folder, wanted
        self.data = table_data(table, wanted.data)
        named = [table.row(name) for name in dict.fromkeys(wanted.rows)] or list(table.rows)
        self.rows = varied(table, named, wanted.vary)
        every = tuple(varied(table, table.rows, wanted.vary))
        self.table = replace(table, rows=every)  # means find their members by name
        places = sorted(folder.iterdir()) if folder.is_dir() else []
        self.found = {run: self._key(run) for run in places if has_state(run)}
        self.prints: dict[tuple[str, str, bool], str] = {}  # hash of data, once for all finished runs
        self.splits: dict[tuple[str, str], str] = {}
        self.histories: dict[str, list[list[dict[str, float]]]] = {}
        self.teachers: dict[str, dict[str, dict[str, float]]] = {}  # path → module → costs

    # --- what there is to do

    def cells(self) -> Iterator[Cell]:
        for row in self.rows:
            for group in self.table.groups:
                if row.measured_in(group) and self._has_data(row, group):
                    yield self._cell(row, group)

    def _has_data(self, row: TableRow, group: TableGroup) -> bool:
        """Whether there is what it trains on and, of several data sets to measure, one of them."""
        needs = [name for name in self.table.needs(row, group) if name not in group.data]
        return all(name in self.data for name in needs) and (
            not group.data or any(name in self.data for name in group.data)
        )

    def _cell(self, row: TableRow, group: TableGroup) -> Cell:
        other = tuple(self.data[name] for name in group.data if name in self.data)
        if row.mean_of:
            members = tuple(self._cell(self.table.row(name), group) for name in row.mean_of)
            return Cell(row, group, members[0].name, members[0].path, other, members)
        name = row.trains_on(group)
        return Cell(row, group, name, self.data.get(name, ""), other)

    def settings(self, cell: Cell, seed: int) -> TrainingSettings:
        """In this order: flag, row, preset, default."""
        row, wanted = cell.row, self.wanted
        kind = RECIPES[row.recipe].settings
        known = setting_names(kind)
        varied = {name: row.switches[name] for name in wanted.vary if name in row.switches}
        flags = {name: _on(cell, value) for name, value in wanted.changes.items() if name in known}
        values = {**self._own(cell), **flags, **varied, "seed": seed}
        made: TrainingSettings = from_json(kind, inherited(kind, values))
        return made

    def _own(self, cell: Cell) -> dict[str, Any]:
        """What a row's preset and its switches set."""
        row, wanted = cell.row, self.wanted
        name = wanted.preset or row.preset or (self.table.preset if wanted.published else "")
        values = preset(row.recipe, _on(cell, name)) if name else {}
        return {**values, **row.switches}

    def jobs(self, cell: Cell, seed: int) -> list[Job]:
        if cell.members:
            copies = cell.row.copies
            seeds = range(copies * seed, copies * (seed + 1))
            return [job for member in cell.members for one in seeds for job in self.jobs(member, one)]
        return [Job(RECIPES[cell.row.recipe], self.settings(cell, seed), cell.path, self._named(cell, seed))]

    def _named(self, cell: Cell, seed: int) -> str:
        """A run's name: the data by their name in the table, or by that of the path where only a path was given."""
        data = "" if cell.name in self.wanted.data else slug(Path(self.data[cell.name].split("?")[0]).name)
        return f"{data or cell.name}-{slug(cell.row.name)}-seed{seed}"

    def distinct_runs(self) -> list[tuple[Cell, Job]]:
        """Each run that the table needs, once."""
        found: dict[str, tuple[Cell, Job]] = {}
        for cell in self.cells():
            if cell.group.kind == "test":
                for seed in range(self.wanted.seeds):
                    for job in self.jobs(cell, seed):
                        found.setdefault(job.key, (cell, job))
        return list(found.values())

    def check(self) -> None:
        """Refuse what cannot be run before the first row takes its hours."""
        check_cells(self.table, self.rows, list(self.cells()), self.wanted, self.data, self._to_build)
        for _, job in self.distinct_runs():
            self.place(job)

    def _to_build(self, cell: Cell) -> TrainingSettings | None:
        """The settings of a row, if runs of it are missing."""
        jobs = [job for seed in range(self.wanted.seeds) for job in self.jobs(cell, seed)]
        return None if all(map(self._finished, jobs)) else self.settings(cell, 0)

    def plan(self) -> str:
        """What would be trained and measured, and how long the training would take, from a few measured steps."""
        rows = [["run", "recipe", "steps", "seconds a step", "hours", "CPU hours"]]
        total, costs = np.zeros(2), dict[str, columns.Cost]()
        for _, job in self.distinct_runs():
            run = self.place(job)
            if self._finished(job):
                rows.append([job.folder, job.recipe.name, "finished", "", "", ""])
                continue
            like = replace(job, settings=replace(job.settings, seed=0)).key
            if like not in costs:
                captions = open_captions(job.data, problems=Absent())
                costs[like] = columns.measure_steps(job.recipe, job.settings, captions)
            cost = costs[like]
            left = max(0, cost.steps * job.settings.epochs - _saved(run).get("step", 0))
            hours = left * np.array([cost.seconds, cost.cpu]) / 3600
            total += hours
            numbers = f"{left:,}", f"{cost.seconds:.3f}", *(f"{one:.2f}" for one in hours)
            rows.append([job.folder, job.recipe.name, *numbers])
        measured = ", ".join(f"{cell.row.name} ({cell.group.title})" for cell in self.cells())
        sentences = [
            f"{counted(len(rows) - 1, 'run')}, about {total[0]:.2f} hours of training on this machine as it is now, "
            f"{total[1]:.2f} of CPU time; features, validation and tests come on top.",
            f"measured: {measured or 'nothing, the rows are published only'}.",
        ]
        return "\n".join([*aligned_rows(rows), *sentences, *self._conditions()])

    # --- run and measure

    def results(self) -> TableResults:
        """Train what is missing, measure what was not measured yet."""
        measured: dict[str, dict[str, Sequence[Metrics]]] = {}
        for _, job in self.distinct_runs():
            self._train(job)
        for cell in self.cells():
            measured.setdefault(cell.row.name, {})[cell.group.name] = self._measure(cell)
        known = {name for row in self.rows for name in (*row.published, *measured.get(row.name, {}))}
        groups = [group for group in self.table.groups if group.name in known]
        notes = {row.name: self._note(row) for row in self.rows}
        return TableResults(
            self.table, groups, self.rows, measured, self._conditions(), notes, self.histories
        )

    def _measure(self, cell: Cell) -> list[Metrics]:
        kind, seeds, show = cell.group.kind, range(self.wanted.seeds), self.wanted.show_progress
        if kind == "test":
            return [self._test(cell, seed) for seed in seeds]
        if kind == "pooling":
            return list(columns.pooling_errors(cell.row.module, self.wanted.seeds, show_progress=show))
        if kind == "counts":
            return [columns.row_counts(cell.row, cell.group, cell.path)]
        captions, settings = open_captions(cell.path, problems=Absent()), self.settings(cell, 0)
        if kind == "teachers":
            if cell.path not in self.teachers:
                self.teachers[cell.path] = columns.teacher_costs(settings, captions)
            return [self.teachers[cell.path][cell.row.module]]
        steps = columns.STEPS if kind == "step" else 0
        cost = columns.measure_steps(RECIPES[cell.row.recipe], settings, captions, steps=steps)
        if steps:
            return [cost.metrics()]
        found = {name: getattr(settings, name) for name in cell.group.columns if hasattr(settings, name)}
        return [{**found, "parameters_million": cost.parameters / 1e6}]

    def _train(self, job: Job) -> None:
        """Train a run that is not finished; the data of a finished one are compared by their hash."""
        run = self.place(job)
        if self._finished(job):
            same = (job.data, job.settings.noise, job.settings.strict_images)
            if same not in self.prints:
                self.prints[same] = open_run(job.recipe, job.settings, job.data)[-1].data_fingerprint
            check_resumable(run, RunCard(job.recipe.name, job.settings, job.data, self.prints[same]))
            return
        if self.wanted.show_progress:
            echo(f"{run}")
        start_or_resume(job.recipe, job.settings, job.data, run, show_progress=self.wanted.show_progress)
        self.found[run] = job.key

    def _finished(self, job: Job) -> bool:
        run = self.place(job)
        return self.found.get(run) == job.key and len(_history(run)) >= job.settings.epochs

    def place(self, job: Job) -> Path:
        """The folder of a run: its own, or that of an equal run, of this table, another one or an earlier version."""
        own = self.folder / job.folder
        if not has_state(own):
            return next((run for run, key in self.found.items() if key == job.key), own)
        if self.found.get(own) != job.key:
            raise CheckpointError(f"{own} holds a run with other settings: choose another --output_dir.")
        return own

    def _key(self, run: Path) -> str:
        content = read_run(run)
        recipe = RECIPES.get(content["recipe"])
        if recipe is None:
            return ""
        settings = resumed_settings(recipe, run, {})
        return Job(recipe, settings, content["data"], "").key

    def _test(self, cell: Cell, seed: int) -> Metrics:
        """The metrics of a run, or of the mean of several, and of the epochs of its training."""
        jobs = self.jobs(cell, seed)
        runs = [self.place(job) for job in jobs]
        if not cell.members and cell.group is self.table.groups[0]:
            self.histories.setdefault(cell.row.name, []).append(_history(runs[0]))
        path = list(dict.fromkeys(job.data for job in jobs))
        options: dict[str, Any] = {
            "data": list(cell.other) or (path if len(path) == 1 else [job.data for job in jobs]),
            "split": split_for(cell, self.wanted),
            "protocol": protocol_of(cell.group, self.wanted),
            "judgements": list(self.wanted.judgements or cell.group.judgements),
        }
        contents = [self._hash_of_split(place, options["split"]) for place in ([] if cell.other else path)]
        contents += [file_hash(one) for one in options["judgements"] if Path(one).is_file()]
        identity = json.dumps([list(map(str, runs)), options, contents])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        file = self.folder / "reports" / f"{self._named(cell, seed)}-{cell.group.name}-{digest}.json"
        states = [(run / "last" / "progress.json").stat().st_mtime_ns for run in runs]
        if not file.is_file() or file.stat().st_mtime_ns < max(states):
            file.parent.mkdir(parents=True, exist_ok=True)
            show = self.wanted.show_progress
            evaluate_runs(runs, **options, bootstrap=0, output=file, show_progress=show)
        found = _metrics(Report.load(file), options["judgements"])
        if len(cell.other) < len(cell.group.data):  # a mean over fewer data sets than the paper's
            found = {name: value for name, value in found.items() if not name.endswith("_average")}
        return found

    def _hash_of_split(self, path: str, split: str) -> str:
        """The hash of what is measured, found once: a report of other texts or images is not used again."""
        if (path, split) not in self.splits:
            self.splits[path, split] = data_hash(open_split(path, split, Absent()))
        return self.splits[path, split]

    # --- words

    def _conditions(self) -> list[str]:
        said, cells = [], list(self.cells())
        for group in self.table.groups:
            own = [cell for cell in cells if cell.group == group]
            read = [one.other or tuple(part.path for part in one.members or (one,)) for one in own]
            places = list(dict.fromkeys(place for places in read for place in places if place))
            if group.kind == "test" and own:
                rules = [f"protocol {protocol_of(group, self.wanted)}"]
                rules += [f"judgements {one}" for one in self.wanted.judgements or group.judgements]
                splits = dict.fromkeys(split_for(cell, self.wanted) for cell in own if not cell.other)
                rules[:0] = [f"split {' and '.join(splits)}"] if splits else []
                trained = dict.fromkeys(cell.path for cell in own if cell.other)
                rules += [f"trained on {' and '.join(trained)}"] if trained else []
                said.append(f"measured beside {group.title}: {', '.join([*places, *rules])}.")
            elif places:
                said.append(f"measured beside {group.title}: {', '.join(places)}.")
        if name := self._preset_left_out():
            said.append(
                f"rows without a preset have their recipe's defaults; reproduce takes the preset {name}."
            )
        if self.wanted.changes:
            flags = ", ".join(f"{name} {value}" for name, value in self.wanted.changes.items())
            said.append(f"settings of every row that has them: {flags}.")
        needed = [name for name in self.table.needed(self.rows) if name not in self.data]
        if absent := ", ".join(f"--data {name}=PATH" for name in needed):
            said.append(f"not measured, for want of data: {absent}.")
        return said

    def _preset_left_out(self) -> str:
        """The table's preset, where published rows without one of their own are run with their recipes' defaults."""
        if self.wanted.published or self.wanted.preset:
            return ""
        rows = {row.name for row in self.rows if row.published and row.recipe and not row.preset}
        own = (_on(cell, self.table.preset) for cell in self.cells() if cell.row.name in rows)
        return " or ".join(dict.fromkeys(own))

    def _note(self, row: TableRow) -> str:
        """What a row's preset and switches set, and a flag sets otherwise."""
        cells = [cell for cell in self.cells() if cell.row.name == row.name]
        trained = [one for cell in cells for one in (cell.members or (cell,)) if one.row.recipe]
        own = [self._own(one) for one in trained]
        flags = {name: value for name, value in self.wanted.changes.items() if name not in self.wanted.vary}
        lost = [name for name, value in flags.items() if any(one.get(name, value) != value for one in own)]
        return f"a flag overrules its own {', '.join(lost)}." if lost else ""


def _on(cell: Cell, value: Any) -> Any:
    """A setting or the name of a preset on the data of a cell, which ``{data}`` stands for."""
    return value.replace("{data}", cell.group.train) if isinstance(value, str) else value


def _history(run: Path) -> list[dict[str, float]]:
    """The metrics of every epoch of a run by their own names."""
    return [
        {name.removeprefix("validation_"): value for name, value in line.items()}
        for line in _saved(run).get("history", ())
    ]


def _saved(run: Path) -> dict[str, Any]:
    """Where a run stands, as it was saved; empty before its first state."""
    file = run / "last" / "progress.json"
    return parse_json(MODEL.read(file)) if file.is_file() else {}


def _metrics(report: Report, judgements: Sequence[str]) -> Metrics:
    """Every metric by name, speeds too; those of judgements under the name that columns give them."""
    found = dict(report.metrics)
    for group in report.groups:
        found |= {f"speed_{name}": value for name, value in group.speed.items()}
    for one in judgements:
        start = f"{Path(one).stem}_"
        found |= {
            f"judged_{name.removeprefix(start)}": v for name, v in found.items() if name.startswith(start)
        }
    return found
