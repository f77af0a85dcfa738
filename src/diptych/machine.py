"""What this person did on this machine: the folders they indexed, and a key that signs what was made here.

An index may come from a stranger, so it cannot say which folders may be served, nor that its approximate index is
harmless. Both are decided by what lies in the data folder of the user:

::

    key          32 random bytes, readable by the user alone; copy it to trust what was made on another machine
    roots/HASH   the path of a folder whose pictures were indexed here

Which folders they may write is asked here too.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from diptych import storage
from diptych.entries import Entries
from diptych.errors import DiptychError, StorageError
from diptych.storage import create_file, expanded

KEY, ROOTS = "key", "roots"
KEY_BYTES = 32
_FILES = Entries(
    re.compile(r"key|[0-9a-f]{32}"),
    StorageError,
    "move it away; diptych makes a new one.",
)


def is_writable(folder: str | Path) -> bool:
    """Whether a folder can be written, or made in the nearest one above that exists."""
    place = expanded(folder).absolute()
    nearest = next(part for part in (place, *place.parents) if os.path.exists(part))
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def data_folder() -> Path:
    """Where the above is kept: ``DIPTYCH_HOME``, else ``~/.local/share/diptych``.

    ``XDG_DATA_HOME`` takes the place of ``~/.local/share`` where it is set.
    """
    return expanded(os.environ.get("DIPTYCH_HOME") or storage.data_folder())


def own_key(make: bool = False) -> bytes | None:
    """The key of this user, made if there is none and ``make`` says so; None without one."""
    folder = data_folder()
    try:
        if make and not (folder / KEY).exists():
            create_file(folder / KEY, os.urandom(KEY_BYTES), mode=0o600)
        key = _FILES.read(folder / KEY)
    except (OSError, DiptychError):  # no home, or one that cannot be written: nothing is signed
        return None
    return key if len(key) == KEY_BYTES else None


def record_root(root: str | Path) -> None:
    """Remember that this person indexed the pictures below a folder; where that cannot be written, it is not."""
    name = os.fsencode(os.path.realpath(root))
    try:
        create_file(data_folder() / ROOTS / hashlib.sha256(name).hexdigest()[:32], name)
    except (OSError, DiptychError):
        return


def known_roots() -> list[Path]:
    """The folders that this person indexed on this machine."""
    folder = data_folder() / ROOTS
    try:
        files = sorted(folder.iterdir())
    except OSError:
        return []
    roots = []
    for file in files:
        try:
            name = _FILES.read(_FILES.path(folder, file.name))
        except (OSError, DiptychError):
            continue
        if hashlib.sha256(name).hexdigest()[:32] == file.name:
            roots.append(Path(os.fsdecode(name)))
    return roots


def is_allowed(file: Path, roots: Sequence[str | Path] | None = None) -> bool:
    """Whether a file may be shown: it lies below one of these folders, or for None below one indexed here.

    An index says which folder was indexed, but not that it may be shown: it may come from a stranger.
    """
    resolved = file.resolve()
    below = known_roots() if roots is None else roots
    return any(resolved.is_relative_to(Path(root).resolve()) for root in below)


def withheld(folders: Iterable[str], roots: Sequence[str | Path] | None = None) -> list[str]:
    """A sentence for each folder of an index that is here and whose pictures may not be shown."""
    here = {os.path.realpath(folder) for folder in folders if folder and "\x00" not in folder}
    return [
        f"the pictures below {folder} are not shown, only stored thumbnails: you did not index them on this machine. "
        f"To allow them, give --root {folder}, or index them again."
        for folder in sorted(here)
        if os.path.isdir(folder) and not is_allowed(Path(folder), roots)
    ]
