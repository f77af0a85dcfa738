"""watch."""

from __future__ import annotations

import time
from pathlib import Path

import click

from diptych.cli.collection import say as say_beside
from diptych.cli.collection import summary
from diptych.cli.echo import echo
from diptych.cli.flags import backend_flags


@click.command()
@click.argument("place", metavar="INDEX")
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--model",
    help="folder or name of the model (default: the model that the index records; for a new index lite0+minilm)",
)
@click.option(
    "--interval",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="seconds between two looks at the folder",
)
@click.option("--texts/--no_texts", default=True, help="index the texts too")
@click.option("--name", default="", help="name of the collection in the index (default: the data's own)")
@click.option("--batch_size", type=click.IntRange(1), help="pictures at a time (default: by device)")
@backend_flags
def watch(
    place: str,
    folder: Path,
    model: str | None,
    interval: float,
    texts: bool,
    name: str,
    batch_size: int | None,
    device: str,
    compute_precision: str,
    backend: str | None,
) -> None:
    """Keep an index current while a folder changes. Ctrl-C ends it.

    New, changed and removed pictures are indexed once their files have not changed for one interval. A folder that
    disappears leaves the index as it is, and is followed again when it is back.
    """
    from diptych.encoders.known_names import recorded_name
    from diptych.index.engines.opening import index_exists, shown
    from diptych.index.ingest.build import index_collection
    from diptych.index.ingest.works import Built
    from diptych.index.places import model_for, open_encoder
    from diptych.runs.watch import watch_folder

    if not folder.is_dir() and not index_exists(place):
        raise click.UsageError(f"there is no folder {folder} to watch: check the path.")
    name_of_model = model or model_for(place)
    retriever = open_encoder(name_of_model, place, device, compute_precision, backend=backend, say=say_beside)

    def bring() -> Built:
        return index_collection(
            retriever, folder, place, model_name=recorded_name(name_of_model), name=name, texts=texts,
            batch_size=batch_size,
        )  # fmt: skip

    def told(built: Built) -> str:
        skipped = "".join(f"\nskipped {item}: {reason}" for item, reason in built.skipped)
        return summary(shown(place), built) + skipped

    def say(sentence: str) -> None:
        echo(f"{time.strftime('%H:%M:%S')} {sentence}")

    try:
        watch_folder(folder, bring, interval=interval, say=say, told=told)
    except KeyboardInterrupt:
        echo(f"stopped: {shown(place)} holds what was indexed last.", err=True)
