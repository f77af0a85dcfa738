"""import, export: what other programs made, and what they can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from diptych.cli.flags import (
    OUTPUT,
    OUTPUT_FILE,
    PATH,
    Command,
    RegistryGroup,
    backend_flags,
    model_of,
    option,
    together,
)
from diptych.progress import counted, echo
from diptych.registries import EXPORTERS


@click.group()
def import_() -> None:
    """Import models and vectors of other programs."""


def _add_checkpoint(name: str, help: str, *flags: Command) -> None:
    """A command that saves what ``runs.published`` makes of a checkpoint, where there is nothing yet."""

    def run(checkpoint: Path, output_dir: Path, **options: Any) -> None:
        from diptych.runs import published

        if output_dir.exists():
            raise click.UsageError(f"{output_dir} is already there: choose another folder for the model.")
        model = getattr(published, f"import_{name.replace('-', '_')}")(checkpoint, **options)
        model.save_pretrained(output_dir)
        echo(f"{output_dir}: {model.dim} dimensions, {sum(p.numel() for p in model.parameters()):,} weights")
        echo(f"next: diptych evaluate {output_dir} --data PATH --split test")

    places = (
        click.argument("checkpoint", type=PATH), click.argument("output_dir", metavar="MODEL", type=OUTPUT)
    )  # fmt: skip
    import_.add_command(click.command(name, help=help)(together(*places, *flags)(run)))


_add_checkpoint(
    "vse-infinity",
    "Import a checkpoint of the public VSE∞ code. Regions with BiGRU or BERT; nothing in the file is run.",
    option("--vocabulary", "vocabulary of a BiGRU, JSON as published", type=PATH),
    option("--text_model", "what a BERT started from: hf:bert-base-uncased or a folder"),
)
_add_checkpoint(
    "sgraf",
    "Import a checkpoint of the public SGRAF code, SGR or SAF. Nothing in the file is run.",
    option("--vocabulary", "its vocabulary, JSON as published", type=PATH),
)
_add_checkpoint(
    "cusa",
    "Import a checkpoint of the public CUSA code, on CLIP. Nothing in the file is run.",
    option("--model", "the CLIP it started from: hf:openai/clip-vit-base-patch32 or a folder"),
)


@import_.command("embeddings")
@click.argument("source", type=PATH)
@click.argument("place", metavar="INDEX")
@option("--model", "the model that made the vectors: its folder, or hf:ID", required=True)
@option("--paths", "beside an .npy file: a line, or a row of a table, for each vector", type=PATH)
@option("--images", "folder that relative paths of images start from", to="root", type=PATH)
@click.option("--name", default="", help="name of the collection in the index (default: SOURCE)")
@option("--unchecked", "do not compare the vectors of some pictures with the model's own", is_flag=True)
@backend_flags
def import_embeddings(source: Path, place: str, model: str, unchecked: bool, **options: Any) -> None:
    """Import vectors of images into an index.

    SOURCE is a folder of clip-retrieval, a .npy with --paths, or a Parquet table.

    Everything is checked before anything is written: width, NaN, one row of metadata for each vector, and, for a few
    pictures that can be read, that the model makes the same vectors.
    """
    from diptych.encoders.known_names import recorded_name
    from diptych.index.engines.opening import without_password
    from diptych.index.models import check_probes, say_device
    from diptych.runs.embeddings import import_embeddings as run

    retriever = model_of(model, options)
    say_device(retriever.device)
    check_probes(retriever, model)
    result = run(source, place, retriever, model_name=recorded_name(model), check=not unchecked, **options)
    for note in result.notes:
        echo(note, err=True)
    echo(f"{without_password(place)}: {counted(result.images, 'image')} imported from {source}")


class Exporters(RegistryGroup):
    """What an index or a model can be exported as."""

    registry = EXPORTERS


@click.group(cls=Exporters)
def export() -> None:
    """Export vectors and encoders for other programs."""


def _exporter(name: str, target: str, help: str) -> click.Command:
    """A command that writes what ``runs.embeddings`` makes of the vectors of an index."""

    def run(place: str, output: Path, kind: Any) -> None:
        from diptych.index.engines.opening import open_index
        from diptych.runs import embeddings

        with open_index(place) as opened:
            echo(f"{output}: {getattr(embeddings, f'export_{name}')(opened, output, kind)} vectors")

    kinds = option("--kind", "items to write", "image", type=click.Choice(["image", "text"]))
    places = (
        click.argument("place", metavar="INDEX"),
        click.argument("output", metavar=target, type=OUTPUT if target == "FOLDER" else OUTPUT_FILE),
    )
    return click.command(name, help=help)(together(*places, kinds)(run))


export_vectors = _exporter(
    "vectors",
    "FOLDER",
    "Export vectors as .npy and items as Parquet. The layout is that of clip-retrieval.",
)
export_faiss = _exporter(
    "faiss",
    "FILE",
    "Export vectors as a faiss index of inner products. The ids of its rows are in FILE.json.",
)


@click.command("runtime")
@click.argument("model")
@click.argument("output_dir", metavar="[FOLDER]", required=False, type=OUTPUT)
def export_runtime(model: str, output_dir: Path | None) -> None:
    """Write both encoders as ONNX, for searching without torch.

    They go into the folder runtime/ of the model, or of a new model folder FOLDER. Each file is compared with torch
    before it is kept. A model without a folder of its own, or whose folder is read-only, has them in the user's cache.
    """
    from diptych.model.runtime_export import place_runtime

    for line in place_runtime(model, output_dir)[1]:
        echo(line)


@click.command("onnx")
@click.argument("model")
@click.argument("output_dir", metavar="FOLDER", type=OUTPUT)
def export_onnx(model: str, output_dir: Path) -> None:
    """Copy the ONNX encoders of a model's runtime for other programs. They are written first if there are none."""
    from diptych.index.models import whole_runtime
    from diptych.runtime.folder import copy_runtime

    for file in copy_runtime(whole_runtime(model), output_dir):
        echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
