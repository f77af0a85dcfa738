"""Run the rows of a paper's table, several seeds each, and set published and measured numbers side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.data.formats import open_captions
from diptych.errors import CheckpointError, Interrupted, SettingsError
from diptych.evaluation.significance import mean_and_interval
from diptych.recipes.recipe import Recipe, Row, Table
from diptych.reports.charts import figure_class
from diptych.runs.figures import draw_table
from diptych.runs.train import inherited, resumed_settings, run_recipe, training_splits
from diptych.settings import from_json, to_json
from diptych.storage import MODEL, parse_json, write_text
from diptych.training.checkpoint import Progress, has_state


def ablate(
    recipe: Recipe,
    table: str,
    data: str,
    folder: Path,
    *,
    seeds: int = 1,
    rows: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    show_progress: bool = True,
) -> str:
    """Run a table's rows on ``data`` and return the comparison; finished runs are reused, broken ones go on.

    ``changes`` apply to every row, the row's own switches win. The measured numbers are those of the validation
    split at the best epoch; each run lies in ``folder/<number>-<row>-seed<k>``.
    """
    chosen = _chosen(recipe.tables[table], rows)
    numbers = {row.name: number for number, row in enumerate(recipe.tables[table].rows, 1)}
    results: dict[str, list[dict[str, float]]] = {}
    histories: dict[str, list[list[dict[str, float]]]] = {}
    training, _ = training_splits(open_captions(data))
    if recipe.tables[table].figure is not None:
        figure_class()  # without the extra that draws, nothing is run
    for row in chosen:  # what cannot be run is refused before the first row takes its hours
        values = inherited(recipe.settings, {**(changes or {}), **row.changes})
        recipe.build(from_json(recipe.settings, values), training)
    for row in chosen:
        for seed in range(seeds):
            values = inherited(recipe.settings, {**(changes or {}), **row.changes, "seed": seed})
            run = folder / f"{numbers[row.name]}-{_slug(row.name)}-seed{seed}"
            if show_progress:
                print(f"{row.name}, seed {seed}: {run}", flush=True)
            progress = _measured(recipe, values, data, run, show_progress)
            history = [_validation(line) for line in progress.history]
            histories.setdefault(row.name, []).append(history)
            (best,) = (line for line in history if line["epoch"] == progress.best_epoch)
            results.setdefault(row.name, []).append(best)
    _keep(folder / f"table-{table}.json", results)
    said = render(recipe.tables[table], chosen, results, data)
    if recipe.tables[table].figure is None:
        return said
    drawing = folder / f"figure-{table}.svg"
    draw_table(recipe.tables[table], chosen, histories, results, drawing)
    return f"{said}\n\n{drawing}"


def _keep(file: Path, results: Mapping[str, Any]) -> None:
    """Write the rows that were run beside those of earlier calls."""
    earlier = parse_json(MODEL.read(file)) if file.exists() else {}
    write_text(file, json.dumps({**earlier, **results}, indent=2))


def _measured(recipe: Recipe, values: dict[str, Any], data: str, run: Path, show_progress: bool) -> Progress:
    settings = from_json(recipe.settings, values)
    resume = has_state(run)
    if resume and to_json(resumed_settings(recipe, run, {})) != to_json(settings):
        raise CheckpointError(f"{run} holds a run with other settings: choose another --output_dir.")
    try:
        return run_recipe(
            recipe, settings, data, run, resume=resume, baseline=False, show_progress=show_progress
        )
    except Interrupted as note:
        raise Interrupted(f"stopped and saved in {run}: run the same command again to go on.") from note


def _validation(line: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an epoch by their own names."""
    return {name.removeprefix("validation_"): value for name, value in line.items()}


def render(
    table: Table, rows: Sequence[Row], results: Mapping[str, list[dict[str, float]]], data: str
) -> str:
    """Markdown: published numbers, then measured means with 95 % intervals over the seeds, for each row.

    A column that was neither published nor measured is left out.
    """
    runs = [run for row in rows for run in results[row.name]]
    known = [*runs, *(row.published for row in rows)]
    columns = {
        name: head for name, head in table.columns.items() if any(name in numbers for numbers in known)
    }
    lines = [
        f"{table.title}",
        f"published: {table.protocol}; measured: {data}, validation split. Unlike data: compare the order, not values.",
        "",
        f"| row | | {' | '.join(columns.values())} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for row in rows:
        published = [f"{row.published[name]:.1f}" if name in row.published else "" for name in columns]
        measured = [
            mean_and_interval([run[name] for run in results[row.name] if name in run]) for name in columns
        ]
        lines.append(f"| {row.name} | published | " + " | ".join(published) + " |")
        lines.append("| | measured | " + " | ".join(measured) + " |")
    return "\n".join(lines)


def _chosen(table: Table, names: Sequence[str]) -> list[Row]:
    known = {row.name: row for row in table.rows}
    for name in names:
        if name not in known:
            raise SettingsError(f"the table has no row '{name}': its rows are {', '.join(known)}.")
    return [known[name] for name in names] if names else list(table.rows)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
