"""Record the golden runs and fixtures anew: ``PYTHONPATH=tests python -m golden.record`` in the repository's root.

Only for a change that is meant to change results. Everything is made in a temporary folder, with relative paths.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from golden import answers, fixtures
from golden.kept import machine, pack, unpack, write_expected
from golden.reach import RECIPES
from golden.runs import outcome, train
from golden.toys import make_toys
from servers import postgres


def make() -> dict[str, Any]:
    """Make everything in the present folder; the outcomes of the runs."""
    make_toys(Path("made/toys"))
    pack("toys", Path("made/toys"))
    unpack("toys", Path())
    runs = {}
    for name in RECIPES:
        train(name, Path("runs") / name)
        runs[name] = outcome(Path("runs") / name)
    for one in (fixtures.make_models, fixtures.make_run, fixtures.make_indexes, fixtures.make_vectors):
        one()
    fixtures.make_caches()
    fixtures.make_scores()
    return runs


def inside(folder: str, name: str) -> None:
    """Go into an empty folder with a cache of its own."""
    place = Path(folder) / name
    place.mkdir()
    os.chdir(place)
    os.environ["DIPTYCH_CACHE"] = "caches"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, postgres() as server:
        inside(folder, "making")
        runs = make()
        fixtures.make_dump(server)
        found = {}
        for name, (archive, ask) in answers.FIXTURES.items():
            inside(folder, name)
            for one in sorted({"toys", "models", archive}):
                unpack(one, Path())
            found[name] = ask()
        found["postgres"] = answers.of_dump(server)
        write_expected({"machine": machine(), "runs": runs, "fixtures": found})
        os.chdir("/")
