"""show: pictures of what runs have learned."""

from __future__ import annotations

import importlib
from typing import Any

import click

from diptych.cli.flags import OUTPUT_FILE, PATH, SEED, Command, device_flags, option, together
from diptych.progress import echo


@click.group()
def show() -> None:
    """Draw what models have learned. The joint space, pooling weights, attention, speed, or two runs side by side."""


RUNS = click.argument("runs", nargs=-1, required=True, type=PATH)
ON_DATA = together(
    option("--data", "data set, one for all runs or one each (default: the first run's own)", multiple=True),
    option("--split", "split to show", "val"),
    option("--seed", "seed of the random choice of items", 0, type=SEED),
)


def _count(default: int, help: str, least: int = 1) -> Command:
    return option("--count", help, default, type=click.IntRange(least))


def _add_chart(function: str, output: str, help: str, *flags: Command, module: str = "show") -> None:
    """A command that calls ``show_NAME`` of a module of ``runs`` with its flags, and prints what it says."""
    name = function.removeprefix("show_")

    def run(**options: Any) -> None:
        echo(getattr(importlib.import_module(f"diptych.runs.{module}"), function)(**options))

    command = together(*flags, option("--output", "file to write", output, type=OUTPUT_FILE))(run)
    show.add_command(click.command(name, help=help)(command))


def _sizes(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    try:
        return [int(size) for size in value.split(",")]
    except ValueError:
        raise click.UsageError(f"--sizes {value}: give whole numbers with commas, as in 4,12,36.") from None


_add_chart(
    "show_space",
    "space.png",
    "t-SNE of the joint space, before and after training.\n\n"
    "A panel per run: images and texts in two colours, matched pairs joined.",
    RUNS,
    ON_DATA,
    _count(200, "images drawn, with all their texts", 2),
    click.option("--untrained", is_flag=True, help="also the first run's model as it was before training"),
)
_add_chart(
    "show_grids",
    "grids.html",
    "Write the answers of one run, or of two, as one page.",
    RUNS,
    ON_DATA,
    option(
        "--where",
        "queries drawn at random, or those ranked most differently",
        "random",
        type=click.Choice(["random", "differs"]),
    ),
    _count(12, "queries of each direction"),
)
_add_chart(
    "show_pooling",
    "pooling.png",
    "What GPO has learned, beside mean and max pooling.",
    RUNS,
    option("--sizes", "set sizes, with commas", "4,12,36", callback=_sizes),
)
_add_chart(
    "show_augmentation",
    "augmentation.png",
    "Pictures and texts after every step of augmentation.",
    option("--data", "data set with pictures: a path in any known format, or 'emoji'", required=True),
    option("--split", "split to draw from", "train"),
    _count(3, "pictures"),
    option("--draws", "rows for each picture", 2, type=click.IntRange(1)),
    option("--seed", "seed of the random choice of items", 0, type=SEED),
)
_add_chart(
    "show_attention",
    "attention.png",
    "Cells and words that transformers look at.\n\nA column per run, for the same pairs.",
    RUNS,
    ON_DATA,
    _count(4, "pairs drawn"),
    module="show_attention",
)
_add_chart(
    "show_knowledge",
    "knowledge.png",
    "How alike two sentences are, and what each finds.",
    RUNS,
    option("--texts", "the two sentences", required=True, nargs=2),
    option("--data", "pictures to find: one data set for all runs or one each", multiple=True),
    option("--split", "split to search", "val"),
    _count(4, "pictures for each sentence"),
    module="show_attention",
)
_add_chart(
    "show_speed",
    "speed.png",
    "Time per query by gallery, and recall by speed.\n\n"
    "Two pictures: dual encoders, pair scorers, and dual encoders re-ranked by the pair scorers.",
    RUNS,
    ON_DATA,
    option("--rerank", "hits that pair scorers re-rank", 50, type=click.IntRange(1)),
    _count(1000, "images of the split that are ranked", 2),
    option("--most", "images of the largest gallery", 100_000, type=click.IntRange(10)),
    option(
        "--patience",
        "seconds per query above which a gallery is extrapolated",
        20.0,
        type=click.FloatRange(0, min_open=True),
    ),
    device_flags,
    module="show_speed",
)
_add_chart(
    "show_confusions",
    "confusions.html",
    "Labels a label-wise model confuses, with examples.",
    click.argument("run", type=PATH),
    option("--data", "data set (default: the run's own)", multiple=True),
    option("--split", "split to look at", "val"),
    _count(12, "label pairs on the page"),
)
