"""What a command tells while it works: progress bars, on a terminal for whoever asked, and counts in words."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds without an answer before a bar appears


def track(items: Iterable[T], label: str, total: int | None = None, show: bool = True) -> Iterator[T]:
    """Iterate with a bar on standard error once ``PATIENCE`` seconds have passed.

    On a terminal the bar moves in place; elsewhere (a log file) one line is written every tenth of the way.
    """
    if not show:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty():
        yield from _bar(items, label, total)
    else:
        yield from _lines(items, label, total)


def _bar(items: Iterable[T], label: str, total: int | None) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    start = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total, visible=False)
        for item in items:
            yield item
            progress.update(task, advance=1, visible=time.monotonic() - start > PATIENCE)


def _lines(items: Iterable[T], label: str, total: int | None) -> Iterator[T]:
    start, tenth = time.monotonic(), 0
    for done, item in enumerate(items, 1):
        yield item
        if total and done * 10 // total > tenth and time.monotonic() - start > PATIENCE:
            tenth = done * 10 // total
            print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """A number of things: ``1 image``, ``2 images``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
