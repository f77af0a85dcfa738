"""Fill the cache of teacher vectors before training: what ``diptych teach`` does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions, holds_pictures
from diptych.data.formats import open_captions
from diptych.data.problems import LeftOut, ToBeLeftOut, undecodable, unopenable
from diptych.devices import pick_device
from diptych.runs.train import training_splits
from diptych.training.teachers import Teachers


@dataclass(frozen=True)
class Taught:
    """One matrix of teacher vectors."""

    split: str
    of: str
    vectors: ArrayStore
    seconds: float

    def __str__(self) -> str:
        count, width = self.vectors.shape
        size = self.vectors.path.stat().st_size / 2**20 if self.vectors.path is not None else 0.0
        what = f"{self.split}: {count:,} {self.of} × {width:,}"
        return f"{what}, {size:,.1f} MB, {self.seconds:.1f} s: {self.vectors.path}"


def teach(
    teachers: Teachers, data: str, *, cache_dir: Path | None = None, show_progress: bool = True
) -> list[Taught]:
    """Vectors of the training images and texts, and of the validation texts, by which neighbours are judged.

    What is there already is not computed again; after an interruption the same command goes on. Pictures that cannot be
    read are left out, as in training.
    """
    training, validation = readable_splits(data, show_progress=show_progress)
    device, found = pick_device(), []
    for split, of, captions in (
        ("train", "images", training),
        ("train", "texts", training),
        ("val", "texts", validation),
    ):
        start = time.perf_counter()
        make = teachers.image_vectors if of == "images" else teachers.text_vectors
        vectors = make(captions, device=device, cache_dir=cache_dir, show_progress=show_progress)
        found.append(Taught(split, of, vectors, time.perf_counter() - start))
    return found


def readable_splits(data: str, *, show_progress: bool = True) -> tuple[Captions, Captions]:
    """The training and validation captions that a run would use, without pictures that cannot be read; says which."""
    captions, left_out = open_captions(data, problems=ToBeLeftOut()), LeftOut()
    parts = []
    for part in training_splits(captions):
        part = left_out.add(part, unopenable(part.images))
        if part.unreadable == "stop" and holds_pictures(part.images):
            part = left_out.add(part, undecodable(part.images, show_progress=show_progress))
        parts.append(part)
    left_out.tell(len(captions.images), advice=False)
    return parts[0], parts[1]
