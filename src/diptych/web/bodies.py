"""Requests that are larger than they may be are refused before anything of them is read into memory.

Who may ask what: a token for changes, and for everything when the service is not on loopback.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from python_multipart.multipart import parse_options_header
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.errors import SettingsError
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
CHARSET = b"utf-8"  # of a form; Python knows codecs that take hours for a megabyte


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
            await self.app(scope, _limit_body(receive, most, sentence), send)
        finally:
            self._active -= 1
            self._held -= size if size > SMALL else 0

    async def _take(self, size: int) -> bool:
        until = time.monotonic() + TURN
        while size > SMALL and self._held + size > self._most:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.05)
        self._held += size if size > SMALL else 0
        return True


def _limit_body(receive: Receive, most: int, sentence: str) -> Receive:
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
            _, options = parse_options_header(self.headers.get("content-type", ""))
            charset = options.get(b"charset", CHARSET).decode("latin-1")
            if charset.lower() != CHARSET.decode():
                raise HTTPException(400, f"the form is written in {charset[:40]!a}: send it in UTF-8.")
            return super().form(**{**given, **own})

    class FormRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_form(request: Request) -> Response:
                return await handle(LargeForm(request.scope, request.receive))

            return handle_form

    return FormRoute


SHORTEST_TOKEN = 8  # characters
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# the page itself holds no data: it asks for the token
PAGE = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
REFERENCE = "/docs"
READING = ("GET", "HEAD", "OPTIONS")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address the service is bound to."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_token(token: str | None) -> None:
    """Raise for a token that could be guessed or not be sent."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise SettingsError(
            f"the token must have at least {SHORTEST_TOKEN} printable ASCII characters: make one with "
            "python -c 'import secrets; print(secrets.token_urlsafe(24))'."
        )


class Access:
    """Checks the token, the host and the origin of each request, and adds the security headers to each answer.

    ``private`` asks for the token everywhere but on the page's own files. ``hosts`` are the names the service
    is known by: on loopback they keep a foreign site from reaching it under its own name (DNS rebinding).
    ``origins`` are the sites whose pages may send it more than questions in an address.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        private: bool,
        hosts: tuple[str, ...] | None,
        origins: tuple[str, ...] = (),
    ) -> None:
        check_token(token)
        if private and token is None:
            raise SettingsError(
                "a service that other machines can reach needs a token: give one, or bind to 127.0.0.1."
            )
        self.app, self.private, self.origins = app, private, {origin.lower() for origin in origins}
        self.hosts = None if hosts is None else {host.lower() for host in hosts}
        self.digest = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        sentence = self._refusal(scope)
        if sentence is not None:
            await refuse(scope, send_secured, *sentence)
        else:
            await self.app(scope, receive, send_secured)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = dict(scope["headers"])
        if self.hosts is not None and _without_port(_header(headers, b"host")) not in self.hosts:
            return 421, "this service does not answer to that host name: use the address it was started with."
        if scope["method"] not in READING and self._is_foreign(headers):
            return 403, "this request comes from the page of another site: allow that site with --cors."
        path: str = scope["path"]
        writes = scope["method"] not in READING and path != "/api/search"
        if path in PAGE or path == REFERENCE or not (writes or self.private):
            return None
        if self.digest is None:
            return 403, "this service takes no changes: start it with a token to allow them."
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not given:
            return 401, "this needs a token: send the header 'Authorization: Bearer TOKEN'."
        # digests of equal length, compared in constant time: nothing of the token leaks through timing
        if not hmac.compare_digest(_digest(given.strip()), self.digest):
            return 401, "the token is wrong: use the one the service was started with."
        return None

    def _is_foreign(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a browser sent the request for a page that is neither the service's own nor of a named site.

        A page can send forms and files anywhere without asking, though not read the answer. Browsers tell
        where it is from in Sec-Fetch-Site or, the old ones and those on plain http, in Origin alone.
        """
        origin, site = _header(headers, b"origin"), _header(headers, b"sec-fetch-site")
        if origin in self.origins or "*" in self.origins or site in ("same-origin", "none"):
            return False
        if site or not origin:
            return bool(site)
        own = origin.partition("://")[2]  # empty for the origin 'null'
        if own and own == _header(headers, b"host"):
            return False
        # a proxy may forward with another host than the one it is asked for
        return is_loopback(_without_port(own)) or _without_port(own) not in (self.hosts or ())


def _header(headers: dict[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").lower()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
