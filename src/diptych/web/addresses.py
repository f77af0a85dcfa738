"""Images fetched from web addresses: of the public internet only, and never from the network the service is in."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Self
from urllib.parse import SplitResult, urlsplit

from diptych.errors import AddressError

PATIENCE = 10  # seconds to fetch the images that a query names by address, all together
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # an IPv4 address in its last 32 bits
_REFUSED = [
    ipaddress.ip_network(network)
    for network in (
        "64:ff9b:1::/48",  # NAT64 of a local network
        "2001::/32",  # Teredo, whose address is hidden in it
        "::/96",  # IPv4-compatible, given up in 2006
        "::ffff:0:0:0/96",  # IPv4-translated
        "100::/64",  # discarded
        "5f00::/16",  # segment routing
        "fec0::/10",  # site-local, given up in 2004
    )
]
_ISATAP = 0x5EFE  # in bits 32 to 63, with any of the flags before it; an IPv4 address behind it


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, whatever other address is written into it."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = _embedded(ip)
        if inner is not None:
            return is_public(str(inner))
        if any(ip in network for network in _REFUSED):
            return False
    special = ip.is_multicast or ip.is_reserved or ip.is_loopback or ip.is_link_local or ip.is_unspecified
    return ip.is_global and not special


def _embedded(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a translator would reach for an IPv6 one."""
    number = int(ip)
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip.sixtofour is not None:
        return ip.sixtofour
    if ip in _NAT64 or number >> 32 & 0xFFFF == _ISATAP:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return None


def find_public(host: str, port: int) -> str:
    """The number of a host, all of whose numbers must be on the public internet."""
    found = [str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(is_public(number) for number in found):
        raise AddressError(f"{host[:200]} is not on the public internet: upload the image instead.")
    return found[0]


def download(address: str, limit: int, until: float) -> bytes:
    """The bytes at an address of the public internet; no redirect is followed, no private network reached."""
    parts, host, port = _divided(address)
    late = AddressError(f"{address[:200]} took more than {PATIENCE} seconds: upload the image instead.")
    try:
        found = find_public(host, port)
        left = until - time.monotonic()
        if left <= 0:
            raise late
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(host, port, timeout=left)
        with _Cut(left) as cut:
            # the address that was checked is the one that is connected to, whatever the name means by then
            connect = lambda _, *rest: cut.watch(socket.create_connection((found, port), *rest))  # noqa: E731
            connection._create_connection = connect  # type: ignore[attr-defined]
            try:
                target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
                connection.request("GET", target, headers={"User-Agent": "diptych", "Accept": "image/*"})
                with connection.getresponse() as answer:
                    if answer.status != 200:
                        raise AddressError(
                            f"{address[:200]} answered with status {answer.status}: give a direct address."
                        )
                    data = answer.read(limit + 1)
            finally:
                connection.close()
    except (OSError, ValueError, HTTPException) as error:
        if time.monotonic() >= until:
            raise late from error
        raise AddressError(f"{address[:200]} cannot be fetched ({error}): check the address.") from error
    if cut.passed:  # an answer of unknown length just ends
        raise late
    if len(data) > limit:
        raise AddressError(f"{address[:200]} is larger than {limit} bytes: give a smaller image.")
    return data


def _divided(address: str) -> tuple[SplitResult, str, int]:
    """The parts of an address, its host and its port."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
        address.encode("ascii")
        host.encode("idna")
    except ValueError as error:
        raise AddressError(
            f"{address[:200]} is not a web address ({error}): check how it is written."
        ) from error
    if (
        parts.scheme not in ("http", "https")
        or not host
        or parts.username is not None
        or not address.isprintable()
    ):
        raise AddressError(f"{address[:200]} is not a web address: write it as https://host/path.")
    return parts, host, (443 if parts.scheme == "https" else 80) if port is None else port


class _Cut:
    """Cuts a connection off after some seconds, however slowly it goes on: a timeout begins again with each byte."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._lock = threading.Lock()
        self._handle: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def watch(self, connection: socket.socket) -> socket.socket:
        """The same connection; a second handle of it is kept, which outlives the one that TLS takes over."""
        with self._lock:
            if self.passed:
                connection.close()
                raise TimeoutError("too late")
            self._handle = connection.dup()
        return connection

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._handle is not None:
                self._handle.close()
                self._handle = None

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            if self._handle is not None:
                with suppress(OSError):
                    self._handle.shutdown(socket.SHUT_RDWR)
