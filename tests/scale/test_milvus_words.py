"""Full-text search by the server's BM25, which Milvus has from 2.5 on: its calls, on the server of milvus-lite.

milvus-lite speaks the protocol of new servers and computes BM25, but keeps no description of a collection and has other
rules for filters: an index is no index there, and this runs the tables below it.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pymilvus")
if importlib.util.find_spec("milvus_lite") is None:
    pytest.skip("milvus-lite is not installed: make test-scale", allow_module_level=True)

from diptych.errors import Unavailable
from diptych.index.engines.milvus.address import read_address
from diptych.index.engines.milvus.facts import WORDS
from diptych.index.engines.milvus.pushdown import select
from diptych.index.engines.milvus.ranking import best_words
from diptych.index.engines.milvus.rows import item_fields, row
from diptych.index.engines.milvus.server import MilvusClient, Server
from diptych.index.engines.milvus.table import Table
from diptych.index.protocol import Item
from diptych.index.query.filters import parse_filter

TEXTS = [
    "a red dog",
    "two dogs and a cat",
    "",
    "blue shoes",
    "Red, red car",
    "a red dog",
    "the red book on a red shelf",
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "milvus_lite", "server", "--data-dir", str(tmp_path / "data")]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = Server(read_address(f"milvus://127.0.0.1:{port}/words"))
    try:
        end = time.monotonic() + 60
        while True:
            try:
                assert found.has(WORDS)
                break
            except Unavailable:
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.1)
        yield found
    finally:
        found.close()
        process.kill()
        process.wait()


def test_words_are_found_by_bm25(server: Server) -> None:
    table = Table(server, "words", "Strong")
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    item_fields(schema, 4, words=True)
    table.create(schema)
    table.make_index("vector", "FLAT", "IP")
    table.make_index("weights", "SPARSE_INVERTED_INDEX", "BM25")
    table.load()
    items = [
        Item(str(n), "text" if n == 5 else "image", text=text, metadata={"n": n})
        for n, text in enumerate(TEXTS)
    ]
    table.write([row(item, np.eye(1, 4)[0], n, 0, words=True)[0] for n, item in enumerate(items)])

    def found(text: str, k: int = 10, kind: str | None = None, filter: str | None = None) -> list[str]:
        tree = None if filter is None else parse_filter(filter)
        hits = best_words(table, text, k, select(kind, tree, ("n",)))  # type: ignore[arg-type]
        assert hits.scores == sorted(hits.scores, reverse=True)
        assert all(score > 0 for score in hits.scores)
        return hits.ids

    assert set(found("red")) == {"0", "4", "5", "6"}
    assert found("red")[0] == "4"  # twice in three words
    assert found("red dog")[:2] == ["0", "5"]  # of equal scores the image, then the text
    assert found("red dog", 1) == ["0"]
    assert found("red", kind="text") == ["5"]
    assert found("shoes") == ["3"]
    assert found("nothing like it") == []
    assert set(found("red", filter="text contains 'shelf' or text contains 'car'")) == {"4", "6"}
