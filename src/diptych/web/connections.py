"""Connections that say nothing, or do not listen, are closed; those that ask are answered, however many there are.

uvicorn counts every open connection and refuses requests beyond a number: a few hundred clients that connect and stay
silent shut everybody out. Here only requests are refused beyond a number; a silent connection is closed after a while,
and at once when there are too many, the oldest first. So is a connection whose client takes its answer slowly.

The event loop that answers everybody also parses what clients send, at a cost per event, not per byte: one read of
256 KB may hold 40,000 chunks. So each turn of the loop parses a few events of one connection, a body has a limit of
small chunks, heads and trailers have a limit of lines that is checked before a line is read, and what follows an early
answer is dropped without being parsed.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from diptych.web.bodies import HEADERS as SECURITY
from diptych.web.replies import failure

CONNECTIONS = 512  # open at once, silent ones included
SILENCE = 15.0  # seconds in which the head of a request must have come
DEAFNESS = 30.0  # seconds in which a client must take something of its answer
SLOW = 256  # answers that their clients take slowly, at once
DROPPING = 0.02  # seconds between two reads of what is dropped
EVENTS = 64  # heads, chunks and ends that one turn of the event loop parses
CHUNKS = 10_000  # small ones in one body
SMALL = 1_000  # bytes of a chunk; larger ones are not counted
HEADERS = 100  # lines of one head, or of the trailers of one body
LINES = 8  # of a head or of trailers that cost as much as one event
_EMPTY = re.compile(rb"\n\r?\n")


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that waits for nobody for ever."""

    conn: _Parser
    flow: _Flow
    _queues: ClassVar[WeakKeyDictionary[ServerState, _Queue]] = WeakKeyDictionary()
    _slow: ClassVar[WeakKeyDictionary[ServerState, dict[PatientProtocol, None]]] = WeakKeyDictionary()

    def connection_made(self, transport: Any) -> None:
        """Make room for a new connection."""
        super().connection_made(transport)
        self.conn, self.flow = _Parser(self.config.h11_max_incomplete_event_size), _Flow(transport)
        self._drops = False
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
        """Forget the clock, and what came and was not parsed."""
        self._wait(None)
        self.conn.forget()
        self._slow_ones.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Let the clock run on until a whole head has come, a byte at a time or not."""
        if self._drops:  # a flood costs the event loop a read each: a few a second will do
            self.transport.pause_reading()
            self.loop.call_later(DROPPING, self._read_on)
            return
        super().data_received(data)
        if not self.is_silent:
            self._wait(None)

    def handle_events(self) -> None:
        """Parse a few events now and the others, before anything more is read, when it is this connection's turn."""
        if self._drops or self.transport.is_closing():
            return
        self.flow.let_go()
        self.conn.left = EVENTS
        super().handle_events()
        if self.conn.left == 0 and not self._drops:
            self.flow.hold()
            self._queues.setdefault(self.server_state, _Queue(self.loop)).add(self)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is on its way
            self.transport.close()
            return
        answer = failure(*self.conn.refusal)
        answer.headers.update({**SECURITY, "Cache-Control": "no-store", "Connection": "close"})
        state: Any = getattr(self.config.app, "state", None)  # of an application that create_app made
        if hasattr(state, "service"):
            state.service.metrics.count("other", answer.status_code)
        start = h11.Response(status_code=answer.status_code, headers=answer.raw_headers)
        for event in (start, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        if self.cycle is not None:
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
        self._drop()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, or part with a client that has not finished this one."""
        if self.cycle.more_body and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self._drop()
            return
        super().on_response_complete()
        self._slow_ones.pop(self, None)
        self._since = self.loop.time()
        if not self.transport.is_closing() and self.is_silent and self._waiting is None:
            self._wait(SILENCE)

    def pause_writing(self) -> None:
        """The client takes nothing: for a while. Of too many that take little, the one that began first has to go."""
        super().pause_writing()
        self._wait(DEAFNESS)
        self._slow_ones[self] = None
        if len(self._slow_ones) > SLOW:
            next(iter(self._slow_ones)).transport.abort()

    def resume_writing(self) -> None:
        """It took something."""
        self._wait(DEAFNESS if self._drops else None)
        super().resume_writing()

    @property
    def _slow_ones(self) -> dict[PatientProtocol, None]:
        """Connections whose clients had to be waited for in this answer, in the order of the first wait."""
        return self._slow.setdefault(self.server_state, {})

    @property
    def is_silent(self) -> bool:
        """Whether no request is being answered or read."""
        return self.cycle is None or self.cycle.response_complete

    def _drop(self) -> None:
        """Say that nothing follows, and drop what still comes: a client may read its answer only once it sent all."""
        self._drops = True
        self.conn.forget()
        self.flow.let_go()
        self.flow.resume_reading()
        self._wait(DEAFNESS)
        try:
            self.transport.write_eof()
        except OSError:  # it has left
            self.transport.abort()

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _wait(self, seconds: float | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class _Parser(h11.Connection):
    """h11 that rests after a number of events, and refuses a body of many small chunks."""

    def __init__(self, longest: int | None) -> None:
        super().__init__(h11.SERVER, *(() if longest is None else (longest,)))
        self._receive_buffer = _Lines(self._refuse)
        self.left, self._chunks = EVENTS, 0
        self.refusal = 400, "the request is not valid HTTP, or its head is too long: send HTTP/1.1, or less."

    def next_event(self) -> Any:
        """The next event, or that there is none for now."""
        if self.left == 0:
            return h11.NEED_DATA
        event = super().next_event()
        if event is h11.NEED_DATA or event is h11.PAUSED:
            return event
        lines = len(event.headers) if isinstance(event, h11.Request | h11.EndOfMessage) else 0
        self.left = max(0, self.left - 1 - lines // LINES)
        if isinstance(event, h11.Request):
            self._chunks = 0
        elif (
            isinstance(event, h11.Data) and event.chunk_start and event.chunk_end and len(event.data) < SMALL
        ):
            self._chunks += 1
            if self._chunks > CHUNKS:
                self._refuse(
                    413,
                    f"the body has more than {CHUNKS} chunks of less than {SMALL} bytes: send larger ones.",
                )
        return event

    def forget(self) -> None:
        """Free what came and was not parsed: the objects of a connection refer to each other, and go later."""
        self._receive_buffer = _Lines(self._refuse)

    def _refuse(self, status: int, sentence: str) -> NoReturn:
        self.refusal = status, sentence
        raise h11.RemoteProtocolError(sentence)


class _Lines(ReceiveBuffer):
    """What came and was not parsed; the lines of a head or of trailers are counted before h11 reads any of them."""

    def __init__(self, refuse: Callable[[int, str], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """All lines up to an empty one, None while there is none."""
        empty = _EMPTY.search(self._data)
        if self._data.count(b"\n", 0, empty.start() if empty else len(self._data)) > HEADERS:
            self._refuse(400, f"the request has more than {HEADERS} headers: send fewer.")
        return super().maybe_extract_lines()


class _Flow(FlowControl):
    """Does not read on, whoever asks, while there is something to parse."""

    _held = False

    def hold(self) -> None:
        self.pause_reading()
        self._held = True

    def let_go(self) -> None:
        if self._held:
            self._held = False
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self._held:
            super().resume_reading()


class _Queue:
    """Connections with more to parse: each turn of the event loop is one's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._waiting = loop, deque[PatientProtocol]()

    def add(self, one: PatientProtocol) -> None:
        if not self._waiting:
            self._loop.call_soon(self._turn)
        self._waiting.append(one)

    def _turn(self) -> None:
        try:
            self._waiting[0].handle_events()  # which may add it again
        finally:
            self._waiting.popleft()
            if self._waiting:
                self._loop.call_soon(self._turn)
