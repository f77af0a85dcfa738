"""A table of zeros and ones from a MATLAB file, read in a process of its own.

scipy's reader believes what a file says of itself, and a damaged one ends the process that reads it. The process here
has so many bytes and seconds; it hands the table back as an array, and its death is one sentence.
"""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych.errors import DataError, MissingExtra

KEY = "feat"
SECONDS = 600.0  # that a file may take on a machine with other work
BYTES = 16_000_000_000  # that the process may take
SAID, MISSING = 3, 4  # how the process ends with a sentence, or without scipy


def read_mat(path: Path) -> NDArray[np.bool_]:
    """The table ``feat`` of a MATLAB file as (N, columns) bool; dense or sparse, format 4 to 7.2."""
    if not path.is_file():
        raise DataError(f"{path} is missing: the folder needs the tags and the labels of every split.")
    start = f"import sys; sys.path[:] = {sys.path!r}; from diptych.data.readers.matlab import work; work(sys.argv[1])"
    try:
        done = subprocess.run([sys.executable, "-c", start, str(path)], capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise DataError(f"{path} takes more than {SECONDS:g} s to read: copy it again.") from None
    if done.returncode == MISSING:
        raise MissingExtra("scipy", "mat", "reading .mat files")
    if done.returncode == SAID:
        raise DataError(done.stdout.decode("utf-8", "replace"))
    if done.returncode != 0:
        raise DataError(f"{path} is damaged (reading it ended with status {done.returncode}): copy it again.")
    table: NDArray[np.bool_] = np.load(io.BytesIO(done.stdout), allow_pickle=False)
    return table


def work(path: str) -> None:
    """Write the table to standard output, or what is wrong with it; the main function of the process."""
    _limit_memory()
    try:
        table = _table(path)
    except ImportError:
        sys.exit(MISSING)
    except (DataError, MemoryError) as error:
        said = str(error) or f"{path} needs more memory than there is: copy it again."
        sys.stdout.buffer.write(said.encode("utf-8", "replace"))
        sys.stdout.flush()
        sys.exit(SAID)
    np.save(sys.stdout.buffer, table)


def _table(path: str) -> NDArray[np.bool_]:
    from scipy.io import loadmat

    try:
        content = loadmat(path)
    except NotImplementedError as error:
        raise DataError(f"{path} is a MATLAB 7.3 file: save it again with -v7.") from error
    except Exception as error:  # a damaged file raises nearly anything
        raise DataError(f"{path} is not a MATLAB file ({error}): copy it again.") from error
    if KEY not in content:
        known = ", ".join(name for name in content if not name.startswith("__")) or "none"
        raise DataError(f"{path} has no variable '{KEY}' (its variables: {known}): copy it again.")
    found = content[KEY]
    try:
        dense = np.asarray(found.todense() if hasattr(found, "todense") else found)
        sound = dense.ndim == 2 and bool(np.isin(np.unique(dense), (0, 1)).all())
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise DataError(f"{path}: '{KEY}' is damaged ({error}): copy it again.") from error
    if not sound:
        raise DataError(f"{path}: '{KEY}' has shape {dense.shape} or other values than 0 and 1.")
    return dense.astype(np.bool_)


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):  # a system without such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
