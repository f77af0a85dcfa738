"""Writing to disk so that a crash or a full disk never loses what was there before."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from diptych.errors import StorageError


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Fill a new folder, then put it in the place of ``target``; on any failure ``target`` stays as it was.

    The new folder is synced before it is renamed. A crash between the two renames leaves ``target`` under the name
    ``.old-target``, which ``recover_folder`` puts back.
    """
    new = target.with_name(f".new-{target.name}")
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            yield new
            for path in sorted(new.rglob("*")):
                if path.is_file():
                    _sync(path)
            _sync(new)
            old = target.with_name(f".old-{target.name}")
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            new.rename(target)
            _sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def recover_folder(target: Path) -> None:
    """Put back what a crash in the middle of ``replace_folder`` left under ``.old-``; call before reading."""
    old = target.with_name(f".old-{target.name}")
    if old.exists() and not target.exists():
        old.rename(target)


def write_text(target: Path, text: str) -> None:
    """Write a small file in one piece: synced, then renamed over the old one."""
    new = target.with_name(f".new-{target.name}")
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, "utf-8")
        _sync(new)
        os.replace(new, target)


@contextmanager
def storing(target: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"the disk is full while saving {target}: free some space and run again; what was saved is intact."
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StorageError(
                f"{target} cannot be written ({error.strerror}): choose a folder you may write."
            ) from error
        raise
    except SafetensorError as error:
        if "No space left" in str(error) or "os error 28" in str(error):
            raise StorageError(
                f"the disk is full while saving {target}: free some space and run again; what was saved is intact."
            ) from error
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
