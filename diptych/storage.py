"""Writing to disk so that a crash or a full disk never loses what was there before."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from diptych.errors import StorageError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
_RUST_ERROR = re.compile(r"os error (\d+)")  # how safetensors quotes the number of an OSError


def cache_folder(folder: str | Path | None = None) -> Path:
    """Where what can be computed again is kept: ``folder``, else ``DIPTYCH_CACHE``, else ``~/.cache/diptych``."""
    return Path(folder or os.environ.get("DIPTYCH_CACHE") or "~/.cache/diptych").expanduser()


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Fill a new folder, then put it in the place of ``target``; on any failure ``target`` stays as it was.

    The new folder is synced before it is renamed. A crash between the two renames leaves ``target`` under the name
    ``.old-target``, which ``recover_folder`` puts back.
    """
    new = target.with_name(f".new-{target.name}")
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            yield new
            for path in [*new.rglob("*"), new]:
                _sync(path)
            old = target.with_name(f".old-{target.name}")
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            new.rename(target)
            _sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            recover_folder(target)  # where the second renaming failed


def recover_folder(target: Path) -> None:
    """Put back what a crash in the middle of ``replace_folder`` left under ``.old-``; call before reading."""
    old = target.with_name(f".old-{target.name}")
    if old.exists() and not target.exists():
        old.rename(target)


def write_text(target: Path, text: str) -> None:
    """``write_bytes`` of a text in UTF-8."""
    write_bytes(target, text.encode("utf-8"))


def write_bytes(target: Path, content: bytes) -> None:
    """Write a small file in one piece: synced, then renamed over the old one."""
    new = target.with_name(f".new-{target.name}")
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_bytes(content)
            _sync(new)
            os.replace(new, target)
        finally:
            new.unlink(missing_ok=True)


@contextmanager
def storing(target: Path) -> Iterator[None]:
    """Turn a full disk, one that may not be written, and a file where a folder should be into one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _rust_number(error)
        if number is None:
            raise
        if number in FULL:
            raise StorageError(
                f"the disk is full while saving {target}: free some space and run again; what was saved is intact."
            ) from error
        if number in REFUSED:
            raise StorageError(
                f"{target} cannot be written ({os.strerror(number)}): choose a folder you may write."
            ) from error
        if number in IN_THE_WAY:
            raise StorageError(
                f"{target} cannot be written, a file or folder of that name is in the way: choose another name."
            ) from error
        raise


def _rust_number(error: SafetensorError) -> int | None:
    found = _RUST_ERROR.search(str(error))
    return int(found[1]) if found else None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
