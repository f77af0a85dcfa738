"""Connections that say nothing, or do not listen, are closed; those that ask are answered, however many there are.

uvicorn counts every open connection and refuses requests beyond a number: a few hundred clients that connect and stay
silent shut everybody out. Here only requests are refused beyond a number; a silent connection is closed after a while,
and at once when there are too many, the oldest first.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 512  # open at once, silent ones included
SILENCE = 15.0  # seconds in which the head of a request must have come
DEAFNESS = 30.0  # seconds in which a client must take something of its answer


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that waits for nobody for ever."""

    def connection_made(self, transport: Any) -> None:
        """Make room for a new connection."""
        super().connection_made(transport)
        self._waiting: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        self._wait(SILENCE)
        if len(self.connections) > CONNECTIONS:
            others = [one for one in self.connections if isinstance(one, PatientProtocol) and one is not self]
            asking = [one for one in others if one.is_silent] or [
                one for one in others if one.cycle.more_body
            ]
            min(asking, key=lambda one: one._since, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the clock."""
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Let the clock run on until a whole head has come, a byte at a time or not."""
        super().data_received(data)
        if not self.is_silent:
            self._wait(None)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._since = self.loop.time()
        if not self.transport.is_closing() and self.is_silent and self._waiting is None:
            self._wait(SILENCE)

    def pause_writing(self) -> None:
        """The client takes nothing: for a while."""
        super().pause_writing()
        self._wait(DEAFNESS)

    def resume_writing(self) -> None:
        """It took something."""
        self._wait(None)
        super().resume_writing()

    @property
    def is_silent(self) -> bool:
        """Whether no request is being answered or read."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self, seconds: float | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
