"""How long indexing a large folder will take, from a few of its pictures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from diptych.data.files import find_images
from diptych.errors import DiptychError
from diptych.index.engines.opening import index_exists, open_index
from diptych.model.protocol import Model

MANY = 2000  # pictures above which the time is estimated
SAMPLE, TOGETHER = 16, 4  # pictures that are encoded for it, and at a time
PATIENCE = 3.0  # seconds after which the sample is large enough


def forecast(
    model: Model, folder: Path, place: str | Path, clock: Callable[[], float] = time.perf_counter
) -> str:
    """A sentence on the pictures of a folder that an index lacks and the time they will take; empty for few."""
    names = find_images(folder) if folder.is_dir() else []
    missing = len(names) - (_known(folder, place) if len(names) > MANY else 0)
    if missing <= MANY:
        return ""
    chosen = [folder / name for name in names[:: max(1, len(names) // (SAMPLE + 1))]]
    _encoded(model, chosen[:1])  # the first picture also pays for what is set up once
    done, began = 0, clock()
    for start in range(1, len(chosen), TOGETHER):
        done += _encoded(model, chosen[start : start + TOGETHER])
        if clock() - began > PATIENCE:
            break
    took = f", about {_duration((clock() - began) * missing / done)} on this machine" if done else ""
    return f"{folder}: {missing:,} pictures to index{took}."


def _known(folder: Path, place: str | Path) -> int:
    """Pictures of a folder that an index holds already."""
    if not index_exists(place):
        return 0
    root = str(folder.resolve())
    with open_index(place) as index:
        found = [one.number for one in index.info.collections if one.root == root]
        return sum(1 for number in found for _ in index.contents(number, "image"))


def _encoded(model: Model, files: list[Path]) -> int:
    """How many of some files were read and encoded: one that cannot be read spoils only the estimate."""
    try:
        return len(model.encode_image(files))
    except DiptychError:
        return 0


def _duration(seconds: float) -> str:
    """A rough time in words."""
    for size, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds"
