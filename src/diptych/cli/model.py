"""model info, model verify, label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from diptych.cli.flags import OUTPUT_FILE, PATH, backend_flags, model_of, option, switch
from diptych.progress import echo


@click.group()
def model() -> None:
    """Show or verify a model folder."""


@model.command()
@click.argument("folder", type=PATH)
def info(folder: Path) -> None:
    """Show the fingerprint, the files and the probes of a model."""
    from diptych.index.models import open_model, probes_of
    from diptych.runtime.folder import best_folder

    home = best_folder(folder)
    opened = open_model(folder)
    echo(f"{'fingerprint':12} {opened.fingerprint()}")
    echo(f"{'backend':12} {opened.backend}")
    for file in sorted(path for path in home.rglob("*") if path.is_file()):
        echo(f"{file.stat().st_size / 1e6:9.1f} MB {file.relative_to(home)}")
    if (probes := probes_of(opened, folder)) is not None:
        echo(
            f"{'probes':12} {len(probes.texts)} texts, {len(probes.images)} images of model {probes.fingerprint}"
        )


@model.command()
@click.argument("folder", type=PATH)
@backend_flags
def verify(folder: Path, **how: Any) -> None:
    """Encode the probes again, and compare. Status 2 if they differ."""
    from diptych.errors import SettingsError
    from diptych.index.models import check_probes, probes_of

    opened = model_of(folder, how)
    probes = probes_of(opened, folder)
    if probes is None:
        raise SettingsError(
            f"{folder} has no probes to compare: write them with diptych export runtime {folder}."
        )
    if probes.fingerprint != opened.fingerprint():
        raise SettingsError(
            f"the probes of {folder} are of model {probes.fingerprint}, its weights of {opened.fingerprint()}: copy "
            "the model folder again."
        )
    opened.encode_text(probes.texts)  # a runtime is compared when it is first used
    opened.encode_image(probes.images)
    check_probes(opened, folder)
    echo(
        f"sound: {len(probes.texts)} texts and {len(probes.images)} images, by {opened.backend} on {opened.device}"
    )


@click.command()
@click.argument("model", type=PATH)
@click.argument("path", metavar="FOLDER")
@option("--output", "table to write: kind, id, text, labels, scores", "labels.csv", type=OUTPUT_FILE)
@switch("texts", "label the texts too, where there are any")
@option(
    "--threshold",
    "score from which a label is told (default: the model's own, chosen on validation data)",
    type=click.FloatRange(0, 1),
)
@option("--top", "the best N labels of each item, whatever their scores", type=click.IntRange(1))
@backend_flags
def label(model: Path, path: str, **options: Any) -> None:
    """Predict labels with a label-wise model. FOLDER is a folder of images or a data set in any known format."""
    from diptych.runs.label import label_collection

    echo(label_collection(model_of(model, options), path, **options))
