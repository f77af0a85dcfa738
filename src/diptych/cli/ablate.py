"""ablate, reproduce: the tables of the papers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from diptych.cli.flags import OUTPUT, Command, option, settings_flags, together, user_flags
from diptych.names import unknown_name
from diptych.progress import echo
from diptych.registries import RECIPES
from diptych.settings import setting_names
from diptych.tables import PaperTable, main_recipe, papers, sweep, tables_of


class TableCommands(click.Group):
    """A command for each paper, and for each recipe."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Papers first; what is published has papers alone."""
        return papers() if self.name == "reproduce" else list(dict.fromkeys([*papers(), *RECIPES]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a paper or recipe, made now."""
        names = self.list_commands(ctx)
        if cmd_name not in names:
            raise unknown_name("paper" if self.name == "reproduce" else "paper or recipe", cmd_name, names)
        return _command(cmd_name, published=self.name == "reproduce")


@click.group(cls=TableCommands)
def ablate() -> None:
    """Run the rows of a paper's table on your data. Published and measured numbers stand side by side.

    Every row has its own preset, if it names one, and its switches; all else is the default of its recipe. 'reproduce'
    takes the table's preset and protocols too.
    """


@click.group(cls=TableCommands)
def reproduce() -> None:
    """Run a paper's table as it was published. Its settings, protocols and columns, on its data."""


def _command(name: str, published: bool) -> click.Command:
    tables = {key: table for key, table in tables_of(name).items() if not table.command}
    recipes = list(dict.fromkeys(recipe for table in tables.values() for recipe in table.recipes)) or [name]
    titles = "; ".join(f"{key}: {table.title}" for key, table in tables.items())
    title = f"Tables of the {'paper' if name in papers() else 'recipe'} {name}.\n\n{titles}."
    title = title if tables else f"Vary the recipe {name}."

    @click.command(name, help=title)
    @option("--table", "table (none: --vary alone)", type=click.Choice(list(tables)), hidden=not tables)
    @_options
    @_flags(recipes)
    def command(table: str | None, output_dir: Path | None, dry_run: bool, form: str, **options: Any) -> None:
        from diptych.runs import ablate as runner
        from diptych.runs.table_plan import TableRequest, data_by_name

        vary = _parse_vary(options.pop("vary"))
        data, rows = data_by_name(options.pop("data")), options.pop("row")
        target = tables[table] if table is not None else _sweep(name, tables, data if vary else None)
        own = {key: options.pop(key) for key in ("split", "protocol", "judgements", "seeds", "preset")}
        own["published"] = published and bool(target.paper)
        request = TableRequest(data, rows=rows, vary=vary, changes=user_flags(options), **own)
        folder = output_dir or Path("runs") / f"{name}-{target.name}"
        if dry_run:
            echo(runner.plan(target, folder, request))
            return
        results = runner.ablate(target, folder, request)
        if form == "json":
            echo(json.dumps(results.json(), indent=2))
            return
        echo(getattr(results, form)())
        for file in sorted([*folder.glob(f"table-{target.name}.*"), *folder.glob(f"figure-{target.name}.*")]):
            echo(file)

    return command


_FORMS = click.Choice(["terminal", "markdown", "latex", "json"])
_options = together(
    option("--data", "PATH, or NAME=PATH for each data set of the table (may be repeated)", multiple=True),
    option("--split", "split that is measured (default: test; testall for COCO's protocols)"),
    option("--protocol", "protocol of image-text retrieval (reproduce: the table's; ablate: plain)"),
    option("--judgements", "judgements in place of the table's (may be repeated)", multiple=True),
    option("--seeds", "runs per row, seeds 0, 1, …", 1, type=click.IntRange(1)),
    option("--row", "only the rows of this name (may be repeated)", multiple=True),
    option("--preset", "published settings in place of the table's (docs/recipes.md lists them)"),
    option("--vary", "SETTING=a,b,c: repeat every row with each value", multiple=True),
    option("--dry_run", "list what would be trained and measured, with an estimate", is_flag=True),
    option("--format", "form of the printed table; all are saved", "terminal", to="form", type=_FORMS),
    option("--output_dir", "folder of the runs (default: runs/PAPER-TABLE)", type=OUTPUT),
)
"""Which rows, on which data, measured how, with which settings; what is written, and where."""


def _flags(recipes: list[str]) -> Callable[[Command], Command]:
    """The settings of all recipes as flags; the seed is that of the run."""

    def decorate(command: Command) -> Command:
        names = {"seed", "preset"}
        for name in recipes:
            kind = RECIPES[name].settings
            command = settings_flags(kind, leave_out=names)(command)
            names |= setting_names(kind)
        return command

    return decorate


def _parse_vary(given: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in given:
        name, mark, values = text.partition("=")
        name = name.replace("-", "_")
        if not mark or not name or not all(values.split(",")):
            raise click.UsageError(
                f"--vary {text}: give a setting and its values, as in epsilon=0.05,0.1,0.2."
            )
        if name == "seed":
            raise click.UsageError("--vary seed: every row takes the seeds 0, 1, …: give --seeds N instead.")
        if name in found:
            raise click.UsageError(f"two --vary are of {name}: give all its values in one.")
        found[name] = [*dict.fromkeys(values.split(","))]
    return found


def _sweep(name: str, tables: dict[str, PaperTable], data: Iterable[str] | None) -> PaperTable:
    """Where no table is named: for ``--vary`` the recipe as it is, on these data, else the one table there is."""
    recipe = main_recipe(name) if name in papers() else name
    if data is not None and recipe:
        return sweep(recipe, sorted(data))  # data without a name come first
    if len(tables) == 1:
        return next(iter(tables.values()))
    missing = f"--table is missing: choose one of {', '.join(tables)}."
    raise click.UsageError(missing if tables else "--vary is missing: give a setting and its values.")
