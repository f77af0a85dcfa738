"""Databases of SQLite that may come from a stranger: the files that SQLite opens, how long it may work on them."""

from __future__ import annotations

import os
from pathlib import Path

from diptych.entries import Entries

ENDS = ("", "-wal", "-shm", "-journal")  # of the names of what SQLite opens
# steps of SQLite's machine between two looks, each of which waits for the interpreter; those of one transaction at most
# (at some 50 million a second), and for each byte of the database. A change of a small database takes 4 a byte, all
# others less than 1; pages that lead to each other in circles would be read for ever
STEPS, STEPS_ALLOWED, STEPS_PER_BYTE = 1_000_000, 20_000_000, 10
# what a file system that compresses may have of a file, and one that has not yet counted what was just written
COMPRESSED, UNCOUNTED = 16, 1 << 26
ROW = 4  # bytes of a row at least, its place in the page included
_TWO_DATABASES = bytes.fromhex("d9d505f920a163d7")  # how a journal ends that names a further file


def check_files(names: Entries, path: Path, *, changed: bool) -> None:
    """Raise unless all that SQLite opens for a database are plain files, which no other name changes along with.

    The database itself may have a second name where it is not ``changed``. A journal of several databases names a
    file that SQLite removes, wherever it is, once it has undone the journal: there is none of ours.
    """
    for end in ENDS:
        check = names.check_alone if changed or end else names.check
        check(path.with_name(path.name + end))
    journal = path.with_name(f"{path.name}-journal")
    try:
        with os.fdopen(names.open(journal), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(_TWO_DATABASES)))
            if file.read() != _TWO_DATABASES:
                return
    except FileNotFoundError:
        return
    raise names.fault(f"{journal} names another file, which SQLite would remove: {names.remedy}")


def size_on_disk(path: Path) -> int:
    """Bytes of a database and its log, at most those that its blocks explain: a file of a terabyte may hold a page."""
    total = 0
    for file in (path, path.with_name(f"{path.name}-wal")):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        written = 512 * getattr(status, "st_blocks", status.st_size)
        total += min(status.st_size, max(COMPRESSED * written, UNCOUNTED))
    return total


def most_steps(path: Path) -> int:
    """Steps that a transaction of a sound database of this size may take."""
    return STEPS_ALLOWED + STEPS_PER_BYTE * size_on_disk(path)
