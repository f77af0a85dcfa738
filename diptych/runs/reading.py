"""Which data a run is evaluated on: as asked for, or as the run itself says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diptych.data.captions import Captions
from diptych.data.formats import open_captions, separate_splits
from diptych.data.splits import canonical_split
from diptych.encoders.dual import is_dual_encoder
from diptych.errors import CheckpointError, SettingsError
from diptych.runs.train import training_splits
from diptych.training.checkpoint import read_run


def places_of(runs: Sequence[Path], data: Sequence[str]) -> Sequence[str]:
    """Where the data lie: as given, or what the first run was trained on."""
    if data:
        return data
    if is_dual_encoder(runs[0]):
        raise SettingsError(f"{runs[0]} was not trained here: give --data, the data set to evaluate it on.")
    if not runs[0].exists():
        raise CheckpointError(f"{runs[0]} does not exist: give the folder of a trained run.")
    if not (runs[0] / "run.json").exists():
        raise SettingsError(f"{runs[0]} does not say what it was trained on: give --data.")
    return [str(read_run(runs[0])["data"])]


def open_split(path: str, name: str) -> Captions:
    """One split of a data set, by any of its names (``dev`` is ``val``).

    Where the format allows it, only the files of that split are read. ``val`` is what training held out where the
    data has no such split.
    """
    name, alone = canonical_split(name), separate_splits(path)
    if name in alone or (alone and name != "val"):  # a split that is not there gets the reader's own sentence
        return open_captions(path, split=name)
    return split_of(open_captions(path), name)


def split_of(captions: Captions, name: str) -> Captions:
    """A split by name; ``val`` is what training held out where the data has no such split."""
    name = canonical_split(name)
    if name == "val" and "val" not in captions.splits:
        return training_splits(captions)[1]
    return captions.split(name)
