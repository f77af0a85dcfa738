"""Writing to disk so that a crash or a full disk never loses what was there before."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from safetensors import SafetensorError

from diptych.errors import StorageError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP}
FAILING = {errno.EIO, errno.ENXIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOLCK}
REASONS = (
    (FULL, "the disk is full while saving {0}: free some space and run again; what was saved is intact."),
    (REFUSED, "{0} cannot be written ({1}): {2} a folder you may write."),
    (IN_THE_WAY, "{0} cannot be written, a file or folder of that name is in the way: choose another name."),
    (FAILING, "{0} cannot be written ({1}): check the disk and run again; what was saved is intact."),
)
# what taking a value of JSON for what it should be can raise; the last is that of int(inf)
MISREAD = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
RUNTIMES = "runtimes"  # in the cache folder: ONNX encoders of models whose own folder cannot hold them
_RUST_ERROR = re.compile(r"os error (\d+)")  # how safetensors quotes the number of an OSError


def expanded(path: str | Path) -> Path:
    """A path whose ``~`` stands for a home folder; one of nobody's stays as it is, and is not found."""
    return Path(os.path.expanduser(path))


def cache_folder(folder: str | Path | None = None) -> Path:
    """Where what can be computed again is kept: ``folder``, else ``DIPTYCH_CACHE``, else below the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(folder or os.environ.get("DIPTYCH_CACHE") or f"{home}/diptych")


def data_folder() -> Path:
    """Where an index is kept that cannot lie beside its pictures: below ``XDG_DATA_HOME``, or ``~/.local/share``."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return expanded(home) / "diptych"


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Fill a new folder, sync it, then put it in the place of ``target``; on any failure ``target`` stays as it was.

    A crash between the two renames leaves ``target`` under the name ``.old-target``, which ``recover_folder`` puts
    back. Of several processes that do it at once, the last one wins.
    """
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
        try:
            with _new_entry(target, Path.mkdir, _remove_folder) as new:
                yield new
                _sync_all(new)
                with _lock(target.parent):
                    old = target.with_name(f".old-{target.name}")
                    if target.exists():
                        _remove_folder(old)
                        target.rename(old)
                    new.rename(target)
                    sync(target.parent)
                    _remove_folder(old)
        finally:
            recover_folder(target)  # where the second renaming failed


@contextmanager
def create_folder(target: Path) -> Iterator[Path]:
    """Fill a new folder, then give it the name ``target``, which at most an empty folder may have.

    It appears whole or not at all; of several processes one creates it, the others get a ``FileExistsError``.
    """
    with storing(target):  # a file above is in the way; nobody made the folder
        target = target.resolve()  # a link to an empty folder stays one
        target.parent.mkdir(parents=True, exist_ok=True)
    with storing(target, but=FileExistsError), _new_entry(target, Path.mkdir, _remove_folder) as new:
        yield new
        _sync_all(new)
        try:
            new.rename(target)  # the system refuses it over anything but an empty folder
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
            raise
        sync(target.parent)


def recover_folder(target: Path) -> None:
    """Put back what a crash in the middle of ``replace_folder`` left under ``.old-``; call before reading."""
    old = target.with_name(f".old-{target.name}") if target.name else target
    if old.exists() and not target.exists():
        with _lock(target.parent):  # not the one that is being replaced this moment
            if old.exists() and not target.exists():
                old.rename(target)


@contextmanager
def _new_entry(
    target: Path, make: Callable[[Path], object], remove: Callable[[Path], object]
) -> Iterator[Path]:
    """Something new under a name of its own beside ``target``, removed at the end if it still has that name."""
    new = _beside(target)
    with ExitStack() as stack:
        with _lock(target.parent):  # or it is taken for remains before it is locked
            _remove_leftovers(target.parent, f"{glob.escape(new.name[:-12])}*", remove)
            make(new)
            stack.enter_context(_lock(new))  # one that nobody has locked is what a crash left, and goes
        try:
            yield new
        finally:
            remove(new)


def sweep_files(folder: Path) -> None:
    """Remove what killed processes left in a folder whose files are all written with ``new_file``."""
    with _lock(folder):
        _remove_leftovers(folder, ".new-*", partial(Path.unlink, missing_ok=True))


def _remove_leftovers(folder: Path, pattern: str, remove: Callable[[Path], object]) -> None:
    """Remove what nobody has locked, through no link and waiting for no pipe; the folder must be locked."""
    for path in folder.glob(pattern):
        with suppress(OSError), _lock(path, wait=False) as free:
            if free:
                remove(path)


def _remove_folder(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():  # rmtree would wait for a pipe
        shutil.rmtree(folder, ignore_errors=True)


def _beside(target: Path) -> Path:
    return target.with_name(f".new-{target.name[:200]}-{uuid4().hex[:12]}")


@contextmanager
def _lock(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Keep other processes from a folder; whether that was possible."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    handle = os.open(folder, os.O_RDONLY | os.O_NONBLOCK | (0 if wait else os.O_NOFOLLOW))
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except OSError:  # locked by another, or on a file system without locks
            locked = False
        yield locked
    finally:
        os.close(handle)


def _sync_all(folder: Path) -> None:
    """Make a folder durable, its files as readable as the umask wants them: some libraries make them private."""
    mode = folder.stat().st_mode & 0o666
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)
        sync(path)


def parse_json(data: str | bytes) -> Any:
    """The value of a JSON text; whatever is wrong with it is a ``json.JSONDecodeError``.

    Python's own reader gives other errors for brackets nested too deep and for integers of thousands of digits.
    """
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error).split(";")[0], "", 0) from error


def write_text(target: Path, text: str) -> None:
    """``write_bytes`` of a text in UTF-8."""
    write_bytes(target, text.encode("utf-8"))


def write_bytes(target: Path, content: bytes) -> None:
    """Write a small file in one piece: synced, then renamed over the old one."""
    with storing(target), _temporary_file(target, content, 0o666) as new:
        os.replace(new, target)


@contextmanager
def _temporary_file(target: Path, content: bytes, mode: int) -> Iterator[Path]:
    """A synced file of a name of its own, to be given the name ``target``, which is synced after that."""
    new = _beside(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as handle:
            handle.write(content)
        sync(new)
        yield new
        sync(target.parent)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """A file to fill: it gets the name ``target`` when it is whole and synced, and is removed on any failure.

    What a killed process left under another name goes when the same target is next written; one that another process
    is still writing, which has it locked, stays. Of several that finish, the last one wins.
    """
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _new_entry(target, Path.touch, partial(Path.unlink, missing_ok=True)) as new:
            with new.open("wb") as handle:
                yield handle
            sync(new)
            os.replace(new, target)
            sync(target.parent)


def create_file(target: Path, content: bytes, mode: int = 0o666) -> bool:
    """Write a small file in one piece unless it is there; whether it was this process that wrote it."""
    try:
        with storing(target, but=FileExistsError), _temporary_file(target, content, mode) as new:
            os.link(new, target)  # unlike a renaming, the system refuses it over another
    except FileExistsError:
        return False
    return True


@contextmanager
def storing(target: Path, but: type[OSError] | None = None) -> Iterator[None]:
    """Turn a full disk, one that may not be written, and a file where a folder should be into one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if but is not None and isinstance(error, but):
            raise
        # numpy gives no number with what the system refuses it
        rust = _RUST_ERROR.search(str(error))
        number = (error.errno or errno.EIO) if isinstance(error, OSError) else int(rust[1]) if rust else None
        if number is None or (sentence := _sentence(target, number)) is None:
            raise
        raise StorageError(sentence) from error


def _sentence(target: Path, number: int) -> str | None:
    """What is said of a failed write; {} stands for the file, what the system says, and how to choose another."""
    remedy = "set DIPTYCH_CACHE or XDG_CACHE_HOME to" if target.is_relative_to(cache_folder()) else "choose"
    found = next((said for numbers, said in REASONS if number in numbers), None)
    return found and found.format(target, os.strerror(number), remedy)


def sync(path: Path) -> None:
    """Make a file durable, or the new and removed names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
