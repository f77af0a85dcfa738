"""Requests that are larger than they may be are refused before anything of them is read into memory."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.web.limits import Limits
from diptych.web.replies import refuse


class BodyLimit:
    """Refuses a body beyond the limit: by its announced length at once, otherwise when it has grown."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

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
        sentence = f"the request is larger than {self.limits.body} bytes: send less, or a smaller image."
        announced = next((v for name, v in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > self.limits.body:
            await refuse(scope, send, 413, sentence)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limits.body:
                raise HTTPException(413, sentence)
            return message

        await self.app(scope, counted, send)


def form_route(limit: int) -> type[APIRoute]:
    """Routes whose forms may have fields of ``limit`` bytes; without it, 1 MB is the most, whatever the body's is."""

    class LargeForm(Request):
        def form(self, **given: Any) -> Any:
            return super().form(**{**given, "max_part_size": limit})

    class FormRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_form(request: Request) -> Response:
                return await handle(LargeForm(request.scope, request.receive))

            return handle_form

    return FormRoute
