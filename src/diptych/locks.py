"""Locks between processes, and one sentence where the file system has none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from filelock import FileLock

from diptych.entries import Entries
from diptych.errors import StorageError

NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


def lock_at(names: Entries, path: Path, **options: Any) -> FileLock:
    """A lock on a plain file of a folder, not taken yet.

    Where the system has no locks, filelock would take a file that a crash left for a lock that is held.
    """
    try:
        _try(names, path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise StorageError(
            f"{path.parent} is on a file system without locks ({os.strerror(error.errno)}), so two writers could harm "
            "each other: choose a folder on another one."
        ) from error
    return FileLock(names.check_alone(path), **options)


def _try(names: Entries, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    handle = names.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)  # as harmless as asking gets
    finally:
        os.close(handle)
