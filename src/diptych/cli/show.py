"""show: pictures of what runs have learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from diptych.cli.flags import Command, device_flags
from diptych.progress import echo


@click.group()
def show() -> None:
    """Draw what models have learned. The joint space, pooling weights, attention, speed, or two runs side by side."""


def _on_data(command: Command) -> Command:
    """The flags of what reads a split."""
    options: list[Callable[[Command], Command]] = [
        click.option(
            "--data",
            multiple=True,
            help="data set, one for all runs or one each (default: the first run's own)",
        ),
        click.option("--split", default="val", show_default=True, help="split to show"),
        click.option(
            "--seed",
            default=0,
            show_default=True,
            type=click.IntRange(0, 2**32 - 1),
            help="seed of the random choice of items",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _output(name: str) -> Callable[[Command], Command]:
    return click.option(
        "--output", default=name, show_default=True, type=click.Path(path_type=Path), help="file to write"
    )


@show.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@_on_data
@click.option(
    "--count",
    default=200,
    show_default=True,
    type=click.IntRange(2),
    help="images drawn, with all their texts",
)
@click.option("--untrained", is_flag=True, help="also the first run's model as it was before training")
@_output("space.png")
def space(runs: tuple[Path, ...], output: Path, **options: Any) -> None:
    """t-SNE of the joint space, before and after training.

    A panel per run: images and texts in two colours, matched pairs joined.
    """
    from diptych.runs.show import show_space

    echo(show_space(runs, output, **options))


@show.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@_on_data
@click.option(
    "--where",
    default="random",
    show_default=True,
    type=click.Choice(["random", "differs"]),
    help="queries drawn at random, or those ranked most differently",
)
@click.option(
    "--count", default=12, show_default=True, type=click.IntRange(1), help="queries of each direction"
)
@_output("grids.html")
def grids(runs: tuple[Path, ...], output: Path, **options: Any) -> None:
    """Write the answers of one run, or of two, as one page."""
    from diptych.runs.show import show_grids

    echo(show_grids(runs, output, **options))


@show.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--sizes", default="4,12,36", show_default=True, help="set sizes, with commas")
@_output("pooling.png")
def pooling(runs: tuple[Path, ...], sizes: str, output: Path) -> None:
    """What GPO has learned, beside mean and max pooling."""
    from diptych.runs.show import show_pooling

    try:
        numbers = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise click.UsageError(f"--sizes {sizes}: give whole numbers with commas, as in 4,12,36.") from None
    echo(show_pooling(runs, output, sizes=numbers))


@show.command()
@click.option("--data", required=True, help="data set with pictures: a path in any known format, or 'emoji'")
@click.option("--split", default="train", show_default=True, help="split to draw from")
@click.option("--count", default=3, show_default=True, type=click.IntRange(1), help="pictures")
@click.option("--draws", default=2, show_default=True, type=click.IntRange(1), help="rows for each picture")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**32 - 1),
    help="seed of the random choice of items",
)
@_output("augmentation.png")
def augmentation(data: str, output: Path, **options: Any) -> None:
    """Pictures and texts after every step of augmentation."""
    from diptych.runs.show import show_augmentation

    echo(show_augmentation(data, output, **options))


@show.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@_on_data
@click.option("--count", default=4, show_default=True, type=click.IntRange(1), help="pairs drawn")
@_output("attention.png")
def attention(runs: tuple[Path, ...], output: Path, **options: Any) -> None:
    """Cells and words that transformers look at.

    A column per run, for the same pairs.
    """
    from diptych.runs.show_attention import show_attention

    echo(show_attention(runs, output, **options))


@show.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--texts", required=True, nargs=2, help="the two sentences")
@click.option("--data", multiple=True, help="pictures to find: one data set for all runs or one each")
@click.option("--split", default="val", show_default=True, help="split to search")
@click.option(
    "--count", default=4, show_default=True, type=click.IntRange(1), help="pictures for each sentence"
)
@_output("knowledge.png")
def knowledge(runs: tuple[Path, ...], texts: tuple[str, str], output: Path, **options: Any) -> None:
    """How alike two sentences are, and what each finds."""
    from diptych.runs.show_attention import show_knowledge

    echo(show_knowledge(runs, texts, output, **options))


@show.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@_on_data
@click.option(
    "--rerank", default=50, show_default=True, type=click.IntRange(1), help="hits that pair scorers re-rank"
)
@click.option(
    "--count",
    default=1000,
    show_default=True,
    type=click.IntRange(2),
    help="images of the split that are ranked",
)
@click.option(
    "--most",
    default=100_000,
    show_default=True,
    type=click.IntRange(10),
    help="images of the largest gallery",
)
@click.option(
    "--patience",
    default=20.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="seconds per query above which a gallery is extrapolated",
)
@device_flags
@_output("speed.png")
def speed(runs: tuple[Path, ...], output: Path, **options: Any) -> None:
    """Time per query by gallery, and recall by speed.

    Two pictures: dual encoders, pair scorers, and dual encoders re-ranked by the pair scorers.
    """
    from diptych.runs.show_speed import show_speed

    echo(show_speed(runs, output, **options))


@show.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", multiple=True, help="data set (default: the run's own)")
@click.option("--split", default="val", show_default=True, help="split to look at")
@click.option(
    "--count", default=12, show_default=True, type=click.IntRange(1), help="label pairs on the page"
)
@_output("confusions.html")
def confusions(run: Path, output: Path, **options: Any) -> None:
    """Labels a label-wise model confuses, with examples."""
    from diptych.runs.show import show_confusions

    echo(show_confusions(run, output, **options))
