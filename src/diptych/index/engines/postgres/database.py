"""Connections to PostgreSQL: kept, replaced when the server went away, its errors as one sentence each."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import unquote

from diptych.errors import DataError, IndexFault, MissingExtra, SettingsError, StorageError, Unavailable
from diptych.index import deadline
from diptych.index.protocol import ABSENT, FAILED, SILENT, is_closed

try:
    import psycopg
    from pgvector import HalfVector as HalfVector
    from pgvector import Vector as Vector
    from pgvector.psycopg import register_vector
    from psycopg import errors
    from psycopg import sql as sql
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.types.json import Jsonb as Jsonb
except ImportError as missing:
    raise MissingExtra("psycopg[binary] and pgvector", "postgres", "An index in PostgreSQL") from missing

SCHEMES = ("postgresql", "postgres")
DEFAULT_INDEX = "diptych"
IDLE = 8  # connections kept open between requests
# a server that vanished without a word is noticed within seconds, not after the system's two hours
_PATIENCE = {
    "connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds a sent request may stay unacknowledged: no keepalive runs then
}  # fmt: skip
TURN = 5_000  # milliseconds a change waits for another one (a graph takes minutes) before it gives up
READ_TURN = 3_000  # milliseconds a reader waits for a table that a compaction holds
COMPACT_TURN = 2_000  # milliseconds a compaction waits for readers; less than those queued behind it do
_NAME = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,39}")  # PostgreSQL keeps pg_ to itself
_LOGIN = re.compile(r"\w+://(?:[^@/]*@)?")  # as the driver finds it: a password may hold # and ?
T = TypeVar("T")
Connection = Any  # psycopg.Connection[tuple[Any, ...]], whose stubs an installation without the extra lacks


class Database:
    """A pool of connections to one database, and the name of the index in it.

    The URL is ``postgresql://user:password@host:port/database?index=name``: each index is a schema of that
    name, so one database holds several. Without ``index`` it is ``diptych``.
    """

    def __init__(self, url: str) -> None:
        self._url, self.index = _parts_of(url)
        place = _place(self._url)
        if not _NAME.fullmatch(self.index):
            raise SettingsError(
                f"index={self.index!r} in the database URL is not a name for an index: "
                "use lower-case letters, digits and _, at most 40, and no pg_ at its beginning."
            )
        self.label = f"{place}?index={self.index}"  # without user and password
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, read: Callable[[Connection], T]) -> T:
        """The answer of ``read``, asked a second time when the first connection turns out to be dead.

        A table that a compaction holds for longer than ``READ_TURN`` makes it give up.
        """
        start = f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL lock_timeout = {READ_TURN}"
        return self._run(read, lambda db: db.execute(start + _time_limit()))

    def change(self, write: Callable[[Connection], T], begin: str) -> T:
        """Run ``write`` in a transaction after ``begin``; committed when this returns, else without trace.

        Only ``begin`` is asked again on a dead connection: a commit whose answer was lost may have happened.
        Behind a change that takes longer than ``TURN`` this one gives up.
        """
        start = f"BEGIN; SET LOCAL lock_timeout = {TURN}; {begin}"
        return self._run(write, lambda db: db.execute(start), retry=False)

    def compact(self, statements: Iterable[Any]) -> None:
        """Run statements that want a table for themselves and no transaction around them (VACUUM FULL).

        Later clients queue behind a compaction that waits for its table, so it gives up after ``COMPACT_TURN``.
        """
        with self._translating():
            db, _ = self._borrow()
            try:
                db.execute(f"SET lock_timeout = {COMPACT_TURN}")
                for statement in statements:
                    db.execute(statement)
            except errors.LockNotAvailable as error:
                raise Unavailable(
                    f"{self.label} cannot be compacted while a search or a change takes longer than "
                    f"{COMPACT_TURN / 1000:g} s: try again when it is done; nothing is lost."
                ) from error
            finally:
                db.close()  # and its setting with it

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    def _run(
        self, work: Callable[[Connection], T], begin: Callable[[Connection], Any], retry: bool = True
    ) -> T:
        with self._translating():
            while True:
                db, fresh = self._borrow()
                started = False
                try:
                    begin(db)
                    started = True
                    result = work(db)
                    db.execute("COMMIT")
                    return result
                except BaseException as error:
                    gone = isinstance(error, psycopg.OperationalError) and _is_gone(error)
                    if gone:
                        self._drop_idle()  # they were opened to the same server
                    with suppress(psycopg.Error):
                        db.execute("ROLLBACK")
                    if not gone or fresh or (started and not retry):
                        raise
                finally:
                    self._give_back(db)

    def _borrow(self) -> tuple[Connection, bool]:
        """A connection, and whether it was opened just now."""
        with self._lock:
            if self._closed:
                raise is_closed(self.label)
            if self._idle:
                return self._idle.pop(), False
        db = psycopg.connect(self._url, autocommit=True, application_name="diptych", **_PATIENCE)
        try:
            # what is acknowledged is on disk, whatever the server's default is
            db.execute("SET synchronous_commit = on")
            if db.execute("SELECT 1 FROM pg_type WHERE typname = 'vector'").fetchone():
                register_vector(db)
        except BaseException:
            db.close()
            raise
        return db, True

    def _give_back(self, db: Connection) -> None:
        with self._lock:
            keep = not (self._closed or db.broken or db.closed) and len(self._idle) < IDLE
            if keep:
                self._idle.append(db)
        if not keep:
            db.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for db in idle:
            db.close()

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise self._sentence(error) from error

    def _sentence(self, error: psycopg.Error) -> Exception:
        reason = (error.diag.message_primary or str(error).strip() or type(error).__name__).splitlines()[0]
        place = self.label
        if isinstance(error, errors.DiskFull):
            return StorageError(
                f"the disk of {place} is full: free some space and try again; what was saved is intact."
            )
        if isinstance(error, errors.InsufficientPrivilege | errors.ReadOnlySqlTransaction):
            return StorageError(f"{place} cannot be written ({reason}): use a role that may write there.")
        if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName):
            return IndexFault(ABSENT.format(place))
        limit = deadline.current()
        if isinstance(error, errors.QueryCanceled) and limit is not None and limit.passed:
            return limit.late()
        if isinstance(error, errors.QueryCanceled | errors.LockNotAvailable | errors.TransactionRollback):
            return Unavailable(f"{place} gave up on the request ({reason}): try again.")
        if isinstance(error, errors.DataError | errors.ProgramLimitExceeded):
            return DataError(f"{place} cannot store or compare a value ({reason}): change that value.")
        if isinstance(error, psycopg.OperationalError):
            return Unavailable(SILENT.format(f"database {place}", reason))
        return IndexFault(FAILED.format(place, reason))


def _time_limit() -> str:
    """What tells the server until when the answer is wanted."""
    limit = deadline.current()
    if limit is None:
        return ""
    limit.check()
    return f"; SET LOCAL statement_timeout = {max(1, int(limit.left * 1000))}"


def _is_gone(error: psycopg.OperationalError) -> bool:
    """Whether the connection failed, not a statement: then there is no SQLSTATE, or 57P0x from a stop."""
    state = error.sqlstate or ""
    return not state or state.startswith(("08", "57P0"))


def _parts_of(url: str) -> tuple[str, str]:
    """The URL as the driver reads it, and the name of the index, which is none of its options."""
    login = _LOGIN.match(url)
    rest = url[login.end() if login else 0 :]
    address, _, query = rest.partition("?")
    options = query.split("&") if query else []
    index = [unquote(option[len("index=") :]) for option in options if option.startswith("index=")]
    others = "&".join(option for option in options if not option.startswith("index="))
    return url[: len(url) - len(rest)] + address + f"?{others}" * bool(others), (index or [DEFAULT_INDEX])[-1]


def _place(url: str) -> str:
    """The URL's host, port and database; raises where a mistake may have put part of a password among them."""
    try:
        parts = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.Error:
        parts = {"port": "unknown"}
    address = _LOGIN.sub("", url, count=1).partition("?")[0]
    if "@" in address or not re.fullmatch(r"[\d,]*", parts.get("port", "")):
        raise SettingsError(
            "the database URL cannot be read: write postgresql://user:password@host:port/database?index=name, "
            "and what is special in a password as its code (/ as %2F, @ as %40, % as %25)."
        ) from None
    host = parts.get("host") or parts.get("hostaddr", "")
    port = f":{parts['port']}" if parts.get("port") else ""
    database = f"/{parts['dbname']}" if parts.get("dbname") else ""
    return f"{SCHEMES[0]}://{f'[{host}]' if ':' in host else host}{port}{database}"
