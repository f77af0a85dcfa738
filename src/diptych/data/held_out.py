"""The splits of a data set as training and evaluation take them; without a split val, the same images are held out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diptych.data.captions import Captions, canonical_split
from diptych.data.formats import open_captions, separate_splits
from diptych.data.problems import Problems
from diptych.errors import DataError

HELD_OUT = 0.1  # share of the training images held out when the data has no validation split


def open_split(path: str, name: str, problems: Problems | None = None) -> Captions:
    """One split of a data set, by any of its names (``dev`` is ``val``).

    Where the format allows it, only the files of that split are read. ``val`` is what training held out where the
    data has no such split. ``problems`` is told what is wrong with the data.
    """
    name, alone = canonical_split(name), separate_splits(path)
    if name in alone or (alone and name != "val"):  # a split that is not there gets the reader's own sentence
        return open_captions(path, split=name, problems=problems)
    return split_of(open_captions(path, problems=problems), name)


def split_of(captions: Captions, name: str) -> Captions:
    """A split by name; ``val`` is what training held out where the data has no such split."""
    name = canonical_split(name)
    if name == "val" and "val" not in captions.splits:
        return training_splits(captions)[1]
    return captions.split(name)


def training_splits(captions: Captions) -> tuple[Captions, Captions]:
    """The train and val splits; without a val split, a fixed tenth of the training images is held out."""
    names = set(captions.splits)
    if "train" not in names:
        raise DataError(
            f"{captions.name} has no split 'train': its splits are {', '.join(sorted(names)) or 'none'}."
        )
    training = captions.split("train")
    if not len(training.texts):
        why = "".join(f" {note}" for note in captions.notes)
        raise DataError(f"{captions.name} has no texts: training needs captions beside the images.{why}")
    if "val" in names:
        return training, captions.split("val")
    order = np.random.default_rng(0).permutation(len(training.images))
    held = max(1, int(len(order) * HELD_OUT))
    if held >= len(order):
        raise DataError(f"{captions.name} has {len(order)} training images: too few to hold out some.")
    rest, out = sorted(order[held:].tolist()), sorted(order[:held].tolist())
    validation = training.subset(out)
    return training.subset(rest), replace(validation, splits=["val"] * len(out))
