"""The server of these tests: a real one, and nobody else's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from milvus_server import milvus

pymilvus = pytest.importorskip("pymilvus")


def test_a_server_of_its_own() -> None:
    with milvus() as server:
        client = pymilvus.MilvusClient(f"http://{server.address}", timeout=10)
        assert client.get_server_version().startswith("v2.3.5")
        assert client.list_collections() == []
        client.close()
        with socket.socket() as other:  # its own ports are in its namespace
            assert other.connect_ex(("127.0.0.1", 21124)) != 0


@pytest.mark.parametrize(("ci", "ended", "said"), [("true", 2, "1 error"), ("", 5, "1 skipped")])
def test_what_cannot_be_run_fails_in_ci(ci: str, ended: int, said: str) -> None:
    script = "import sys; sys.modules['pymilvus'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("test_milvus.py")),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "CI": ci},
    )
    assert (run.returncode, said in run.stdout) == (ended, True), run.stdout
