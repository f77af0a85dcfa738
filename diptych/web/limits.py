"""What a request may cost: sizes checked before anything is read, decoded or encoded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.errors import SettingsError
from diptych.web.replies import refuse


@dataclass(frozen=True, slots=True)
class Limits:
    """The most a request may ask for; each is refused beyond it with one sentence."""

    body: int = 20_000_000  # bytes of a request, uploads included
    pixels: int = 50_000_000  # of an uploaded image
    images: int = 4  # of one query
    k: int = 200  # hits
    query: int = 2_000  # characters of a text or query expression
    filter: int = 2_000  # characters of a filter
    items: int = 256  # added or named by one request
    text: int = 20_000  # characters of an added text

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) < 1:
                raise SettingsError(
                    f"the limit {entry.name}={getattr(self, entry.name)} lets nothing pass: give at least 1."
                )


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
