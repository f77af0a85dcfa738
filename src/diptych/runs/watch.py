"""Keep an index in line with a folder while it changes: look at the files, index what changed, wait, look again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from diptych.data.files import find_files
from diptych.errors import DiptychError
from diptych.index.ingest.works import IndexingResult

Seen = dict[str, tuple[int, int]]
"""Each file below a folder: its size and time."""


def watch_folder(
    folder: Path,
    bring: Callable[[], IndexingResult],
    *,
    interval: float,
    say: Callable[[str], None],
    summary: Callable[[IndexingResult], str],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Index a folder, then again whenever its files have changed and rested for one interval; returns never.

    A change is indexed once two looks agree, so that a file still being copied is left alone. A folder that is not
    there, or that cannot be indexed, is said once and leaves the index as it is.
    """
    indexed: Seen | None = None  # as the index knows it
    before: Seen | None = None  # at the last look
    trouble = ""
    while True:
        now = look(folder)
        if now is None:
            trouble = _once(
                f"{folder} is not there: the index stays as it is until it is back.", trouble, say
            )
            before = None
        elif now != indexed and (now == before or indexed is None):
            try:
                built = bring()
            except DiptychError as error:
                trouble = _once(f"{error} The index stays as it is.", trouble, say)
            else:
                changed = built.added or built.updated or built.removed or built.moved
                if trouble or indexed is None or changed:
                    say(summary(built))
                indexed, trouble = now, ""
            before = now
        else:
            if trouble and now == indexed:
                say(f"{folder} is back, and nothing changed.")
                trouble = ""
            before = now
        sleep(interval)


def look(folder: Path) -> Seen | None:
    """Every file below a folder that indexing looks at, with its size and time; None where there is no folder."""
    seen: Seen = {}
    if not folder.is_dir():
        return None
    for name in find_files(folder):
        path = os.path.join(folder, name)
        try:
            stat = os.stat(path)
        except OSError:  # gone between the listing and the look
            continue
        seen[path] = (stat.st_size, stat.st_mtime_ns)
    return seen if folder.is_dir() else None


def _once(sentence: str, said: str, say: Callable[[str], None]) -> str:
    """Say a sentence unless it was the last one said."""
    if sentence != said:
        say(sentence)
    return sentence
