"""The server of these tests: a real one, and nobody else's."""

from __future__ import annotations

import socket

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
