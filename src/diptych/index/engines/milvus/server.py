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
<<<<<<< HEAD
from diptych.index.engines.milvus.address import Address
=======
from diptych.index.protocol import is_closed
from diptych.index.query.filters import ITEM_COLUMNS

DEFAULT_PORT, DEFAULT_INDEX = 19530, "diptych"
CONSISTENCY = {
    "strong": "Strong",
    "session": "Session",
    "bounded": "Bounded",
    "eventually": "Eventually",
}
Graph = Literal["flat", "hnsw", "diskann"]
GRAPHS: tuple[Graph, ...] = ("flat", "hnsw", "diskann")
MOST_PARTITIONS, MOST_REPLICAS = 1_024, 1_000  # the first is Milvus's limit since 2.4
_URL = re.compile(
    r"milvus://(?:(?P<user>[^:@/]*)(?::(?P<password>[^@/]*))?@)?"
    r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:@/?#\[\]\s]+)(?::(?P<port>\d{1,5}))?(?:/(?P<name>[^/?#]*))?(?:\?(?P<options>.*))?"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an index lies and how it is made and read; ``label`` names it without user and password."""

    host: str
    port: int
    index: str
    user: str
    password: str
    consistency: str
    graph: Graph | None
    replicas: int
    partitions: int
    partition_by: str

    @property
    def label(self) -> str:
        """The address as messages show it."""
        return f"milvus://{self.host}:{self.port}/{self.index}"


def read_address(url: str) -> Address:
    """The parts of a URL; raises for one that cannot be read, without repeating a password."""
    found = _URL.fullmatch(url)
    if found is None or int(found["port"] or DEFAULT_PORT) > 65_535:
        raise SettingsError(
            "the Milvus URL cannot be read: write milvus://user:password@host:port/name, and what is special in a "
            "password as its code (/ as %2F, @ as %40, % as %25)."
        )
    index = unquote(found["name"] or DEFAULT_INDEX)
    if not _NAME.fullmatch(index):
        raise SettingsError(
            f"{index!r} in the Milvus URL is not a name for an index: use letters, digits and _, at most 100, and no "
            "digit at its beginning."
        )
    options = _options(found["options"] or "")
    partitions = _number(options, "partitions", 0, MOST_PARTITIONS)
    partition_by = options.get("partition_by", "")
    if bool(partitions) != bool(partition_by):
        raise SettingsError(
            "partitions= and partition_by= go together in a Milvus URL: write, for instance, "
            "partitions=64&partition_by=shop."
        )
    if partition_by in ITEM_COLUMNS:
        raise SettingsError(
            f"partition_by={partition_by!r} in the Milvus URL is not a metadata column: name one that filters read."
        )
    return Address(
        host=found["host"],
        port=int(found["port"] or DEFAULT_PORT),
        index=index,
        user=unquote(found["user"] or ""),
        password=unquote(found["password"] or ""),
        consistency=CONSISTENCY[_chosen(options, "consistency", tuple(CONSISTENCY), "strong")],
        graph=_chosen(options, "index", GRAPHS, "") or None,  # type: ignore[arg-type]
        replicas=_number(options, "replicas", 1, MOST_REPLICAS),
        partitions=partitions,
        partition_by=partition_by,
    )


def _options(text: str) -> dict[str, str]:
    known = ("consistency", "index", "replicas", "partitions", "partition_by")
    options = dict(parse_qsl(text, keep_blank_values=True))
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise SettingsError(
            f"a Milvus URL has no option {unknown[:40]!r}: the options are {', '.join(known)}."
        )
    return options


def _chosen(options: dict[str, str], name: str, known: tuple[str, ...], usual: str) -> str:
    value = options.get(name, usual)
    if value != usual and value not in known:
        raise SettingsError(f"{name}={value[:40]!r} in the Milvus URL is unknown: choose {', '.join(known)}.")
    return value


def _number(options: dict[str, str], name: str, least: int, most: int) -> int:
    value = options.get(name, str(least))
    if not re.fullmatch(r"\d{1,9}", value) or not least <= int(value) <= most:
        raise SettingsError(
            f"{name}={value[:40]!r} in the Milvus URL is out of range: give a number from {max(1, least)} to {most}."
        )
    return int(value)

>>>>>>> 1c9c563 (Give every engine a small core and shared capabilities)

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
    "loading", "canceled",
)  # fmt: skip
_FULL = (
    "quota",
    "disk full",
    "no space",
    "force deny",
    "forcedeny",
    "memory limit",
    "memory exceed",
    "exhausted",
)
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
        """Close the connection; idempotent."""
        with self._lock:
            self._closed, client, self._client = True, self._client, None
        if client is not None:
            client.close()

    def needs(self, version: tuple[int, int], what: str) -> None:
        """Raise when the server is older than ``version``, which ``what`` needs."""
        if not self.has(version):
            check_version(self.version, version, self.label, what)

    def has(self, version: tuple[int, int]) -> bool:
        """Whether the server is of this version or newer."""
        self.ask(lambda client, seconds: None)
        return _version_of(self.version) >= version

    def _connected(self) -> Client:
        """The client, if the server listens: otherwise the client would go on trying for all of its time."""
        host, port = self.address.host.strip("[]"), self.address.port
        limit = deadline.current()
        try:
            socket.create_connection((host, port), KNOCK if limit is None else min(KNOCK, limit.left)).close()
        except OSError as error:
            raise self._away(error.strerror or str(error) or type(error).__name__) from error
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
            said = _told(deeper) if isinstance(deeper, grpc.RpcError) else ""
            code = error.code if isinstance(error.code, int) else 0  # gRPC's own codes are not numbers
            raise self._sentence(code, said or str(error.message)) from error
        except grpc.RpcError as error:
            raise self._sentence(0, _told(error)) from error

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
            return IndexFault(f"there is no index at {place}: index a collection there first.")
        if limit is not None and limit.passed:
            return limit.late()
        if any(words in lower for words in _AWAY):
            return self._away(reason)
        return IndexFault(
            f"{place} answered with an error ({reason}): check the index with 'diptych index verify'."
        )

    def _away(self, reason: str) -> Unavailable:
        return Unavailable(
            f"the server {self.label} does not answer ({reason}): start it or check the URL, then try again."
        )


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


def _told(error: Any) -> str:
    return f"{error.code().name.lower()}: {error.details()}"


def _reason(message: str) -> str:
    """What a server says, on one line and not too long."""
    line = " ".join(message.split()).rstrip(".:")
    return line if len(line) <= 160 else f"{line[:160]}…"
