"""The wire: requests that cost the event loop more than their bytes tell, and what they may cost other clients."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from colours import ColourModel, draw, make_index, running

from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.web.app import create_app

TOKEN = "correct-horse"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
CHUNKED = "Content-Type: multipart/form-data; boundary=b\r\nTransfer-Encoding: chunked\r\n"
TOKEN_LINE = f"Authorization: Bearer {TOKEN}\r\n"
FIELD = b'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\n'


@pytest.fixture
def index(tmp_path: Path) -> Iterator[EmbeddedIndex]:
    with make_index(tmp_path, ColourModel()) as index:
        yield index


def connected(url: str, headers: str) -> socket.socket:
    """A connection on which the head of an upload was sent."""
    place = urlsplit(url)
    sock = socket.create_connection((place.hostname, place.port), timeout=10)
    sock.sendall(f"POST /api/search HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
    return sock


def chunks(data: bytes, size: int) -> bytes:
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def until_closed(sock: socket.socket) -> tuple[bytes, str]:
    """The first line of an answer and its error, once the service has closed the connection."""
    answer = b""
    while piece := sock.recv(65_536):
        answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)["error"]


@pytest.mark.parametrize("headers", [CHUNKED, CHUNKED + TOKEN_LINE], ids=["401", "read"])
def test_bodies_of_tiny_chunks_delay_nobody(index: EmbeddedIndex, headers: str) -> None:
    over = threading.Event()
    data = chunks(b"x" * 20_000, 1)

    def attack(url: str) -> None:
        with suppress(OSError), connected(url, headers) as sock:
            sock.sendall(chunks(FIELD, 1000))
            for _ in range(1000):
                sock.sendall(data)
                if over.wait(0.01):
                    break

    app = create_app(index, ColourModel(), token=TOKEN, private=True)
    with running(app) as url, httpx.Client(base_url=url, timeout=60, headers=AUTH) as bystander:
        assert bystander.get("/api/search?text=red").status_code == 200
        with ThreadPoolExecutor(16) as pool:
            for _ in range(16):
                pool.submit(attack, url)
            try:
                time.sleep(0.2)
                for path in ("/api/health", "/api/search?text=red") * 5:
                    start = time.monotonic()
                    assert bystander.get(path).status_code == 200
                    assert time.monotonic() - start < 1, path
            finally:
                over.set()


def test_a_body_of_too_many_small_chunks_is_refused(index: EmbeddedIndex) -> None:
    with running(create_app(index, ColourModel())) as url, connected(url, CHUNKED) as sock:
        sock.sendall(chunks(FIELD, 1000) + chunks(b"x" * 12_000, 1))
        line, error = until_closed(sock)
        assert line.startswith(b"HTTP/1.1 413 ")
        assert error == "the body has more than 10000 chunks of less than 1000 bytes: send larger ones."
        assert httpx.get(f"{url}/api/health").status_code == 200


@pytest.mark.parametrize("size", [100, 1000, 16_384, 1_000_000])
def test_ordinary_chunks_are_read(index: EmbeddedIndex, size: int) -> None:
    out = io.BytesIO()
    draw("red", "circle").save(out, "PNG")
    picture = out.getvalue() + bytes(500_000)  # of small chunks, more than a turn parses
    part = (
        b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n%b\r\n--b--\r\n'
        % picture
    )
    pieces = [part[start : start + size] for start in range(0, len(part), size)]
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    with running(create_app(index, ColourModel())) as url, httpx.Client(base_url=url) as kept:
        for _ in range(2):
            answer = kept.post("/api/search", content=iter(pieces), headers=kind)
            assert answer.status_code == 200, answer.text
            assert answer.json()["hits"][0]["id"] == "red/circle.png"


def test_a_refused_body_is_not_parsed(index: EmbeddedIndex) -> None:
    app = create_app(index, ColourModel(), token=TOKEN, private=True)
    with running(app) as url, connected(url, CHUNKED) as sock:
        time.sleep(0.3)
        sock.sendall(b"nonsense" * 500_000)  # that is no chunk; the answer waits until all is sent
        line, error = until_closed(sock)
        assert line.startswith(b"HTTP/1.1 401 ")
        assert "this needs a token" in error


def test_a_head_of_many_headers_is_refused(index: EmbeddedIndex) -> None:
    with running(create_app(index, ColourModel())) as url, connected(url, "a: b\r\n" * 10_000) as sock:
        line, error = until_closed(sock)
        assert line.startswith(b"HTTP/1.1 400 ")
        assert error == "the request has more than 200 headers: send fewer."
