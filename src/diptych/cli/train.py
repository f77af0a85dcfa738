"""train, demo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diptych.cli.flags import (
    OUTPUT,
    PATH,
    column_flags,
    columns_of,
    option,
    settings_flags,
    user_flags,
    with_columns,
)
from diptych.errors import without_torch
from diptych.names import import_plugins
from diptych.progress import echo
from diptych.registries import RECIPES
from diptych.tables import preset as preset_of
from diptych.tables import presets

if TYPE_CHECKING:
    from diptych.recipes.recipe import Recipe
    from diptych.training.checkpoint import Progress


class Recipes(click.Group):
    """A command for each recipe, made when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        import_plugins()
        return list(RECIPES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a recipe, made now."""
        return _train_command(RECIPES.find(cmd_name))


@click.group(cls=Recipes)
def train() -> None:
    """Train a recipe. As in: diptych train vse-infinity --data PATH --output_dir RUN."""


def _train_command(recipe: Recipe) -> click.Command:
    known = ", ".join(presets(recipe.name)) or "the recipe has none"

    @click.command(recipe.name, help=f"{recipe.title}.")
    @option("--data", "data set: a path in any known format, or 'emoji' (a resumed run knows its own)")
    @option("--output_dir", "folder of the run", type=OUTPUT)
    @option("--resume_from_checkpoint", "run to resume", type=PATH)
    @option("--no_runtime", "do not write the ONNX encoders for searching without torch", is_flag=True)
    @option("--preset", f"published settings, which other flags change: {known}")
    @column_flags
    @settings_flags(recipe.settings)
    def command(
        data: str | None,
        output_dir: Path | None,
        resume_from_checkpoint: Path | None,
        no_runtime: bool,
        preset: str | None,
        **flags: Any,
    ) -> None:
        from diptych.runs.train import inherited, resumed_settings, run_recipe
        from diptych.training.checkpoint import read_run

        columns = columns_of(flags)
        if (output_dir is None) == (resume_from_checkpoint is None):
            raise click.UsageError(
                "a run needs one folder: give --output_dir for a new run, or --resume_from_checkpoint for an old one."
            )
        if resume_from_checkpoint is not None:
            if preset:
                raise click.UsageError("a resumed run has its settings: leave out --preset.")
            folder, resume = resume_from_checkpoint, True
            settings = resumed_settings(recipe, folder, user_flags(flags))
            data = data or str(read_run(folder)["data"])
        elif data is not None and output_dir is not None:
            folder, resume = output_dir, False
            values = {**(preset_of(recipe.name, preset) if preset else {}), **user_flags(flags)}
            settings = recipe.settings(**inherited(recipe.settings, values))
            data = with_columns(data, columns)
        else:
            raise click.UsageError("a new run needs data: give --data, the path of a data set or 'emoji'.")
        progress = run_recipe(recipe, settings, data, folder, resume=resume)
        if os.environ.get("RANK", "0") != "0":  # only rank 0 prints
            return
        _say_result(progress, folder, data, settings.ridge_baseline)
        if not no_runtime:
            from diptych.model.runtime_export import add_runtime

            echo(add_runtime(folder))
        echo(f"next: diptych evaluate {folder} --data {data}   |   diptych index {folder} PATH")

    return command


def _say_result(progress: Progress, folder: Path, data: str, baseline: bool) -> None:
    """The best validation score, and how it compares with ridge regression."""
    from diptych.training.baseline import Baseline, verdict
    from diptych.training.validation import epoch_name, metric_name

    echo(
        f"best validation {metric_name(progress.metric)} {progress.best:.1f} ({epoch_name(progress.best_epoch)}): "
        f"{folder / 'best'}"
    )
    sentence = verdict(progress, Baseline.load(folder) if baseline else None, data)
    if sentence:
        echo(sentence)


@click.command()
@option("--output_dir", "folder of the runs, the index and the report", "demo", type=OUTPUT)
def demo(output_dir: Path) -> None:
    """Train two models on emoji pictures, search them, write a report. A second run reuses what is there."""
    echo(f"demo: two models, an index and a report, in {output_dir}; loading the libraries", err=True)
    try:
        from diptych.runs.demo import run_demo
    except ModuleNotFoundError as error:
        raise without_torch(error, "the demo", "demo") from error
    run_demo(output_dir)
