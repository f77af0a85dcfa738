"""Who may ask what: a token for changes, and for everything when the service is not on loopback."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.errors import SettingsError
from diptych.web.replies import refuse

SHORTEST_TOKEN = 8  # characters
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# the page itself holds no data: it asks for the token
PAGE = (
    "/",
    "/docs",
    "/app.js",
    "/style.css",
    "/icon.svg",
)
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

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        sentence = self._refusal(scope)
        if sentence is not None:
            await refuse(scope, dressed, *sentence)
        else:
            await self.app(scope, receive, dressed)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = dict(scope["headers"])
        if self.hosts is not None and _without_port(_named(headers, b"host")) not in self.hosts:
            return 421, "this service does not answer to that host name: use the address it was started with."
        if scope["method"] not in READING and self._is_foreign(headers):
            return 403, "this request comes from the page of another site: allow that site with --cors."
        path: str = scope["path"]
        writes = scope["method"] not in READING and path != "/api/search"
        if path in PAGE or not (writes or self.private):
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
        origin, site = _named(headers, b"origin"), _named(headers, b"sec-fetch-site")
        if origin in self.origins or "*" in self.origins or site in ("same-origin", "none"):
            return False
        if site or not origin:
            return bool(site)
        own = origin.partition("://")[2]  # empty for the origin 'null'
        if own and own == _named(headers, b"host"):
            return False
        # a proxy may forward with another host than the one it is asked for
        return is_loopback(_without_port(own)) or _without_port(own) not in (self.hosts or ())


def _named(headers: dict[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").lower()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
