"""label: the labels of new images and texts."""

from __future__ import annotations

from pathlib import Path

import click

from diptych.cli.flags import backend_flags
from diptych.progress import echo


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("path", metavar="FOLDER")
@click.option(
    "--output",
    default="labels.csv",
    show_default=True,
    type=click.Path(path_type=Path),
    help="table to write: kind, id, text, labels, scores",
)
@click.option("--texts/--no_texts", default=True, help="label the texts too, where there are any")
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    help="score from which a label is told (default: the model's own, chosen on validation data)",
)
@click.option("--top", type=click.IntRange(1), help="the best N labels of each item, whatever their scores")
@backend_flags
def label(
    model: Path,
    path: str,
    output: Path,
    texts: bool,
    threshold: float | None,
    top: int | None,
    device: str,
    compute_precision: str,
    backend: str | None,
) -> None:
    """Predict labels with a label-wise model. FOLDER is a folder of images or a data set in any known format."""
    from diptych.index.models import open_model
    from diptych.runs.label import label_collection

    retriever = open_model(model, device, compute_precision, backend=backend)
    echo(label_collection(retriever, path, output, texts=texts, threshold=threshold, top=top))
