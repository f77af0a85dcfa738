"""What a request may cost: sizes checked before anything is read, decoded or encoded.

Requests of one sort wait for each other, never those of another: each sort has threads of its own.

Without it every request takes one of the same forty threads, and forty that wait for a decoder leave none to search, or
to say that the service is well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter

from diptych.errors import SettingsError, Unavailable
from diptych.settings import setting


@dataclass(frozen=True, slots=True)
class Limits:
    """The most a request may ask for; each is refused beyond it with one sentence."""

    body: int = setting(20_000_000, "bytes of a request, uploads included")
    pixels: int = setting(50_000_000, "pixels of an uploaded image")
    images: int = setting(4, "images of one query")
    k: int = setting(200, "answers to one query")
    query: int = setting(2_000, "characters of a text or query expression")
    filter: int = setting(2_000, "characters of a filter")
    items: int = setting(256, "items added or named by one request")
    text: int = setting(20_000, "characters of an added text")
    columns: int = setting(100, "metadata columns of an added item")
    metadata: int = setting(20_000, "characters of the metadata of an added item")
    seconds: int = setting(10, "seconds to answer a request")

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) < 1:
                raise SettingsError(
                    f"the limit {entry.name}={getattr(self, entry.name)} lets nothing pass: give at least 1."
                )


class Turns:
    """Runs functions in at most ``threads`` threads; beyond ``waiting`` that wait for one, requests are refused."""

    def __init__(self, threads: int, waiting: int) -> None:
        self._threads, self._most, self._asked = threads, threads + waiting, 0
        self._limiter: CapacityLimiter | None = None

    def __call__(self, work: Callable[..., Any]) -> Callable[..., Any]:
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
