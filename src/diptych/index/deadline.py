"""How long an answer may take: a clock that long work looks at between pieces, and holds no lock meanwhile.

Outside ``within`` there is no limit: an index used from Python or the command line takes the time it needs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from diptych.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment on the monotonic clock until which an answer may take; earlier once ``stopped`` is set."""

    seconds: float
    until: float
    stopped: threading.Event

    def check(self) -> None:
        """Raise when it has passed."""
        if self.stopped.is_set():
            raise Unavailable("the service is shutting down: try again in a moment.")
        if time.monotonic() > self.until:
            raise self.late()

    def late(self) -> Unavailable:
        return Unavailable(
            f"the answer took more than {self.seconds:g} seconds: shorten the query or the filter, or try again "
            "later."
        )

    @property
    def passed(self) -> bool:
        """Whether it is time to give up."""
        return self.stopped.is_set() or time.monotonic() > self.until

    @property
    def left(self) -> float:
        """Seconds until then."""
        return max(0.0, self.until - time.monotonic())


_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def current() -> Deadline | None:
    """The deadline of what runs here, None without one."""
    return _current.get()


def check() -> None:
    """Raise when the deadline of what runs here has passed."""
    deadline = _current.get()
    if deadline is not None:
        deadline.check()


@contextmanager
def under(deadline: Deadline | None) -> Iterator[None]:
    """Run something under a deadline, as a thread does that works for another."""
    token = _current.set(deadline)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def within(seconds: float, stopped: threading.Event | None = None) -> Iterator[Deadline]:
    """Limit what runs inside to ``seconds``, or to what is left of a deadline that ends before."""
    before = _current.get()
    deadline = Deadline(seconds, time.monotonic() + seconds, stopped or threading.Event())
    if before is not None and before.until < deadline.until:
        deadline = before
    with under(deadline):
        yield deadline
