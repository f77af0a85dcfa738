"""Reading a model folder, or the best model of a run; loading is strict."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from torch import nn

from diptych.encoders.known_names import hub_hint
from diptych.entries import MODEL
from diptych.errors import CheckpointError, reason_of
from diptych.parts import rebuild
from diptych.runtime.folder import best_folder
from diptych.storage import MISREAD, expanded, parse_json
from diptych.weights import load_weights

M = TypeVar("M", bound=nn.Module)
FORMAT = 1  # version of the model folder; raised when an old folder can no longer be read


def load_folder(folder: Path, kind: type[M]) -> M:
    """The model of this kind that a folder describes, with its weights, on the CPU."""
    place, folder = folder, best_folder(folder)
    if not (folder / "config.json").is_file():
        if folder != expanded(place) and not folder.exists():
            raise CheckpointError(
                f"the run {place} has no model yet: resume its training with --resume_from_checkpoint {place}."
            )
        what = "is not a model folder (no config.json)" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}: give the folder of a trained run{hub_hint(folder)}.")
    try:
        config = parse_json(MODEL.read(folder / "config.json"))
        found, tree = int(config["format"]), config["retriever"]
    except (OSError, *MISREAD) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} is damaged ({error}): copy the model again."
        ) from error
    if found != FORMAT:
        raise CheckpointError(f"{folder} has format {found}, this version reads {FORMAT}: update diptych.")
    try:
        model = rebuild(tree, folder)
    except RecursionError:
        raise CheckpointError(f"{folder / 'config.json'} nests too deeply: copy the model again.") from None
    if not isinstance(model, kind):
        raise CheckpointError(f"{folder} does not describe a retriever: give the folder of a trained run.")
    try:
        load_weights(model, folder / "model.safetensors")
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json ({reason_of(error, 200)}): copy the model again."
        ) from error
    return model
