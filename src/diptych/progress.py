"""What a command tells while it works: progress bars, on a terminal for whoever asked, and counts in words."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from html import escape
from typing import Any, TypeVar

T = TypeVar("T")
_CONTROL = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
PATIENCE = 2.0  # seconds without an answer before a bar appears


def track(
    items: Iterable[T], label: str, total: int | None = None, show: bool = True, unit: str = ""
) -> Iterator[T]:
    """Iterate with a bar on standard error once ``PATIENCE`` seconds have passed.

    On a terminal and in a notebook the bar moves in place; elsewhere (a log file) one line is written every tenth. With
    ``unit``, the name of one item, both say how many are done per second; the time left is always shown.
    """
    if not show:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    if "ipykernel" in sys.modules:
        yield from _notebook_bar(items, label, total, unit)
    elif sys.stderr.isatty():
        yield from _bar(items, label, total, unit)
    else:
        yield from _lines(items, label, total, unit)


def _bar(items: Iterable[T], label: str, total: int | None, unit: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = [TextColumn("{task.fields[rate]}")] if unit else []
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), *rate, TimeRemainingColumn())
    start = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total, visible=False, rate="")
        for done, item in enumerate(items, 1):
            yield item
            seconds = time.monotonic() - start
            progress.update(task, advance=1, visible=seconds > PATIENCE, rate=_rate(done, seconds, unit))


def _notebook_bar(items: Iterable[T], label: str, total: int | None, unit: str) -> Iterator[T]:
    """A bar below the cell that moves at most five times a second, and goes when the work is done or interrupted."""
    from IPython.display import HTML, display

    start = last = time.monotonic()
    bar: Any = None
    try:
        for done, item in enumerate(items, 1):
            yield item
            now = time.monotonic()
            if now - start > PATIENCE and (bar is None or now - last > 0.2):
                length = f" max={total}" if total else ""
                words = " ".join(
                    (
                        f"{done}/{total}" if total else str(done),
                        _rate(done, now - start, unit) if unit else "",
                    )
                )
                content = HTML(
                    f"<div>{escape(label)} <progress value={done}{length}></progress> {escape(words)}</div>"
                )
                bar, last = (display(content, display_id=True) if bar is None else bar), now
                bar.update(content)
    finally:
        if bar is not None:
            bar.update(HTML(""))


def _lines(items: Iterable[T], label: str, total: int | None, unit: str) -> Iterator[T]:
    start, tenth = time.monotonic(), 0
    for done, item in enumerate(items, 1):
        yield item
        seconds = time.monotonic() - start
        if total and done * 10 // total > tenth and seconds > PATIENCE:
            tenth = done * 10 // total
            rate = f", {_rate(done, seconds, unit)}" if unit else ""
            left = f", {(total - done) * seconds / done:.0f} s left" if done < total else ""
            print(f"{label}: {done}/{total}{rate}{left}", file=sys.stderr, flush=True)


def _rate(done: int, seconds: float, unit: str) -> str:
    rate = done / max(seconds, 1e-3)
    return f"{rate:{',.0f' if rate >= 100 else '.3g'}} {unit}s/s"


def printable(text: str, keep: str = "") -> str:
    """A text with its control characters written out, except those to ``keep``: a file may be called anything.

    These are the ones that move a cursor, break a line or turn the direction of writing, and halves of characters.
    """
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else f"\\u{ord(found[0]):04x}", text)


def echo(text: object = "", err: bool = False, nl: bool = True) -> None:
    """Print a text whose control characters are made visible; lines and tabs stay."""
    clean = printable(str(text), keep="\n\t")
    print(clean, end="\n" if nl else "", file=sys.stderr if err else sys.stdout, flush=True)


class _Printable(logging.Filter):
    """Makes the control characters of a message visible."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), None
        return True


class PrintableLines(logging.Formatter):
    """Lines of a log, tracebacks included, with the control characters in them made visible."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


LOG = logging.getLogger("diptych")
LOG.addFilter(_Printable())


def counted(number: int, noun: str) -> str:
    """A number of things: ``1 image``, ``2 images``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
