"""Conversation with a Milvus server: one client, kept; its errors as one sentence each."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from diptych.errors import IndexFault, MissingExtra, SettingsError, StorageError, Unavailable
from diptych.index import deadline
from diptych.index.engines.milvus.address import Address
from diptych.index.protocol import ABSENT, FAILED, SILENT, is_closed

try:
    import grpc
    from pymilvus import DataType as DataType
    from pymilvus import Function as Function
    from pymilvus import FunctionType as FunctionType
    from pymilvus import MilvusClient as MilvusClient
    from pymilvus.exceptions import MilvusException as MilvusException
except ImportError as missing:
    raise MissingExtra("pymilvus", "milvus", "An index in Milvus") from missing

# it prints a traceback of what is told in a sentence here
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

OLDEST = (2, 3)  # JSON columns, upserts and vectors in answers
KNOCK = 5.0  # seconds for a connection; a server that is away is told from one that is slow
PATIENCE = 60.0  # seconds for one request; the client repeats it as long while the server restarts
NOT_FOUND = 100  # Milvus's code of a collection that is not there
_AWAY = (
    "not loaded", "not available", "unavailable", "not ready", "no available", "recovering", "not healthy", "offline",
    "connection", "node not found", "node not match", "channel not found", "fail connecting", "retry run out",
    "retry timeout", "deadline", "channel lacks", "lack of", "no replica available", "shard delegator", "not serve",
    "loading", "canceled", "incomplete query result",
)  # fmt: skip
_FULL = (
    "quota", "disk full", "no space", "force deny", "forcedeny", "memory limit", "memory exceed", "exhausted",
)  # fmt: skip
_DENIED = ("permission deny", "permission denied", "privilege")
_REFUSED = ("auth check failure", "unauthenticated", "username or password", "missing authorization")
_LARGE = ("larger than max", "message too large", "exceeds the max", "trying to send message larger")
T = TypeVar("T")
Client = Any  # pymilvus.MilvusClient, whose types an installation without the extra lacks


class TooLarge(IndexFault):
    """An answer or a request of more bytes than the server sends or takes at once: ask for less."""


class Server:
    """A Milvus server that holds an index; safe to share between threads.

    A server that goes away makes requests fail with ``Unavailable``; the first one after it is back works again.
    """

    def __init__(self, address: Address) -> None:
        self.address, self.label = address, address.label
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self.version = ""

    def ask(self, request: Callable[[Client, float], T]) -> T:
        """The answer of ``request(client, seconds)``; it may be repeated, so it must be one that may."""
        limit = deadline.current()
        if limit is not None:
            limit.check()
        with self._translating():
            client = self._connected()
            return request(client, PATIENCE if limit is None else max(0.1, min(PATIENCE, limit.left)))

    def close(self) -> None:
        with self._lock:
            self._closed, client, self._client = True, self._client, None
        if client is not None:
            client.close()

    def has(self, version: tuple[int, int]) -> bool:
        self.ask(lambda client, seconds: None)
        return _version_of(self.version) >= version

    def _connected(self) -> Client:
        """The client, if the server listens: otherwise the client would go on trying for all of its time."""
        host, port = self.address.host.strip("[]"), self.address.port
        limit = deadline.current()
        try:
            socket.create_connection((host, port), KNOCK if limit is None else min(KNOCK, limit.left)).close()
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise Unavailable(SILENT.format(f"server {self.label}", reason)) from error
        with self._lock:
            if self._closed:
                raise is_closed(self.label)
            if self._client is None:
                self._client = self._open()
            return self._client

    def _open(self) -> Client:
        login = {"user": self.address.user, "password": self.address.password} if self.address.user else {}
        client = MilvusClient(
            f"http://{self.address.host}:{self.address.port}", timeout=KNOCK, dedicated=True, **login
        )
        try:
            self.version = str(client.get_server_version(timeout=KNOCK))
            check_version(self.version, OLDEST, self.label, "an index")
        except BaseException:
            client.close()
            raise
        return client

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except MilvusException as error:
            deeper = error.__cause__  # the client says "fail connecting" of a wrong password too
            said = _details(deeper) if isinstance(deeper, grpc.RpcError) else ""
            code = error.code if isinstance(error.code, int) else 0  # gRPC's own codes are not numbers
            raise self._sentence(code, said or str(error.message)) from error
        except grpc.RpcError as error:
            raise self._sentence(0, _details(error)) from error

    def _sentence(self, code: int, message: str) -> Exception:
        reason, place = _reason(message), self.label
        limit, lower = deadline.current(), message.lower()
        if any(words in lower for words in _LARGE):
            return TooLarge(f"{place} cannot send so much at once ({reason}): ask for fewer items.")
        if any(words in lower for words in _REFUSED):
            return SettingsError(
                f"{place} refuses the user or the password: write milvus://user:password@… as the server knows them."
            )
        if any(words in lower for words in _DENIED):
            return StorageError(f"{place} does not allow this ({reason}): use a user that may.")
        if any(words in lower for words in _FULL):
            return StorageError(
                f"{place} is full ({reason}): free some space or raise its quota, and try again; what was saved is "
                "intact."
            )
        if code == NOT_FOUND:
            return IndexFault(ABSENT.format(place))
        if limit is not None and limit.passed:
            return limit.late()
        if any(words in lower for words in _AWAY):
            return Unavailable(SILENT.format(f"server {place}", reason))
        return IndexFault(FAILED.format(place, reason))


def check_version(version: str, needed: tuple[int, int], place: str, what: str) -> None:
    """Raise when a server's version is too old; one that cannot be read is taken for a new one."""
    if _version_of(version) < needed:
        raise SettingsError(
            f"the server of {place} is Milvus {version.lstrip('v')}, and {what} needs {needed[0]}.{needed[1]} or "
            "newer: update the server."
        )


def _version_of(version: str) -> tuple[int, int]:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (99, 0)


def _details(error: Any) -> str:
    return f"{error.code().name.lower()}: {error.details()}"


def _reason(message: str) -> str:
    """What a server says, on one line and not too long."""
    line = " ".join(message.split()).rstrip(".:")
    return line if len(line) <= 160 else f"{line[:160]}…"
