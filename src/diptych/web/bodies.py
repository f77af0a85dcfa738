"""Requests that are larger than they may be are refused before anything of them is read into memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.web.limits import Limits
from diptych.web.replies import refuse

REQUESTS = 400  # answered at once; beyond them only
WATCHED = ("/api/health", "/metrics")
SMALL = 65_536  # bytes of a body that are not counted
AT_ONCE = 8  # times the limit of one body: what all the bodies that are being read may have together
TURN = 5.0  # seconds a body waits for others
PATIENCE = 60.0  # seconds in which a body must have come
ARGUMENTS = 32  # of an address or a form, beside items and images
FORM = 1_000_000  # bytes of a form that is not multipart: its parser takes a while for each


class BodyLimit:
    """Refuses a body beyond the limit: by its announced length at once, otherwise when it has grown.

    All bodies together have a limit too, counted by their announced length until they are answered; and a body that
    comes a byte at a time is given up.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits
        self._held, self._most = 0, AT_ONCE * limits.body
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # everything a URL may carry is short; what it says is checked again, field by field
        longest = 12 * (self.limits.query + self.limits.filter) + 40 * self.limits.items + 10_000
        if len(scope["query_string"]) > longest:
            await refuse(
                scope, send, 414, f"the address is longer than {longest} characters: shorten the query."
            )
            return
        most = self.limits.items + ARGUMENTS
        if scope["query_string"].count(b"&") >= most:
            await refuse(scope, send, 414, f"the address has more than {most} arguments: send fewer.")
            return
        headers = dict(scope["headers"])
        most = self.limits.body
        if headers.get(b"content-type", b"").lower().startswith(b"application/x-www-form-urlencoded"):
            most = min(most, FORM)
        sentence = f"the request is larger than {most} bytes: send less, or a smaller image."
        if most < self.limits.body:
            sentence = f"the form is larger than {most} bytes: send it as multipart/form-data, or send less."
        announced = headers.get(b"content-length", b"0")
        if len(announced) > 18 or not announced.isdigit() or int(announced) > most:
            await refuse(scope, send, 413, sentence)
            return
        if self._active >= REQUESTS and scope["path"] not in WATCHED:
            await refuse(scope, send, 503, "too many requests are being answered: try again in a moment.")
            return
        size = most if b"transfer-encoding" in headers else int(announced)
        if not await self._take(size):
            await refuse(scope, send, 503, "too many uploads are coming in at once: try again in a moment.")
            return
        self._active += 1
        try:
            await self.app(scope, _counted(receive, most, sentence), send)
        finally:
            self._active -= 1
            self._give_back(size)

    async def _take(self, size: int) -> bool:
        until = time.monotonic() + TURN
        while size > SMALL and self._held + size > self._most:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.05)
        self._held += size if size > SMALL else 0
        return True

    def _give_back(self, size: int) -> None:
        self._held -= size if size > SMALL else 0


def _counted(receive: Receive, most: int, sentence: str) -> Receive:
    """The body as it comes, within the limits of bytes and seconds."""
    seen, until, whole = 0, time.monotonic() + PATIENCE, False

    async def counted() -> Message:
        nonlocal seen, whole
        if whole:  # what comes then is that the client has left
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise HTTPException(
                408,
                f"the request took more than {PATIENCE:g} seconds to arrive: send it again, or send less.",
            ) from None
        seen += len(message.get("body", b""))
        if seen > most:
            raise HTTPException(413, sentence)
        whole = not message.get("more_body", False)
        return message

    return counted


def form_route(limits: Limits) -> type[APIRoute]:
    """Routes whose forms have our limits: of the body for a field, and as many files as items."""
    own = {"max_part_size": limits.body, "max_files": limits.items, "max_fields": ARGUMENTS}

    class LargeForm(Request):
        def form(self, **given: Any) -> Any:
            return super().form(**{**given, **own})

    class FormRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_form(request: Request) -> Response:
                return await handle(LargeForm(request.scope, request.receive))

            return handle_form

    return FormRoute
