"""Record the golden runs and fixtures anew: ``PYTHONPATH=tests python -m golden.record``, in the root of the repository.

Only for a change that is meant to change results. Everything is made in a temporary folder, with relative paths.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from golden.kept import machine, pack, unpack, write_expected
from golden.reach import RECIPES
from golden.runs import outcome, train
from golden.toys import make_toys


def record() -> None:
    """Make everything in the present folder."""
    make_toys(Path("made/toys"))
    pack("toys", Path("made/toys"))
    unpack("toys", Path())
    runs = {}
    for name in RECIPES:
        train(name, Path("runs") / name)
        runs[name] = outcome(Path("runs") / name)
    write_expected({"machine": machine(), "runs": runs})


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["DIPTYCH_CACHE"] = f"{folder}/cache"
        record()
        os.chdir("/")
