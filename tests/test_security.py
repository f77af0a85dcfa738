"""What a hostile client may try: other files, huge and malformed bodies, bombs, SQL, no token or a wrong one."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from colours import ColourModel, draw, make_index, running
from fastapi.testclient import TestClient
from PIL import Image
from written import icon, one_bit_png

from diptych import addresses
from diptych.errors import AddressError, SettingsError
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item
from diptych.web import uploads
from diptych.web.app import create_app
from diptych.web.bodies import is_loopback
from diptych.web.limits import Limits

TOKEN = "correct-horse"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
SMALL = Limits(body=200_000, pixels=1_000_000, k=50, query=200, filter=200, items=8, text=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index whose root has a secret beside it, a link that leads out, and items that name both."""
    folder = tmp_path_factory.mktemp("security")
    (folder / "secret.png").write_bytes(png(32, 32))
    (folder / "secret.txt").write_text("TOP SECRET")
    model = ColourModel()
    with make_index(folder, model) as index:
        root = folder / "pictures"
        (root / "link.png").symlink_to(folder / "secret.png")
        (root / "text.png").write_text("TOP SECRET")
        (root / "page.png").write_text("<html><script>alert(1)</script></html>")
        (folder / "linked").symlink_to(root)
        names = (
            "../secret.png",
            "../secret.txt",
            str(folder / "secret.png"),
            "link.png",
            "text.png",
            "page.png",
            "red",
        )
        items = [Item(name, path=name, text="escape", collection=0) for name in names]
        index.add(items, np.eye(len(items), model.dim)[:, ::-1])
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with EmbeddedIndex(folder / "index", writable=True) as index:
        app = create_app(index, ColourModel(), token=TOKEN, limits=SMALL)
        with TestClient(app, raise_server_exceptions=False) as client:
            yield client


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[tuple[str, int]]:
    """A real server, for what a test client would tidy up before sending."""
    with (
        EmbeddedIndex(folder / "index") as index,
        running(create_app(index, ColourModel(), token=TOKEN, limits=SMALL)) as url,
    ):
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def send(address: tuple[str, int], data: bytes) -> bytes:
    """The first bytes of the answer to a request sent as it is, also to one that is cut off while it is sent."""
    with socket.create_connection(address, timeout=20) as raw:
        with suppress(ConnectionError):
            raw.sendall(data)
        return raw.recv(2000)


def call(app: Any, method: str, path: str, query: bytes) -> tuple[int, Any]:
    """Status and body of a request that no client would agree to send."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def collect(message: Any) -> None:
        sent.append(message)

    headers = [(name.lower().encode(), value.encode()) for name, value in AUTH.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": headers}
    asyncio.run(app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, collect))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(out, "PNG")
    return out.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def claimed_png(width: int, height: int) -> bytes:
    """A few bytes that claim to be a picture of any size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 10_000)) + chunk(b"IEND", b"")


def refused(answer: Any, *statuses: int) -> str:
    assert answer.status_code in (statuses or (422,)), (answer.status_code, answer.text[:200])
    body = answer.json()
    assert set(body) <= {"error", "position"}
    sentence: str = body["error"]
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence


def alive(client: TestClient) -> None:
    assert client.get("/api/search", params={"text": "red"}).status_code == 200


# ---------------------------------------------------------------------- paths

TRAVERSALS = [
    "../secret.txt", "..\\secret.txt", "/etc/passwd", "file:///etc/passwd", "....//....//etc/passwd",
    "%2e%2e%2fsecret.txt", "..%2fsecret.txt", "..%c0%afsecret.txt", "red/../../secret.txt", "./../secret.png",
    "red/circle.png/../../../secret.txt", "~/.ssh/id_rsa", "\x00../secret.txt", "red/circle.png\x00.jpg",
    "C:\\Windows\\win.ini", "//etc/passwd", "/proc/self/environ", "..", ".", "",
]  # fmt: skip


@pytest.mark.parametrize("path", ["/api/thumbnail", "/api/image"])
@pytest.mark.parametrize("id", TRAVERSALS)
def test_an_id_is_never_a_path(client: TestClient, path: str, id: str) -> None:
    sentence = refused(client.get(path, params={"id": id}), 404, 422)
    assert "SECRET" not in sentence


@pytest.mark.parametrize("id", TRAVERSALS)
def test_ids_elsewhere_are_only_looked_up(client: TestClient, id: str) -> None:
    before = client.get("/api/health").json()
    found = client.get("/api/items", params={"id": id})
    if "\x00" in id:
        refused(found)
    else:
        assert found.json() == [None] or found.json()[0]["id"] == id  # some of them were indexed: as names
    refused(client.get("/api/search", params={"like": id + "x"}))
    gone = client.delete("/api/items", params={"id": id + "x"}, headers=AUTH)
    assert gone.status_code == 422 or gone.json() == {"deleted": 0}
    assert client.get("/api/health").json() == before


def test_indexed_items_that_point_outside_are_not_served(client: TestClient, folder: Path) -> None:
    for path in ("/api/thumbnail", "/api/image"):
        for id in ("../secret.png", "../secret.txt", str(folder / "secret.png"), "link.png", "red"):
            refused(client.get(path, params={"id": id}), 404)
        for id in ("text.png", "page.png"):  # inside, but no pictures: never sent as what they are
            answer = client.get(path, params={"id": id})
            assert "TOP SECRET" not in answer.text
            assert "<script>" not in answer.text
            refused(answer)
    assert client.get("/api/image", params={"id": "red/circle.png"}).status_code == 200


def test_roots_narrow_what_is_served(folder: Path, tmp_path: Path) -> None:
    with EmbeddedIndex(folder / "index") as index:
        for roots, status in (
            ([tmp_path], 404),
            ([folder / "linked"], 200),
            ([tmp_path, folder], 200),
            ([], 404),
        ):
            with TestClient(create_app(index, ColourModel(), roots=roots)) as client:
                assert client.get("/api/thumbnail", params={"id": "red/circle.png"}).status_code == status


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/app.py",
        "/auth.py",
        "/static/../app.py",
        "//etc/passwd",
        "/style.css/..",
    ],
)
def test_only_the_pages_own_files_are_served(address: tuple[str, int], path: str) -> None:
    answer = send(address, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404")


def test_a_query_names_no_file_of_the_server(client: TestClient, folder: Path) -> None:
    for query in (
        str(folder / "secret.png"),
        f'"{folder / "secret.png"}"',
        "./pyproject.toml",
        f"red + {folder}/secret.png",
    ):
        answer = client.get("/api/search", params={"query": query[:200]})
        assert answer.status_code == 200  # words like any other


# ---------------------------------------------------------------------- addresses


def test_images_are_not_fetched_by_address(client: TestClient) -> None:
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.settimeout(0.2)
        address = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        for query in (address, f'"{address}"', f'"red" + "{address}"', address.upper()):
            assert "not fetched" in refused(client.get("/api/search", params={"query": query}))
        with pytest.raises(TimeoutError):
            trap.accept()


def test_an_allowed_address_must_be_public(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        EmbeddedIndex(folder / "index") as index,
        TestClient(create_app(index, ColourModel(), allow_urls=True)) as client,
    ):
        for host in (
            "127.0.0.1",
            "localhost",
            "10.0.0.1",
            "169.254.169.254",
            "[::1]",
            "192.168.1.1",
            "0.0.0.0",
        ):
            answer = client.get("/api/search", params={"query": f"http://{host}/latest/meta-data"})
            assert "public internet" in refused(answer, 400)
        monkeypatch.setattr(uploads, "download", lambda address, limit, until: png(20, 20))
        found = client.get("/api/search", params={"query": "https://example.org/a.png", "k": 5}).json()[
            "hits"
        ]
        assert {hit["id"].split("/")[0] for hit in found} == {"red"}
        most = Limits().images
        many = " + ".join('"https://example.org/a.png"' for _ in range(most + 1))
        assert f"{most + 1}" in refused(client.get("/api/search", params={"query": many}))
        mixed = client.post(
            "/api/search",
            data={"query": '"https://example.org/a.png"'},
            files=[("images", ("a.png", png(20, 20), "image/png"))] * most,
        )
        assert f"{most + 1}" in refused(mixed)


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nX-Long: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "body"]
)
def test_an_address_that_drips_is_cut_off(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(listening: socket.socket) -> None:
        with listening.accept()[0] as client, suppress(OSError):
            client.sendall(start)
            for _ in range(100):  # ten seconds, if nobody cuts it off
                client.sendall(b"x")
                time.sleep(0.1)

    monkeypatch.setattr(addresses, "find_public", lambda host, port: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        begun = time.monotonic()
        address = f"http://images.example:{listening.getsockname()[1]}/a.png"
        with pytest.raises(AddressError, match=r"\b10\b"):
            addresses.download(address, 10_000, begun + 0.5)
        assert time.monotonic() - begun < 5
        with pytest.raises(AddressError, match=r"\b10\b"):
            addresses.download(address, 10_000, begun + 0.5)  # the next of the same query: at once
        thread.join()


def test_an_address_without_a_host_is_told() -> None:
    with pytest.raises(AddressError, match=r"x\.png"):
        addresses.download("http://name.invalid/x.png", 10, time.monotonic() + 10)


# ---------------------------------------------------------------------- bodies


def upload(client: TestClient, data: bytes, name: str = "a.png") -> Any:
    return client.post("/api/search", files={"images": (name, data, "image/png")})


def test_a_body_beyond_the_limit_is_413(client: TestClient) -> None:
    assert "larger than 200000 bytes" in refused(upload(client, b"x" * 300_000), 413)

    def stream() -> Iterator[bytes]:  # without an announced length
        for _ in range(100):
            yield b"x" * 10_000

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    refused(client.post("/api/search", content=stream(), headers=headers), 413)
    for length in ("99999999999", "-5", "many"):
        assert (
            client.post(
                "/api/search", content=b"x", headers={**headers, "Content-Length": length}
            ).status_code
            == 413
        )
    alive(client)


def test_a_body_that_lies_about_its_length_is_cut_off(address: tuple[str, int]) -> None:
    answer = send(address, b"POST /api/search HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00", b"not an image", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff\xe0" + b"\x00" * 100,
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='/etc/passwd'/></svg>", b"%PDF-1.4",
        b"%!PS-Adobe-3.0 EPSF",
        b"PK\x03\x04" + b"\x00" * 50, claimed_png(100, 100), png(64, 64)[:-30], b"RIFF\xff\xff\xff\xffWEBPVP8 ",
        b"BM" + b"\xff" * 60, b"II*\x00\x08\x00\x00\x00\xff\xff" + b"\xff" * 40,
    ],
    ids=range(15),
)  # fmt: skip
def test_malformed_uploads_are_one_sentence(client: TestClient, data: bytes) -> None:
    assert "uploaded image" in refused(upload(client, data, "evil\r\n<b>.png"))
    alive(client)


def test_decompression_bombs_are_refused_before_they_are_decoded(client: TestClient) -> None:
    for width, height in ((30_000, 30_000), (2**31 - 1, 1), (1_000_000, 1_000_000)):
        sentence = refused(upload(client, claimed_png(width, height)))
        assert "pixels" in sentence or "uploaded image" in sentence
    assert "1,000,000" in refused(upload(client, png(1001, 1000)))
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 50_000_000, 9))  # a bomb in a comment
    bomb = claimed_png(8, 8)
    upload(client, bomb[:33] + text + bomb[33:])
    out = io.BytesIO()
    frames = [Image.new("L", (900, 900), n) for n in range(60)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert upload(client, out.getvalue()).status_code == 200  # the first frame only
    alive(client)


def test_uploads_in_other_formats_are_refused_unread(client: TestClient) -> None:
    """An icon is decoded by Pillow before its size is known, an EPS by a program that it starts."""
    eps = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(eps, "EPS")
    for data, name in ((icon(one_bit_png(12_000)), "a.ico"), (eps.getvalue(), "a.eps")):
        files = {"images": (name, data, "image/png")}
        items = {"items": json.dumps({"id": "a", "image": name})}
        for answer in (
            client.post("/api/search", files=files),
            client.post("/api/items", files=files, data=items, headers=AUTH),
        ):
            sentence = refused(answer)
            assert sentence.startswith(
                f"the uploaded image '{name}' is not an image that can be read: convert it to"
            )
            assert "JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, AVIF" in sentence
    assert client.get("/api/items", params={"id": "a"}).json() == [None]
    alive(client)


# the multipart parser leaves the temporary file of an unfinished part to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_malformed_requests(client: TestClient) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    for content, headers in (
        (b'--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n', form),
        (b"garbage", form),
        (b"--b--", {"Content-Type": "multipart/form-data"}),
        (b'{"text": "red"}', {"Content-Type": "application/json"}),
        (b"\xff" * 100, {"Content-Type": "application/x-www-form-urlencoded"}),
        (b"text=" + b"x" * 5000, {"Content-Type": "application/x-www-form-urlencoded"}),
    ):
        answer = client.post("/api/search", content=content, headers=headers)
        refused(answer, 400, 422)
    many = [("images", (f"{n}.png", png(4, 4), "image/png")) for n in range(5)]
    assert {"5", "4:"} <= set(refused(client.post("/api/search", files=many)).split())
    for weight in ("nan", "inf", "1e300", "0", "x"):
        files = {"images": ("a.png", png(4, 4), "image/png")}
        refused(client.post("/api/search", files=files, data={"image_weight": weight}))
    alive(client)


def test_queries_of_ten_megabytes(client: TestClient, address: tuple[str, int]) -> None:
    huge = "x" * 10_000_000
    for name in ("text", "query", "filter", "like", "k", "kind"):
        status, body = call(client.app, "GET", "/api/search", f"{name}={huge}".encode())
        assert status == 414
        assert "shorten" in body["error"]
        refused(client.post("/api/search", data={name: huge}), 413)
    for path in ("/api/items", "/api/thumbnail", "/api/image", "/api/browse"):
        assert call(client.app, "GET", path, f"id={huge}".encode())[0] == 414
    assert call(client.app, "DELETE", "/api/items", f"id={huge}".encode())[0] == 414
    assert "the limit is 200" in refused(client.get("/api/search", params={"text": "x" * 201}))
    answer = send(address, f"GET /api/search?text={huge} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 ")  # of the HTTP parser, before the service sees it
    url = f"http://{address[0]}:{address[1]}/api/search"
    assert httpx.get(url, params={"text": "red"}).status_code == 200
    alive(client)


def test_limits_on_k_filters_and_items(client: TestClient) -> None:
    for k in ("0", "-1", "51", "999999999999999999999", "1e3", "nan"):
        refused(client.get("/api/search", params={"text": "red", "k": k}))
        refused(client.get("/api/browse", params={"k": k}))
    nested = "(" * 90 + "price < 3" + ")" * 90
    assert "nests deeper" in refused(client.get("/api/search", params={"text": "red", "filter": nested}))
    assert (
        client.get("/api/search", params={"text": "red", "filter": f"price < {'9' * 190}"}).status_code == 200
    )
    many = [{"id": str(n), "text": "a"} for n in range(9)]
    refused(client.post("/api/items", data={"items": json.dumps(many)}, headers=AUTH))
    long = [{"id": "a", "text": "x" * 501}]
    refused(client.post("/api/items", data={"items": json.dumps(long)}, headers=AUTH))
    refused(client.get("/api/items", params={"id": [str(n) for n in range(9)]}))
    refused(client.delete("/api/items", params={"id": [str(n) for n in range(9)]}, headers=AUTH))


# ---------------------------------------------------------------------- SQL

SQL = [
    "'; DROP TABLE items; --", "' OR '1'='1", '" OR ""="', "1; SELECT pg_sleep(10)",
    "red') UNION SELECT * FROM meta --",
    "NEAR(a b)", 'a" OR "b', "text:*", "a AND NOT", "^red", "{s}", "%s %(f0)s", "\\", "`", "%_%", "x'--",
]  # fmt: skip


@pytest.mark.parametrize("evil", SQL)
def test_sql_stays_text(client: TestClient, evil: str) -> None:
    before = client.get("/api/health").json()
    assert client.get("/api/search", params={"text": evil, "hybrid": True}).status_code == 200
    assert client.get("/api/search", params={"query": evil, "hybrid": True}).status_code in (200, 422)
    refused(client.get("/api/search", params={"text": "red", "filter": evil}))
    inside = json.dumps(evil)
    for column in ("text", "shape", "id"):
        for test in ("=", "contains", "like", "<"):
            answer = client.get("/api/search", params={"text": "red", "filter": f"{column} {test} {inside}"})
            assert answer.status_code == 200, answer.text
            if test == "=":
                assert answer.json()["hits"] == []
    refused(client.get("/api/search", params={"text": "red", "filter": f"`{evil.replace('`', '')}` = 1"}))
    refused(client.get("/api/search", params={"like": evil}))
    assert client.delete("/api/items", params={"id": evil}, headers=AUTH).json() == {"deleted": 0}
    assert client.get("/api/health").json() == before


# ---------------------------------------------------------------------- tokens

WRONG = [
    {}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer "},
    {"Authorization": "Bearer wrong"},
    {"Authorization": f"Basic {TOKEN}"}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN}x"},
    {"Authorization": f"Bearer {TOKEN[:-1]}"}, {"Authorization": f"Bearer {TOKEN.upper()}"}, {"X-Token": TOKEN},
    {"Cookie": f"token={TOKEN}"}, {"Authorization": "Bearer " + "x" * 5000},
]  # fmt: skip


@pytest.mark.parametrize("headers", WRONG, ids=range(len(WRONG)))
def test_changes_need_the_token(client: TestClient, headers: dict[str, str]) -> None:
    data = {"items": json.dumps({"id": "x", "text": "red"})}
    for answer in (
        client.post("/api/items", data=data, headers=headers),
        client.delete("/api/items", params={"id": "red/circle.png"}, headers=headers),
        client.put("/api/items", headers=headers),
        client.post(f"/api/items?token={TOKEN}", data=data, headers=headers),
    ):
        assert "token" in refused(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/api/items", params={"id": ["x", "red/circle.png"]}).json()[0] is None
    assert client.get("/api/items", params={"id": "red/circle.png"}).json()[0]


def test_without_a_token_nothing_changes(folder: Path) -> None:
    with EmbeddedIndex(folder / "index") as index, TestClient(create_app(index, ColourModel())) as client:
        for headers in ({}, AUTH, {"Authorization": "Bearer "}):
            assert "takes no changes" in refused(
                client.delete("/api/items", params={"id": "a"}, headers=headers), 403
            )


def test_beyond_loopback_everything_needs_the_token(folder: Path) -> None:
    with EmbeddedIndex(folder / "index") as index:
        with pytest.raises(SettingsError, match="token"):
            create_app(index, ColourModel(), private=True).build_middleware_stack()
        with TestClient(create_app(index, ColourModel(), token=TOKEN, private=True)) as client:
            paths = [
                *client.get("/openapi.json", headers=AUTH).json()["paths"],
                "/openapi.json",
                "/nothing",
                "/api/../metrics",
            ]
            assert len(paths) > 8
            for path in paths:
                for headers in WRONG:
                    for method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS"):
                        assert client.request(method, path, headers=headers).status_code == 401, (
                            method,
                            path,
                        )
            assert client.get("/api/search", params={"text": "red"}, headers=AUTH).status_code == 200
            for path in ("/", "/docs", "/app.js", "/style.css", "/icon.svg"):  # the page that asks for it
                assert client.get(path).status_code == 200


def test_tokens_are_compared_in_constant_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    seen: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    with (
        EmbeddedIndex(folder / "index") as index,
        TestClient(create_app(index, ColourModel(), token=TOKEN)) as client,
    ):
        for token in ("a", TOKEN, "x" * 1000):
            client.delete(
                "/api/items", params={"id": "nothing"}, headers={"Authorization": f"Bearer {token}"}
            )
    assert seen == [(32, 32)] * 3


# ---------------------------------------------------------------------- browsers


def test_security_headers_are_on_every_answer(client: TestClient) -> None:
    for path in (
        "/",
        "/api/health",
        "/api/search?text=red",
        "/nothing",
        "/api/search?k=0",
        "/api/thumbnail?id=red/circle.png",
    ):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
    assert client.get("/api/search?text=red").headers["cache-control"] == "no-store"


def test_cors_is_off_unless_a_site_is_named(client: TestClient, folder: Path) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client.options("/api/search", headers=asked).headers
    with EmbeddedIndex(folder / "index") as index:
        app = create_app(index, ColourModel(), origins=["https://good.example"])
        with TestClient(app) as named:
            good = {**asked, "Origin": "https://good.example"}
            answer = named.options("/api/search", headers=good)
            assert answer.headers["access-control-allow-origin"] == "https://good.example"
            assert "access-control-allow-origin" not in named.options("/api/search", headers=asked).headers


FOREIGN = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"},  # another service of the same machine
    {"Origin": "https://evil.example"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://localhost:80000"},
    {"Origin": "http://127.0.0.2:8000"},  # the address it is bound to, of another name than it is asked by
    {"Origin": "http://[::1"},
    {"Origin": "http://localhost.evil.example:8000"},
    {"Origin": "null"},
]
OWN = [
    {},
    {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:8000"},
    {
        "Sec-Fetch-Site": "same-origin",
        "Origin": "https://photos.example",
    },  # behind a proxy, with its own host
    {"Sec-Fetch-Site": "none"},
    {"Origin": "http://localhost:8000"},
    {"Origin": "https://photos.example"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "https://good.example"},
]


def test_pages_of_other_sites_send_nothing(folder: Path) -> None:
    hosts = ("localhost", "127.0.0.1", "[::1]", "127.0.0.2", "photos.example")
    picture = {"images": ("a.png", png(20, 20), "image/png")}
    with EmbeddedIndex(folder / "index") as index:
        app = create_app(index, ColourModel(), token=TOKEN, hosts=hosts, origins=["https://good.example"])
        with TestClient(app, base_url="http://localhost:8000") as client:
            for headers in FOREIGN:
                for answer in (
                    client.post("/api/search", files=picture, headers=headers),
                    client.post("/api/items", data={"items": "[]"}, headers={**headers, **AUTH}),
                    client.delete("/api/items", params={"id": "nothing"}, headers={**headers, **AUTH}),
                    client.put("/api/items", headers={**headers, **AUTH}),
                ):
                    assert refused(answer, 403), headers
                asked = client.get("/api/search", params={"text": "red"}, headers=headers)
                assert asked.status_code == 200  # which that page cannot read
            for headers in OWN:
                answer = client.post("/api/search", files=picture, headers=headers)
                assert answer.status_code == 200, (headers, answer.text)


def test_foreign_host_names_are_refused(folder: Path) -> None:
    with EmbeddedIndex(folder / "index") as index:
        app = create_app(index, ColourModel(), hosts=("localhost", "127.0.0.1", "[::1]", "Photos.Example"))
        with TestClient(app) as client:
            for host in (
                "localhost",
                "localhost:8000",
                "127.0.0.1:1",
                "[::1]:8000",
                "LOCALHOST",
                "photos.example",
                "Photos.Example:80",
            ):
                assert client.get("/api/health", headers={"Host": host}).status_code == 200, host
            for host in (
                "evil.example",
                "localhost.evil.example",
                "127.0.0.1.evil.example:8000",
                "",
                "localhost@evil",
            ):
                assert client.get("/api/health", headers={"Host": host}).status_code == 421, host
                assert client.get("/", headers={"Host": host}).status_code == 421


def test_loopback_is_told_from_the_rest() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"))
    assert not any(
        is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "127.0.0.1.nip.io")
    )


def test_uploads_are_not_kept(client: TestClient, folder: Path) -> None:
    before = {path for path in folder.rglob("*") if path.is_file()}
    out = io.BytesIO()
    draw("teal", "ring").save(out, "PNG")
    assert upload(client, out.getvalue(), "../../../escape.png").status_code == 200
    assert {path for path in folder.rglob("*") if path.is_file()} - before == set()
    assert not (folder.parent / "escape.png").exists()
