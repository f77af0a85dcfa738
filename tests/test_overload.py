"""What many or hostile clients may not do to the others: memory, threads, connections, metadata, shutting down."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
import pytest
from colours import ColourModel, draw, make_index, running
from fastapi.testclient import TestClient

from diptych.addresses import is_public
from diptych.data.decode.processes import Decoders
from diptych.errors import DataError
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item
from diptych.web import bodies, connections
from diptych.web.app import create_app
from diptych.web.limits import Limits

TOKEN = "correct-horse"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def index(tmp_path: Path) -> Iterator[EmbeddedIndex]:
    with make_index(tmp_path, ColourModel()) as index:
        yield index


@pytest.fixture
def client(index: EmbeddedIndex) -> Iterator[TestClient]:
    with TestClient(create_app(index, ColourModel(), token=TOKEN)) as client:
        yield client


def png() -> bytes:
    out = io.BytesIO()
    draw("red", "circle").save(out, "PNG")
    return out.getvalue()


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------- uploads


def test_searches_and_health_do_not_queue_behind_uploads(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    opened = Decoders.open

    def slow(self: Decoders, source: Any, **rest: Any) -> Any:
        over.wait(20)
        return opened(self, source, **rest)

    monkeypatch.setattr(Decoders, "open", slow)
    app = create_app(index, ColourModel(), limits=Limits(seconds=30))
    with running(app) as url, httpx.Client(base_url=url, timeout=30) as one, ThreadPoolExecutor(60) as pool:
        files = {"images": ("a.png", png(), "image/png")}
        waiting = [pool.submit(httpx.post, f"{url}/api/search", files=files, timeout=60) for _ in range(60)]
        time.sleep(1)
        start = time.monotonic()
        for path in ("/api/health", "/metrics", "/api/search?text=red", "/api/about", "/api/browse"):
            assert one.get(path).status_code == 200, path
        assert time.monotonic() - start < 5
        over.set()
        statuses = [answer.result().status_code for answer in waiting]
    assert set(statuses) == {200, 503}  # four are decoded, 32 wait, the rest is told to come back
    assert statuses.count(200) == 36


def test_bodies_have_a_limit_together(index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "AT_ONCE", 2)
    monkeypatch.setattr(bodies, "TURN", 0.3)
    limits = Limits(body=1_000_000)
    with running(create_app(index, ColourModel(), limits=limits)) as url, ExitStack() as stack:
        place = urlsplit(url)
        head = "POST /api/search HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        for _ in range(2):  # announced, never sent
            sock = stack.enter_context(socket.create_connection((place.hostname, place.port)))
            sock.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode())
        time.sleep(0.2)
        files = {"images": ("a.png", png() + bytes(900_000), "image/png")}
        answer = httpx.post(f"{url}/api/search", files=files)
        assert answer.status_code == 503
        assert "too many uploads" in answer.json()["error"]
        small = {"images": ("a.png", png(), "image/png")}
        assert httpx.post(f"{url}/api/search", files=small).status_code == 200


def test_a_body_that_drips_is_given_up(index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PATIENCE", 0.5)
    with running(create_app(index, ColourModel())) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as sock:
            head = (
                "POST /api/search HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"
            )
            sock.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode())
            for _ in range(8):
                sock.sendall(b"t")
                time.sleep(0.1)
            assert b" 408 " in sock.recv(1000)


def test_a_form_of_percent_signs_does_not_stop_the_service(client: TestClient) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    start = time.monotonic()
    answer = client.post("/api/search", content=b"text=" + b"%41" * 5_000_000, headers=kind)
    assert answer.status_code == 413
    assert time.monotonic() - start < 2


def test_a_file_of_any_size_is_sent_in_pieces(index: EmbeddedIndex, tmp_path: Path) -> None:
    large = tmp_path / "pictures" / "large.png"
    with large.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(3_000_000_000)
    item = Item("large", path="large.png", text="large", collection=0)
    index.add([item], np.eye(1, ColourModel.dim))
    with running(create_app(index, ColourModel())) as url:
        place = urlsplit(url)
        before = memory()
        with socket.create_connection((place.hostname, place.port)) as sock:
            sock.sendall(b"GET /api/image?id=large HTTP/1.1\r\nHost: x\r\n\r\n")
            seen = b""
            while len(seen) < 5_000_000:
                seen += sock.recv(1 << 20)
            assert b"content-length: 3000000000" in seen[:1000]
            assert memory() - before < 100_000_000  # while the rest is still to be sent
        answer = httpx.get(f"{url}/api/thumbnail", params={"id": "large"}, timeout=30)
        assert answer.status_code == 422  # no picture, and not read whole to find out
        assert memory() - before < 100_000_000


# ---------------------------------------------------------------------- connections


def test_silent_connections_shut_nobody_out(index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 8)
    monkeypatch.setattr(connections, "SILENCE", 1.0)
    with running(create_app(index, ColourModel())) as url, ExitStack() as stack:
        place = urlsplit(url)
        silent = [
            stack.enter_context(socket.create_connection((place.hostname, place.port))) for _ in range(30)
        ]
        for _ in range(3):
            assert httpx.get(f"{url}/api/health").status_code == 200
        dripping = stack.enter_context(socket.create_connection((place.hostname, place.port)))
        dripping.settimeout(5)
        until = time.monotonic() + 4
        closed = b"x"
        while time.monotonic() < until:
            try:
                dripping.sendall(b"G")
                time.sleep(0.2)
            except OSError:
                closed = b""
                break
        assert closed == b""  # a head must come whole within a second
        for sock in silent:
            sock.settimeout(5)
            with suppress(ConnectionError):
                assert sock.recv(1) == b""
        with httpx.Client(base_url=url) as kept:  # an ordinary client keeps its connection
            assert kept.get("/api/health").status_code == 200
            time.sleep(0.5)
            assert kept.get("/api/health").status_code == 200


@pytest.fixture
def large(index: EmbeddedIndex, tmp_path: Path) -> None:
    """An item whose file is more than the buffers of a connection hold."""
    with (tmp_path / "pictures" / "large.png").open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(200_000_000)
    index.add([Item("large", path="large.png", text="large", collection=0)], np.eye(1, ColourModel.dim))


@pytest.mark.usefixtures("large")
def test_clients_that_read_slowly_shut_nobody_out(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few hundred held all the places of requests, for as long as they took a little now and then."""
    monkeypatch.setattr(connections, "SLOW", 2)
    monkeypatch.setattr(bodies, "REQUESTS", 4)
    with running(create_app(index, ColourModel())) as url, ExitStack() as stack:
        place = urlsplit(url)
        slow = []
        for _ in range(5):
            slow.append(
                stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=5))
            )
            slow[-1].sendall(b"GET /api/image?id=large HTTP/1.1\r\nHost: x\r\n\r\n")
            assert slow[-1].recv(12) == b"HTTP/1.1 200"
            time.sleep(0.2)
        assert httpx.get(f"{url}/api/search?text=red").status_code == 200
        for sock in slow[:3]:  # the first to begin
            total = 0
            with suppress(ConnectionError):
                while piece := sock.recv(1 << 20):
                    total += len(piece)
            assert total < 150_000_000


@pytest.mark.usefixtures("large")
def test_a_client_that_does_not_listen_is_cut_off(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "DEAFNESS", 0.5)
    with running(create_app(index, ColourModel())) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as sock:
            sock.sendall(b"GET /api/image?id=large HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(2)
            total = 0
            try:
                while piece := sock.recv(1 << 20):
                    total += len(piece)
            except ConnectionError:
                pass
            assert total < 150_000_000
        assert httpx.get(f"{url}/api/health").status_code == 200


def test_a_signal_ends_the_service_while_a_filter_runs(tmp_path: Path) -> None:
    make_index(tmp_path, ColourModel()).close()
    code = """
import sys, time
sys.path[:0] = {path!r}
from colours import ColourModel
from diptych.index.query import filters
from diptych.web import serve
filters.like_test, serve.GRACE = lambda pattern: lambda value: time.sleep(0.1) or True, 1
serve.serve({place!r}, ColourModel(), port=0)
""".format(path=[str(Path(__file__).parent)], place=str(tmp_path / "index"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        url = re.search(r"http://[\d.:]+", service.stdout.readline()).group()  # type: ignore[union-attr]
        with ThreadPoolExecutor(4) as pool:
            ask = {"text": "red", "filter": 'id like "%a%" or text like "%b%"'}
            for _ in range(4):
                pool.submit(httpx.get, f"{url}/api/search", params=ask, timeout=60)
            time.sleep(1.5)
            service.send_signal(signal.SIGTERM)
            start = time.monotonic()
            assert service.wait(60) == 0
            assert time.monotonic() - start < 8


# ---------------------------------------------------------------------- metadata


def add(client: TestClient, metadata: Any) -> Any:
    items = json.dumps([{"id": "a", "text": "b", "metadata": metadata}])
    return client.post("/api/items", data={"items": items}, headers=AUTH, files={"x": b""})


def test_metadata_has_limits(client: TestClient, index: EmbeddedIndex) -> None:
    assert "101 columns" in add(client, {f"c{n}": 1 for n in range(101)}).json()["error"]
    assert "20000" in add(client, {"c": "x" * 20_001}).json()["error"]
    assert "20000" in add(client, {"c": ["x" * 100] * 300}).json()["error"]
    for depth in (2, 600, 900):
        nested: Any = 1
        for _ in range(depth):
            nested = [nested]
        answer = add(client, {"c": nested})
        assert answer.status_code == 422, depth
        assert "metadata" in answer.json()["error"]
        row = {"id": "a", "text": nested}
        answer = client.post("/api/items", data={"items": json.dumps([row])}, headers=AUTH)
        assert "must be a text" in answer.json()["error"]
    assert add(client, {f"c{n}": n for n in range(100)}).status_code == 200


def test_an_index_has_a_limit_of_columns(index: EmbeddedIndex, client: TestClient) -> None:
    items = [Item(f"i{n}", metadata={f"{n} {m}": "x" for m in range(100)}) for n in range(19)]
    index.add(items, np.ones((19, ColourModel.dim)))
    start = time.monotonic()
    about = client.get("/api/about").json()
    assert time.monotonic() - start < 8
    assert len(about["values"]) <= 100
    more = Item("more", metadata={f"more {m}": "x" for m in range(200)})
    with pytest.raises(DataError, match="2000"):
        index.add([more], np.ones((1, ColourModel.dim)))
    assert index.get(["more"]) == [None]


# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1",
        "239.255.255.250", "240.0.0.1", "255.255.255.255", "0.0.0.0", "::1", "::", "fe80::1", "fe80::1%eth0",
        "fc00::1", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1",
        "::8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::8.8.8.8", "2002:7f00:1::",
        "2002:a00:1::1", "2001:0:7f00:1::", "2001:db8::5efe:7f00:1", "2606:4700::5efe:a00:1", "nonsense", "",
    ],
)  # fmt: skip
def test_what_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"],
)
def test_what_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "http://[", "http://[::1", "http://", "https://:80/", "http://a b/", "http://host:99999/", "http://host:x/",
        "http://user@8.8.8.8/", "http://ex%ample.org\x00/", "http://xn--\u00fc.org/", f"http://{'a' * 300}.org/",
    ],
)  # fmt: skip
def test_a_malformed_address_is_a_400(index: EmbeddedIndex, address: str) -> None:
    with TestClient(create_app(index, ColourModel(), allow_urls=True)) as client:
        answer = client.get("/api/search", params={"query": f'"{address}"'})
        assert answer.status_code in (400, 422), answer.text
        assert answer.status_code == 400 or "\x00" in address
        assert answer.json()["error"]
