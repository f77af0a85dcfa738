"""Requests of one sort wait for each other, never those of another: each sort has threads of its own.

Without it every request takes one of the same forty threads, and forty that wait for a decoder leave none to search, or
to say that the service is well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter

from diptych.errors import Unavailable


class Turns:
    """Runs functions in at most ``threads`` threads; beyond ``waiting`` that wait for one, requests are refused."""

    def __init__(self, threads: int, waiting: int) -> None:
        self._threads, self._most, self._asked = threads, threads + waiting, 0
        self._limiter: CapacityLimiter | None = None

    def __call__(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function for a route, taking its turn."""

        async def take_turn(**arguments: Any) -> Any:
            if self._asked >= self._most:
                raise Unavailable("too many requests of this kind are waiting: try again in a moment.")
            if self._limiter is None:  # made inside the event loop that it belongs to
                self._limiter = CapacityLimiter(self._threads)
            self._asked += 1
            try:
                return await anyio.to_thread.run_sync(lambda: work(**arguments), limiter=self._limiter)
            finally:
                self._asked -= 1

        # what the framework reads of a route
        take_turn.__name__, take_turn.__doc__ = work.__name__, work.__doc__
        take_turn.__signature__ = inspect.signature(work, eval_str=True)  # type: ignore[attr-defined]
        return take_turn
