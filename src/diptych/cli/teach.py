"""teach."""

from __future__ import annotations

from typing import Any

import click

from diptych.cli.echo import echo
from diptych.registries import IMAGE_TEACHERS, TEXT_TEACHERS
from diptych.settings import IMAGE_TEACHER_HELP, TEXT_TEACHER_HELP


@click.command()
@click.argument("data")
@click.option(
    "--image_teacher",
    default="auto",
    show_default=True,
    help=f"{IMAGE_TEACHER_HELP}: {IMAGE_TEACHERS.choices}",
)
@click.option(
    "--text_teacher",
    default="minilm",
    show_default=True,
    help=f"{TEXT_TEACHER_HELP}: {TEXT_TEACHERS.choices}",
)
@click.option(
    "--image_teacher_space",
    default="pooled",
    show_default=True,
    type=click.Choice(["pooled", "tokens"]),
    help="the mean of the image teacher's cells, or all cells end to end",
)
@click.option(
    "--teacher_projection",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="project teacher vectors to this many dimensions (0: none)",
)
@click.option("--image_size", default=224, show_default=True, help="pixels of the image teacher's input")
@click.option("--clean_captions", is_flag=True, help="clean the texts first, as cusa-clip does")
def teach(data: str, **options: Any) -> None:
    """Compute the teacher vectors of a data set once (CUSA). Run again to continue after an interruption."""
    from diptych.runs.teach import teach as run
    from diptych.training.teachers import Teachers

    teachers = Teachers(
        options["image_teacher"],
        options["text_teacher"],
        space=options["image_teacher_space"],
        project=options["teacher_projection"],
        image_size=options["image_size"],
        clean=options["clean_captions"],
    )
    for taught in run(teachers, data):
        echo(str(taught))
