"""Images fetched from web addresses: of the public internet only, and never from the network this machine is in.

Every download of the package goes through ``download``. The table of reserved networks and what each is for,
``networks.json``, is our own: the one of Python's ``ipaddress`` differs from version to version.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, urlsplit

from diptych.errors import AddressError

PATIENCE = 10  # seconds to fetch the images that a query names by address, all together
_TABLE = json.loads(Path(__file__).with_name("networks.json").read_text("utf-8"))
# when IANA last changed its two registries of special-purpose addresses, which we follow
REGISTRY: str = _TABLE["registry"]
RESERVED_4 = [ipaddress.IPv4Network(network) for network in _TABLE["IPv4"]]
RESERVED_6 = [ipaddress.IPv6Network(network) for network in _TABLE["IPv6"]]
UNICAST_6 = ipaddress.IPv6Network("2000::/3")  # all that was ever given to hosts of the public internet
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # an IPv4 address in its last 32 bits
_ISATAP = 0x5EFE  # in bits 32 to 63, with any of the flags before it; an IPv4 address behind it


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, whatever other address is written into it."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in RESERVED_4)
    inner = _inner_address(ip)
    if inner is not None:
        return is_public(str(inner))
    if int(ip) >> 32 & 0xFFFF == _ISATAP and not is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))):
        return False
    return ip in UNICAST_6 and not any(ip in network for network in RESERVED_6)


def _inner_address(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a translator would reach for an IPv6 one."""
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip.sixtofour is not None:
        return ip.sixtofour
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return None


def find_public(host: str, port: int) -> str:
    """The number of a host, all of whose numbers must be on the public internet."""
    numbers = [str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not numbers or not all(is_public(number) for number in numbers):
        raise AddressError(f"{host[:200]} is not on the public internet: give the image itself instead.")
    return numbers[0]


def download(address: str, limit: int, until: float) -> bytes:
    """The bytes at an address of the public internet; no redirect is followed, no private network reached."""
    parts, host, port = _parts_of(address)
    late = AddressError(f"{address[:200]} took more than {PATIENCE} seconds: give the image itself instead.")
    try:
        number = find_public(host, port)
        seconds = until - time.monotonic()
        if seconds <= 0:
            raise late
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(host, port, timeout=seconds)
        with _Deadline(seconds) as deadline:
            # the address that was checked is the one that is connected to, whatever the name means by then
            connect = lambda _, *rest: deadline.watch(socket.create_connection((number, port), *rest))  # noqa: E731
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
    if deadline.passed:  # an answer of unknown length just ends
        raise late
    if len(data) > limit:
        raise AddressError(f"{address[:200]} is larger than {limit} bytes: give a smaller image.")
    return data


def _parts_of(address: str) -> tuple[SplitResult, str, int]:
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


class _Deadline:
    """Cuts a connection off after some seconds, however slowly it goes on: a timeout begins again with each byte."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._lock = threading.Lock()
        self._handle: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._disconnect)
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

    def _disconnect(self) -> None:
        with self._lock:
            self.passed = True
            if self._handle is not None:
                with suppress(OSError):
                    self._handle.shutdown(socket.SHUT_RDWR)
