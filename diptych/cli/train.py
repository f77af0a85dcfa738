"""train, evaluate, ablate, reproduce."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from diptych.cli.flags import column_flags, device_flags, given, say_device, settings_flags, with_columns
from diptych.recipes import RECIPES
from diptych.recipes.recipe import Recipe


@click.group()
def train() -> None:
    """Train a recipe. As in: diptych train vse-infinity --data PATH --output_dir RUN."""


def _train_command(recipe: Recipe) -> click.Command:
    @click.command(recipe.name, help=f"{recipe.title}.")
    @click.option(
        "--data", help="data set: a path in any known format, or 'emoji' (a resumed run knows its own)"
    )
    @click.option("--output_dir", type=click.Path(path_type=Path), help="folder of the run")
    @click.option(
        "--resume_from_checkpoint",
        type=click.Path(path_type=Path),
        help="run to go on with",
    )
    @column_flags
    @settings_flags(recipe.settings)
    def command(
        data: str | None,
        output_dir: Path | None,
        resume_from_checkpoint: Path | None,
        image_column: str | None,
        text_column: str | None,
        **flags: Any,
    ) -> None:
        from diptych.runs.train import inherited, resumed_settings, run_recipe
        from diptych.training.checkpoint import read_run

        if (output_dir is None) == (resume_from_checkpoint is None):
            raise click.UsageError(
                "a run needs one folder: give --output_dir for a new run, or --resume_from_checkpoint for an old one."
            )
        if resume_from_checkpoint is not None:
            folder, resume = resume_from_checkpoint, True
            settings = resumed_settings(recipe, folder, given(flags))
            data = data or str(read_run(folder)["data"])
        elif data is not None and output_dir is not None:
            folder, resume = output_dir, False
            settings = recipe.settings(**inherited(recipe.settings, given(flags)))
            data = with_columns(data, image_column, text_column)
        else:
            raise click.UsageError("a new run needs data: give --data, the path of a data set or 'emoji'.")
        progress = run_recipe(recipe, settings, data, folder, resume=resume)
        if os.environ.get("RANK", "0") != "0":  # of several processes, one speaks
            return
        from diptych.training.baseline import Baseline, verdict
        from diptych.training.validation import named, shown

        click.echo(
            f"best validation {shown(progress.metric)} {progress.best:.1f} ({named(progress.best_epoch)}): "
            f"{folder / 'best'}"
        )
        said = verdict(progress, Baseline.load(folder) if settings.ridge_baseline else None, data)
        if said:
            click.echo(said)
        click.echo(f"next: diptych evaluate {folder} --data {data}   |   diptych index {folder} PATH")

    return command


for _recipe in RECIPES.values():
    train.add_command(_train_command(_recipe))


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--data", multiple=True, help="data set, one for all runs or one each (default: the first run's own)"
)
@click.option("--split", help="split to evaluate (default: val; of vectors, everything)")
@click.option(
    "--protocol",
    default="plain",
    show_default=True,
    help="plain, flickr30k, coco-1k, coco-5k, video, hashing; sts, image-classes; four-directions",
)
@click.option(
    "--judgements",
    multiple=True,
    type=click.Choice(["eccv", "cxc", "coco"]),
    help="also many-to-many metrics",
)
@click.option("--ties", default="index", show_default=True, help="tie rule (see docs/evaluation.md)")
@click.option(
    "--bootstrap", default=1000, show_default=True, help="resamples of the 95 % intervals (0: none)"
)
@click.option(
    "--rerank",
    default=0,
    type=click.IntRange(0),
    help="re-rank the top N of each query with the pair scorers of --reranker",
)
@click.option(
    "--reranker",
    multiple=True,
    type=click.Path(path_type=Path),
    help="run with a pair scorer (may be repeated: the mean of their scores)",
)
@click.option(
    "--score_matrix",
    type=click.Path(path_type=Path),
    help="compute all scores into this .npy file first; a run that was killed goes on from there",
)
@click.option(
    "--equal_texts",
    is_flag=True,
    help="every picture that has the same text, but for case and punctuation, is right for it",
)
@click.option(
    "--strict_images",
    is_flag=True,
    help="stop at a picture that cannot be read (else it is left out and listed)",
)
@click.option("--output", type=click.Path(path_type=Path), help="also save the report as JSON")
@click.option("--ray", metavar="ADDRESS", help="count the ranks of vectors on a Ray cluster")
@column_flags
@device_flags
def evaluate(
    runs: tuple[Path, ...], image_column: str | None, text_column: str | None, **options: Any
) -> None:
    """Evaluate a run, a model folder or a pretrained model (hf:ID). Several are an ensemble: their mean scores.

    A folder that diptych embed wrote is evaluated from its vectors, a few shards in memory at a time.
    """
    from diptych.vectors.manifest import is_vectors

    if any(is_vectors(run) for run in runs):
        from diptych.runs.evaluate_vectors import evaluate_folder

        click.echo(evaluate_folder(runs, **given(options)).render())
        return
    from diptych.runs.evaluate import evaluate_runs

    if options.pop("ray"):
        raise click.UsageError(
            "--ray evaluates a folder of vectors: run diptych embed first, and give its folder."
        )
    options["split"] = options["split"] or "val"
    options["data"] = [with_columns(path, image_column, text_column) for path in options["data"]]
    click.echo(evaluate_runs(runs, **options, say=say_device).render())


class _Sides(click.Command):
    """A command whose ``--with`` takes every result that follows it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """``--with B1 B2`` read as ``--with B1 --with B2``."""
        read: list[str] = []
        after = False
        for arg in args:
            if arg.startswith("-"):
                after = arg == "--with"
                read += [] if after else [arg]
            else:
                read += ["--with", arg] if after else [arg]
        if "--with" in args and "--with" not in read:
            ctx.fail("--with has no result behind it: give those of the other side.")
        return super().parse_args(ctx, read)


@click.command(cls=_Sides)
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--with", "other", multiple=True, type=click.Path(path_type=Path), help="results of the other side"
)
@click.option("--data", multiple=True, help="data set to evaluate runs on (default: each run's own)")
@click.option("--split", default="val", show_default=True, help="split to evaluate runs on")
@click.option("--protocol", default="plain", show_default=True, help="protocol to evaluate runs under")
@click.option(
    "--draws",
    default=10_000,
    show_default=True,
    type=click.IntRange(0),
    help="resamples of the interval and of the paired test (0: none)",
)
@device_flags
def compare(results: tuple[Path, ...], other: tuple[Path, ...], draws: int, **options: Any) -> None:
    """Compare two results, or several seeds of each.

    As in: diptych compare A1 A2 A3 --with B1 B2 B3. A result is a report that evaluate --output saved, or the folder of
    a run, which is evaluated first. The difference comes with its 95 % interval and a paired test. Unlike protocols are
    refused, with the field that differs.
    """
    from diptych.runs.compare import compare_runs

    click.echo(compare_runs(results, other, draws=draws, **options).render())


@click.group()
def ablate() -> None:
    """Run the rows of a paper's table on your data. Published and measured numbers stand side by side."""


def _ablate_command(recipe: Recipe) -> click.Command:
    @click.command(recipe.name, help=f"{recipe.title}.")
    @click.option("--table", required=True, type=click.Choice(list(recipe.tables)), help="table of the paper")
    @click.option("--data", required=True, help="data set: a path in any known format, or 'emoji'")
    @click.option(
        "--seeds", default=1, show_default=True, type=click.IntRange(1), help="runs per row, seeds 0, 1, …"
    )
    @click.option("--row", multiple=True, help="only the rows of this name (may be repeated)")
    @click.option(
        "--output_dir",
        required=True,
        type=click.Path(path_type=Path),
        help="folder of the runs",
    )
    @settings_flags(recipe.settings)
    def command(
        table: str, data: str, seeds: int, row: tuple[str, ...], output_dir: Path, **flags: Any
    ) -> None:
        from diptych.runs.ablate import ablate as run

        click.echo(run(recipe, table, data, output_dir, seeds=seeds, rows=row, changes=given(flags)))

    return command


for _recipe in RECIPES.values():
    if _recipe.tables:
        ablate.add_command(_ablate_command(_recipe))


@click.group()
def reproduce() -> None:
    """Reproduce a paper's experiment that needs no data."""


@reproduce.command("vse-infinity")
@click.option("--table", required=True, type=click.Choice(["6"]), help="6: the synthetic pooling experiment")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="runs per cell")
@click.option("--output", type=click.Path(path_type=Path), help="also save the numbers as JSON")
def reproduce_vse_infinity(table: str, seeds: int, output: Path | None) -> None:
    """How well each design of GPO learns known poolings (VSE∞)."""
    from diptych.runs import synthetic_pooling

    click.echo(synthetic_pooling.reproduce(seeds=seeds, output=output))
