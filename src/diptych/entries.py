"""The files of folders that may come from a stranger: fixed names, plain files, no links."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diptych.errors import CheckpointError, DataError, DiptychError

NOT_PLAIN = {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}  # a link (also on BSD), a pipe, a folder
WHOLE = 1 << 30  # bytes of the largest file that is read in one piece; a file of holes may claim any size
NAME_WIDTH = 80  # characters of a refused name in a message


@dataclass(frozen=True)
class Entries:
    """The files of one kind of folder, which may come from a stranger: fixed names, plain files, no links.

    A name that was read from a file becomes a path by ``path`` and by nothing else. The folder itself may be reached
    through a link. ``fault`` is the error of this kind of folder, ``remedy`` the end of its sentence. With
    ``snapshots``, the links of a Hugging Face cache may be followed to its own blobs.
    """

    names: re.Pattern[str]
    fault: type[DiptychError]
    remedy: str
    snapshots: bool = False

    def path(self, folder: Path, name: object, *, folders: bool = False) -> Path:
        """The path of the file, or one of the ``folders``, that something calls ``name``; it need not be there."""
        if not isinstance(name, str) or not self.names.fullmatch(name):
            text = text if len(text := ascii(name)) <= NAME_WIDTH else f"…{text[-NAME_WIDTH:]}"
            raise self.fault(f"{folder} refers to a file {text}, which is not one of its own: {self.remedy}")
        if folders and (folder / name).is_dir():
            self.check_below(folder / name, entry=True)
        else:
            self.check(folder / name)
        return folder / name

    def check(self, path: Path) -> Path:
        """The path of a plain file, or of none; raise when something else has this name."""
        try:
            mode = path.lstat().st_mode
            blob = _blob(path) if self.snapshots and stat.S_ISLNK(mode) else None
            if blob is not None:
                path, mode = blob, blob.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return path
        if not stat.S_ISREG(mode):
            raise self._not_plain(path)
        return path

    def check_alone(self, path: Path) -> Path:
        """The path of a plain file to be changed; one with a second name is refused: what that is would change, too."""
        path = self.check(path)
        with suppress(FileNotFoundError, NotADirectoryError):
            if path.lstat().st_nlink > 1:
                raise self.fault(f"{path} has a second name (a hard link), which would change: {self.remedy}")
        return path

    def check_below(self, folder: Path, *, entry: bool = False) -> None:
        """Raise when anything below a folder, itself an ``entry`` or not, is neither a plain file nor a folder."""
        if entry and folder.is_symlink():
            raise self._not_plain(folder)
        for place, folders, files in os.walk(folder):
            for name in (*folders, *files):
                path = Path(place, name)
                if path.is_symlink() or not path.is_dir():  # also one that another process has just removed
                    self.check(path)

    def open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a plain file, opened relative to its folder and through no link.

        Where the system cannot do that, what is there is checked just before it is opened.
        """
        path = self.check_alone(path) if flags & (os.O_WRONLY | os.O_RDWR) else self.check(path)
        flags |= getattr(os, "O_BINARY", 0)
        try:
            if os.open not in os.supports_dir_fd or not hasattr(os, "O_NOFOLLOW"):
                handle = os.open(path, flags, 0o666)
            else:
                folder = os.open(path.parent, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
                try:  # a pipe that came since the check is not waited for
                    handle = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder)
                finally:
                    os.close(folder)
        except OSError as error:
            if error.errno in NOT_PLAIN:
                raise self._not_plain(path) from error
            raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise self._not_plain(path)
        return handle

    def read(self, path: Path) -> bytes:
        """All bytes of a plain file."""
        with os.fdopen(self.open(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > WHOLE:
                raise self.fault(f"{path} has more than {WHOLE} bytes: {self.remedy}")
            return file.read()

    def write(self, path: Path, content: str | bytes) -> None:
        """Fill a plain file of a folder that nobody else reads yet; a text in UTF-8."""
        with os.fdopen(self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)

    def remove(self, path: Path) -> None:
        """Take a plain file away, where it is there."""
        self.check(path)
        path.unlink(missing_ok=True)

    def _not_plain(self, path: Path) -> DiptychError:
        return self.fault(f"{path} is a link, a pipe, a device or a folder, not a plain file: {self.remedy}")


MODEL = Entries(
    re.compile(r"(?!\.)[^/\\:\x00-\x1f\x7f]{1,200}"),  # a colon: another drive on Windows
    CheckpointError,
    "copy the model again, or do not trust it.",
    snapshots=True,
)
"""The files of models, runs and runtimes."""
CACHE = Entries(
    re.compile(r"\.?[A-Za-z0-9][A-Za-z0-9._-]{0,200}"),
    DataError,
    "remove it, and what it held is computed again.",
)
"""The files of the cache folder."""


def _blob(link: Path) -> Path | None:
    """Where a link of a snapshot ends, None unless that is in the folder of the same model.

    ``models--OWNER--NAME/snapshots/COMMIT/FILE`` leads to ``models--OWNER--NAME/blobs/HASH``.
    """
    for snapshots, model in itertools.pairwise(link.absolute().parents):
        if snapshots.name == "snapshots" and model.name.startswith("models--"):
            end = os.path.realpath(link)
            return Path(end) if Path(end).is_relative_to(os.path.realpath(model)) else None
    return None
