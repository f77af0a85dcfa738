"""The wire: requests that cost the event loop more than their bytes tell, and what they may cost other clients."""

from __future__ import annotations

import gc
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

import h11
import httpx2 as httpx
import pytest
from colours import ColourModel, draw, make_index, running

from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.web.app import create_app
from diptych.web.connections import _Parser

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


TRAILERS = chunks(FIELD, 1000) + b"0\r\n" + b"a: b\r\n" * 10_000 + b"\r\n"


@pytest.mark.parametrize(
    ("headers", "body"), [("a: b\r\n" * 10_000, b""), (CHUNKED, TRAILERS)], ids=["head", "trailers"]
)
def test_many_headers_are_refused(index: EmbeddedIndex, headers: str, body: bytes) -> None:
    """As every refusal, it has the security headers, and is counted."""
    with running(create_app(index, ColourModel())) as url, connected(url, headers) as sock:
        sock.sendall(body)
        answer = b"".join(iter(lambda: sock.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"].startswith(
            "the request has more than 100"
        )
        assert b"content-security-policy: default-src 'none'" in answer.lower()
        assert 'path="other",status="400"} 1' in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("size", [15_000, 100_000])
def test_lines_are_counted_before_they_are_read(size: int) -> None:
    """And before they are divided, which takes most of h11's time."""
    parser = _Parser(None)
    parser.receive_data(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * size + b"\r\n")
    start = time.process_time()
    with pytest.raises(h11.RemoteProtocolError):
        parser.next_event()
    assert time.process_time() - start < 0.005


def test_what_is_not_parsed_is_freed_with_the_answer(index: EmbeddedIndex) -> None:
    app = create_app(index, ColourModel(), token=TOKEN, private=True)
    with running(app) as url, connected(url, CHUNKED) as sock:
        sock.sendall(chunks(b"x" * 20_000, 1))
        assert until_closed(sock)[0].startswith(b"HTTP/1.1 401 ")
        gc.collect()
        parsers = [one for one in gc.get_objects() if type(one) is _Parser]
        assert all(not one.trailing_data[0] for one in parsers)


def test_parts_arguments_and_ranges_have_limits(index: EmbeddedIndex) -> None:
    part = FIELD + b"x\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    with running(create_app(index, ColourModel())) as url, httpx.Client(base_url=url) as client:
        assert client.post("/api/search", content=part * 40 + b"--b--", headers=kind).status_code == 400
        assert client.get("/api/search?" + "a&" * 400).status_code == 414
        few, many = ({"Range": f"bytes={','.join(['0-0'] * count)}"} for count in (2, 9))
        assert client.get("/api/image?id=red/circle.png", headers=few).status_code == 206
        assert client.get("/api/image?id=red/circle.png", headers=many).status_code == 416


@pytest.mark.parametrize("charset", ["idna", "punycode", "utf-16", "undefined"])
def test_a_form_in_another_charset_is_refused(index: EmbeddedIndex, charset: str) -> None:
    """Python's codec ``idna`` took 15 s for a megabyte, on the event loop."""
    body = FIELD + b"xn--" + b"a" * 200_000 + b"\r\n--b--"
    kind = {"Content-Type": f"multipart/form-data; boundary=b; Charset={charset}"}
    with running(create_app(index, ColourModel())) as url:
        begun = time.monotonic()
        answer = httpx.post(f"{url}/api/search", content=body, headers=kind)
        assert (answer.status_code, charset in answer.json()["error"]) == (400, True)
        assert time.monotonic() - begun < 0.5
        kind = {"Content-Type": "multipart/form-data; boundary=b; charset=UTF-8"}
        answer = httpx.post(f"{url}/api/search", content=FIELD + b"red\r\n--b--", headers=kind)
        assert answer.status_code == 200
