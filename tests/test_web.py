"""The HTTP API: searches, items, pictures, batching, and every mistake as one sentence."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from colours import COLOURS, SHAPES, ColourModel, draw, fill, make_index, running
from fastapi.testclient import TestClient
from servers import postgres

from diptych.errors import IndexFault, SettingsError, Unavailable
from diptych.index.base import Index
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.opening import open_index
from diptych.index.engines.postgres.index import PostgresIndex
from diptych.index.protocol import Item
from diptych.index.query.search import Searcher
from diptych.web import service
from diptych.web.app import create_app
from diptych.web.batching import Batcher, Traffic
from diptych.web.limits import Limits
from diptych.web.serve import serve
from diptych.web.uploads import Pictures

TOKEN = "correct-horse"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web")
    make_index(folder, ColourModel()).close()
    return folder


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with EmbeddedIndex(folder / "index") as index, TestClient(app_of(index)) as client:
        yield client


def app_of(index: EmbeddedIndex) -> Any:
    """The service with a cut-off set by hand: five pictures answer each caption, so captions cannot calibrate it."""
    return create_app(index, ColourModel(), chance=0.2)


@pytest.fixture
def writable(tmp_path: Path) -> Iterator[TestClient]:
    with (
        make_index(tmp_path, ColourModel()) as index,
        TestClient(create_app(index, ColourModel(), token=TOKEN)) as c,
    ):
        yield c


def png(colour: str, shape: str = "circle") -> bytes:
    out = io.BytesIO()
    draw(colour, shape).save(out, "PNG")
    return out.getvalue()


def ids(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [hit["id"] for hit in answer.json()["hits"]]


def colour_of(id: str) -> str:
    return id.split("/")[0]


# ---------------------------------------------------------------------- searching


def test_a_text_finds_its_images(client: TestClient) -> None:
    answer = client.get("/api/search", params={"text": "something teal", "k": 5})
    assert {colour_of(id) for id in ids(answer)} == {"teal"}
    body = answer.json()
    scores = [hit["score"] for hit in body["hits"]]
    assert scores == sorted(scores, reverse=True)
    assert body["matched"]
    assert body["exact"]
    assert all(hit["matches"] == (hit["score"] >= body["cutoff"]) for hit in body["hits"])
    assert body["hits"][0]["metadata"]["tone"] == "cool"


def test_the_service_answers_what_the_searcher_answers(client: TestClient, folder: Path) -> None:
    with EmbeddedIndex(folder / "index") as index:
        searcher = Searcher(index, ColourModel())
        for query in ('"2:red" - "blue"', "green circle", '"black" + "3:beige"'):
            for kind in ("image", "text"):
                expected = searcher.search(query, 7, kind=kind, chance=0.2)
                answer = client.get("/api/search", params={"query": query, "k": 7, "kind": kind}).json()
                assert [hit["id"] for hit in answer["hits"]] == expected.ids
                assert [hit["score"] for hit in answer["hits"]] == expected.scores
                assert answer["cutoff"] == expected.cutoff


def test_nothing_matches_is_said(client: TestClient) -> None:
    body = client.get("/api/search", params={"text": "submarine"}).json()
    assert not body["matched"]
    assert not any(hit["matches"] for hit in body["hits"])
    assert len(body["hits"]) == 24


def test_an_uploaded_image_finds_its_like_and_its_texts(client: TestClient) -> None:
    files = {"images": ("q.png", png("purple"), "image/png")}
    assert {colour_of(id) for id in ids(client.post("/api/search", files=files, data={"k": 5}))} == {"purple"}
    texts = client.post("/api/search", files=files, data={"k": 5, "kind": "text"}).json()["hits"]
    assert all("purple" in hit["text"] for hit in texts)
    assert texts[0]["kind"] == "text"
    assert texts[0]["image_id"]


def test_text_and_image_are_mixed_with_weights(client: TestClient) -> None:
    files = {"images": ("q.png", png("purple"), "image/png")}
    mixed = ids(client.post("/api/search", files=files, data={"text": "yellow", "k": 10}))
    assert {colour_of(id) for id in mixed} == {"purple", "yellow"}
    heavy = ids(client.post("/api/search", files=files, data={"text": "yellow", "k": 5, "image_weight": 4}))
    assert {colour_of(id) for id in heavy} == {"purple"}
    away = ids(
        client.post("/api/search", files=files, data={"text": "purple yellow", "k": 5, "image_weight": -1})
    )
    assert {colour_of(id) for id in away} == {"yellow"}
    several = [("images", (f"{c}.png", png(c), "image/png")) for c in ("red", "blue")]
    assert {colour_of(id) for id in ids(client.post("/api/search", files=several, data={"k": 10}))} == {
        "red",
        "blue",
    }


def test_more_like_this_leaves_the_item_out(client: TestClient) -> None:
    found = ids(client.get("/api/search", params={"like": "green/ring.png", "k": 4}))
    assert sorted(found) == sorted(f"green/{shape}.png" for shape in SHAPES if shape != "ring")
    mixed = ids(client.get("/api/search", params={"like": "green/ring.png", "text": "red", "k": 9}))
    assert {colour_of(id) for id in mixed} == {"green", "red"}
    texts = client.get("/api/search", params={"like": "green/ring.png", "kind": "text", "k": 5}).json()[
        "hits"
    ]
    assert all("green" in hit["text"] for hit in texts)
    nearest = client.get("/api/search", params={"like": "green/ring.png", "k": 50}).json()
    assert (nearest["cutoff"], nearest["strength"], nearest["matched"]) == (None, None, None)
    assert all(hit["matches"] is None for hit in nearest["hits"])  # as on the command line: no cut-off
    with_words = client.get("/api/search", params={"like": "green/ring.png", "text": "red", "k": 50}).json()
    assert with_words["cutoff"] is not None
    gone = client.get("/api/search", params={"like": "nothing"})
    assert gone.status_code == 422
    assert "nothing" in gone.json()["error"]


def test_filters_kinds_and_words(client: TestClient) -> None:
    found = ids(
        client.get(
            "/api/search", params={"text": "red", "filter": 'shape = "ring" and tone = "warm"', "k": 20}
        )
    )
    assert len(found) == 6
    assert all(id.endswith("ring.png") for id in found)
    assert found[0] == "red/ring.png"
    both = client.get("/api/search", params={"text": "red", "kind": "any", "k": 10}).json()["hits"]
    assert {hit["kind"] for hit in both} == {"image", "text"}
    words = client.get("/api/search", params={"text": "triangle", "hybrid": True, "k": 10}).json()["hits"]
    assert any("bm25" in hit["details"] for hit in words)
    assert sum(hit["id"].endswith("triangle.png") for hit in words) >= 5


def test_a_model_with_a_pair_scorer_orders_the_best_anew(folder: Path, client: TestClient) -> None:
    class Pairs(ColourModel):
        def pair_scorer(self, query: Any, items: Any, files: Any) -> list[float]:
            assert all(file.is_file() for file in files)
            return [float("ring" in item.text) for item in items]

    assert not client.get("/api/about").json()["rerank"]
    with EmbeddedIndex(folder / "index") as index, TestClient(create_app(index, Pairs())) as paired:
        assert paired.get("/api/about").json()["rerank"]
        asked = {"text": "red", "k": 10, "rerank": 5}
        first = paired.get("/api/search", params=asked).json()["hits"]
        assert first[0]["id"] == "red/ring.png"
        assert first[0]["details"]["pair"] == 1
        plain = ids(paired.get("/api/search", params={**asked, "rerank": 0}))
        assert sorted(plain[:5]) == sorted(hit["id"] for hit in first[:5])
        assert plain[5:] == [hit["id"] for hit in first[5:]]


def test_browsing_shows_the_collection(client: TestClient) -> None:
    assert len(ids(client.get("/api/browse", params={"k": 24}))) == 24
    cool = client.get("/api/browse", params={"k": 200, "filter": "tone = 'cool'"}).json()["hits"]
    assert len(cool) == 30
    assert {hit["metadata"]["tone"] for hit in cool} == {"cool"}
    assert ids(client.get("/api/browse", params={"filter": "price > 1000"})) == []
    for filter in ("", "text contains 'red'"):
        every = client.get("/api/browse", params={"k": 200, "kind": "any", "filter": filter}).json()["hits"]
        kinds = [hit["kind"] for hit in every]
        assert kinds.count("image") == kinds.count("text") == (5 if filter else 60)


# ---------------------------------------------------------------------- items and pictures


def test_browsing_shows_items_with_equal_vectors(tmp_path: Path) -> None:
    model = ColourModel()
    with EmbeddedIndex.create(tmp_path / "i", model.dim, fingerprint=model.fingerprint()) as index:
        index.add([Item(f"same{n}") for n in range(10)], np.tile(np.eye(1, model.dim), (10, 1)))
        with TestClient(create_app(index, model)) as client:
            assert ids(client.get("/api/browse", params={"k": 24})) == [f"same{n}" for n in range(10)]
            assert ids(client.get("/api/browse", params={"k": 2})) == ["same0", "same9"]


def test_the_limit_of_uploads_is_none_of_indexed_files(folder: Path) -> None:
    with (
        EmbeddedIndex(folder / "index") as index,
        TestClient(create_app(index, ColourModel(), limits=Limits(pixels=1_000))) as client,
    ):
        out = io.BytesIO()
        draw("red", "ring").save(out, "PNG")
        refused = client.post("/api/search", files={"images": ("ring.png", out.getvalue())})
        assert refused.status_code == 422
        assert refused.json()["error"].endswith("9,216 pixels, more than the limit of 1,000: shrink it.")
        assert client.get("/api/thumbnail", params={"id": "red/ring.png"}).status_code == 200


def test_items_thumbnails_and_images(client: TestClient) -> None:
    answer = client.get("/api/items", params={"id": ["red/ring.png", "nothing"]}).json()
    assert answer[0]["text"] == "a red ring"
    assert answer[1] is None
    for path in ("/api/thumbnail", "/api/image"):
        picture = client.get(path, params={"id": "red/ring.png"})
        assert picture.headers["content-type"] in ("image/jpeg", "image/png")
        assert picture.content[:3] in (b"\xff\xd8\xff", b"\x89PN")
        missing = client.get(path, params={"id": "nothing"})
        assert missing.status_code == 404
        assert "'nothing'" in missing.json()["error"]


def test_adding_and_deleting(writable: TestClient) -> None:
    items = [
        {"id": "mine", "image": "a.png", "text": "my purple thing", "metadata": {"price": 999}},
        {"id": "note", "text": "purple prose", "image_id": "mine"},
    ]
    files = {"images": ("a.png", png("purple", "square"), "image/png")}
    for _ in range(2):  # again: the same state
        answer = writable.post("/api/items", data={"items": json.dumps(items)}, files=files, headers=AUTH)
        assert answer.json() == {"added": 2}
    assert ids(writable.get("/api/search", params={"text": "purple", "filter": "price = 999"})) == ["mine"]
    assert "note" in ids(writable.get("/api/search", params={"text": "purple", "kind": "text", "k": 7}))
    assert writable.get("/api/thumbnail", params={"id": "mine"}).status_code == 200
    assert writable.get("/api/image", params={"id": "mine"}).headers["content-type"] == "image/jpeg"
    assert writable.get("/api/health").json()["images"] == len(COLOURS) * len(SHAPES) + 1
    assert writable.delete("/api/items", params={"id": ["mine", "nothing"]}, headers=AUTH).json() == {
        "deleted": 1
    }
    assert writable.get("/api/items", params={"id": ["mine", "note"]}).json() == [None, None]


def test_two_files_of_one_name_are_refused(writable: TestClient) -> None:
    items = {"items": json.dumps([{"id": "a", "image": "a.png"}])}
    files = [("images", ("a.png", png(colour), "image/png")) for colour in ("red", "blue")]
    answer = writable.post("/api/items", data=items, files=files, headers=AUTH)
    assert answer.status_code == 400
    assert answer.json() == {"error": "two of the files are called 'a.png': give each its own name."}
    assert writable.get("/api/items", params={"id": "a"}).json() == [None]


def test_many_items_of_one_file_decode_it_once(writable: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"id": f"i{n}", "image": "a.png", "text": "é" * 6_000} for n in range(200)]  # above 1 MB of JSON
    opened: list[str | None] = []
    uploaded = Pictures.open_upload
    monkeypatch.setattr(
        Pictures, "open_upload", lambda self, data, name: opened.append(name) or uploaded(self, data, name)
    )
    given = {"items": json.dumps(items, ensure_ascii=False)}
    assert len(given["items"].encode()) > 2_000_000
    files = {"images": ("a.png", png("purple", "square"), "image/png")}
    answer = writable.post("/api/items", data=given, files=files, headers=AUTH)
    assert answer.json() == {"added": 200}
    assert opened == ["a.png"]
    assert writable.get("/api/thumbnail", params={"id": "i199"}).status_code == 200
    answer = writable.post("/api/items", data=given, headers=AUTH)  # without files it is another kind of form
    assert answer.status_code == 413
    assert "multipart/form-data" in answer.json()["error"]
    few = {"items": json.dumps(items[:2])}
    assert "was not uploaded" in writable.post("/api/items", data=few, headers=AUTH).json()["error"]


def test_pictures_are_in_memory_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PIXELS", 3 * 96 * 96)
    opened: list[Any] = []
    alive: list[int] = []
    uploaded = Pictures.open_upload

    class Watching(ColourModel):
        def encode_image(self, images: Any, *, batch_size: int = 64) -> np.ndarray:
            alive.append(sum(picture() is not None for picture in opened))
            return super().encode_image(images)

    def watch(self: Pictures, data: bytes, name: str | None) -> Any:
        picture = uploaded(self, data, name)
        opened.append(weakref.ref(picture))
        return picture

    monkeypatch.setattr(Pictures, "open_upload", watch)
    model = Watching()
    with make_index(tmp_path, model) as index, TestClient(create_app(index, model, token=TOKEN)) as client:
        alive.clear()
        files = [("images", (f"{c}.png", png(c), "image/png")) for c in COLOURS]
        items = [{"id": f"my {c}", "image": f"{c}.png"} for c in COLOURS] + [
            {"id": "note", "text": "a red note"}
        ]
        damaged = [*files[:-1], ("images", (files[-1][1][0], b"damaged", "image/png"))]
        for given, status in ((damaged, 422), (files, 200)):
            answer = client.post("/api/items", data={"items": json.dumps(items)}, files=given, headers=AUTH)
            assert answer.status_code == status
            there = client.get("/api/items", params={"id": [item["id"] for item in items]}).json()
            assert all((item is None) == (status == 422) for item in there)  # all of them, or none
        assert alive == [3] * 3 + [3] * 4  # nine before the damaged one, then all twelve
        for colour in COLOURS:  # each with its own vector
            (mine,) = index.vectors([f"my {colour}"])
            assert np.allclose(mine, model.encode_image([draw(colour, "circle")])[0], atol=1e-6)


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ("no json", "not JSON"),
        ("[1]", "list of objects"),
        ("[]", "1 to 256 items"),
        ('[{"text": "a"}]', "no id"),
        ('[{"id": "a"}]', "neither an image nor a text"),
        ('[{"id": "a", "image": "b.png"}]', "was not uploaded"),
        ('[{"id": "a", "txt": "b"}]', "the field 'txt'"),
        ('[{"id": "a", "text": 5}]', "must be a text, not 5"),
        ('[{"id": "a", "text": "b", "metadata": [1]}]', "object of columns"),
        ('[{"id": "a", "text": "b", "metadata": {"x": {"y": 1}}}]', "metadata values are"),
        ('[{"id": "a", "text": "b"}, {"id": "a", "text": "c"}]', "unique"),
        ("[" * 100_000, "not JSON"),
        (r'[{"id": "a", "\ud800": "b"}]', r"the field '\ud800'"),
        (r'[{"id": "a", "image": "\ud800"}]', r"the image '\ud800', which was not uploaded"),
    ],
)
def test_items_that_cannot_be_added(writable: TestClient, items: str, sentence: str) -> None:
    answer = writable.post("/api/items", data={"items": items}, headers=AUTH)
    assert answer.status_code == 422
    assert sentence in answer.json()["error"]
    assert writable.get("/api/health").json()["texts"] == 60


def test_a_service_that_reads_takes_the_lock_only_to_write(folder: Path) -> None:
    with EmbeddedIndex(folder / "index") as index:
        app = create_app(
            index, ColourModel(), token=TOKEN, writer=lambda: open_index(folder / "index", writable=True)
        )
        with TestClient(app) as client:
            data = {"items": json.dumps({"id": "extra", "text": "beige beach"})}
            assert client.post("/api/items", data=data, headers=AUTH).json() == {"added": 1}
            assert client.get("/api/items", params={"id": "extra"}).json()[0]["text"] == "beige beach"
            with EmbeddedIndex(folder / "index", writable=True):  # somebody indexes
                answer = client.delete("/api/items", params={"id": "extra"}, headers=AUTH)
                assert answer.status_code == 409
            assert client.delete("/api/items", params={"id": "extra"}, headers=AUTH).json() == {"deleted": 1}


# ---------------------------------------------------------------------- state


def test_health_about_metrics_and_openapi(client: TestClient) -> None:
    health = client.get("/api/health").json()
    assert (health["status"], health["images"], health["texts"]) == ("ok", 60, 60)
    assert health["model"] == "colours"
    about = client.get("/api/about").json()
    assert about["columns"]["price"] == ["number"]
    assert about["values"]["shape"] == sorted(SHAPES)
    assert not about["writable"]
    client.get("/api/search", params={"text": "red"})
    client.get("/nowhere/<script>")
    text = client.get("/metrics").text
    assert 'diptych_requests_total{path="/api/search",status="200"} 1' in text
    assert 'diptych_requests_total{path="other",status="404"} 1' in text
    assert "diptych_search_seconds_count 1" in text
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) \w+ .+|\w+(\{[^}]*\})? [-+0-9.e]+", line), line
    paths = client.get("/openapi.json").json()["paths"]
    names = ("search", "browse", "items", "thumbnail", "image", "video", "health", "about")
    assert set(paths) == {*(f"/api/{name}" for name in names), "/metrics"}
    manual = (Path(__file__).parent.parent / "docs" / "serve.md").read_text("utf-8")
    told = {
        code for row in re.findall(r"^\| (\d{3}(?:, \d{3})*) \|", manual, re.M) for code in row.split(", ")
    }
    assert "507" in told
    for path in paths.values():
        for operation in path.values():
            assert told - {"405"} <= set(operation["responses"])


def test_the_page_needs_nothing_from_outside(client: TestClient) -> None:
    for path, kind in {"/": "html", "/app.js": "javascript", "/style.css": "css", "/icon.svg": "svg"}.items():
        answer = client.get(path)
        assert kind in answer.headers["content-type"]
        assert "http" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "style=" not in answer.text  # inline styles and scripts are forbidden by the policy
        assert " onclick=" not in answer.text


def test_the_api_is_a_page_made_from_its_schema(client: TestClient) -> None:
    answer = client.get("/docs")
    assert "html" in answer.headers["content-type"]
    assert not re.findall(r"(?:src|href)=['\"](?![/#])|<script|style=", answer.text)  # nothing from elsewhere
    schema = client.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert f"<code>{method.upper()} {path}</code>" in answer.text
            for field in operation.get("parameters", ()):
                assert f"<code>{field['name']}</code>" in answer.text
    links = set(re.findall(r"href='#([^']+)'", answer.text))
    assert links <= set(re.findall(r"id='([^']+)'", answer.text))
    assert "SearchReply" in links


def test_without_a_cut_off_nothing_says_what_matches(folder: Path) -> None:
    with EmbeddedIndex(folder / "index") as index:
        for chance, matched in ((None, None), (0.2, True)):
            with TestClient(create_app(index, ColourModel(), chance=chance)) as client:
                found = client.get(
                    "/api/search", params={"like": "red/ring.png"} if chance is None else {"text": "red"}
                )
                assert found.json()["matched"] is matched
                assert found.json()["hits"][0]["matches"] is matched


# ---------------------------------------------------------------------- batching


def test_concurrent_queries_share_batches_and_answers_stay_the_same(folder: Path) -> None:
    model = ColourModel()
    queries = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    with EmbeddedIndex(folder / "index") as index, running(create_app(index, model)) as url:
        with httpx.Client(base_url=url) as one:
            alone = [one.get("/api/search", params={"query": q, "k": 9}).json()["hits"] for q in queries]
        assert all(size == 1 for _, size in model.batches)  # a single client never waits for others
        model.batches.clear()
        with (
            httpx.Client(base_url=url, limits=httpx.Limits(max_connections=16)) as many,
            ThreadPoolExecutor(16) as pool,
        ):
            work = pool.map(
                lambda q: many.get("/api/search", params={"query": q, "k": 9}).json()["hits"], queries
            )
            together = list(work)
        assert together == alone
        assert max(size for _, size in model.batches) > 1
        assert sum(size for _, size in model.batches) == len(queries)


def test_a_batch_waits_only_for_requests_on_their_way() -> None:
    sizes: list[int] = []
    traffic = Traffic()
    batcher = Batcher(lambda key, values: [2 * v for v in values], traffic, sizes.append, window=0.5)
    with traffic.request():
        start = time.monotonic()
        assert batcher("a", 3) == 6
        assert time.monotonic() - start < 0.4
        with traffic.request(), ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(lambda v: batcher("a", v), [1, 2])) == [2, 4]
    assert sizes == [1, 2]
    batcher.close()
    batcher.close()
    with pytest.raises(Unavailable):
        batcher("a", 1)


def test_a_batch_is_let_go_of_while_the_next_is_waited_for() -> None:
    class Picture:
        pass

    batcher = Batcher(lambda key, values: [0 for _ in values], Traffic())
    picture = Picture()
    left = weakref.ref(picture)
    batcher("a", picture)
    del picture
    until = time.monotonic() + 5
    while left() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert left() is None
    batcher.close()


def test_a_faulty_request_spoils_no_other() -> None:
    traffic = Traffic()

    def run(key: str, values: list[int]) -> list[float]:
        return [1 / value for value in values]

    batcher = Batcher(run, traffic, window=0.5)
    with traffic.request(), traffic.request(), ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(batcher, "a", 4), pool.submit(batcher, "a", 0)
        assert good.result() == 0.25
        with pytest.raises(ZeroDivisionError):
            bad.result()
    batcher.close()


def test_what_is_unavailable_is_asked_once_for_a_batch() -> None:
    traffic, asked = Traffic(), []

    def run(key: str, values: list[int]) -> list[int]:
        asked.append(len(values))
        raise Unavailable("the database does not answer: try again.")

    batcher = Batcher(run, traffic, window=0.5)
    with traffic.request(), traffic.request(), ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(batcher, "a", n) for n in (1, 2)]:
            with pytest.raises(Unavailable):
                job.result()
    batcher.close()
    assert asked == [2]


def test_changes_do_not_queue_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TURN", 0.2)
    begun, over = threading.Event(), threading.Event()

    @contextmanager
    def blocked() -> Iterator[Index]:
        begun.set()
        over.wait(20)
        raise Unavailable("gave up.")
        yield

    with EmbeddedIndex(folder / "index") as index, ThreadPoolExecutor(1) as pool:
        app = create_app(index, ColourModel(), token=TOKEN, writer=blocked)
        with TestClient(app) as client:
            gone = {"id": "red/ring.png"}
            first = pool.submit(client.delete, "/api/items", params=gone, headers=AUTH)
            assert begun.wait(20)
            answer = client.delete("/api/items", params=gone, headers=AUTH)
            assert answer.status_code == 503
            assert client.get("/api/search", params={"text": "red"}).status_code == 200
            over.set()
            assert first.result().status_code == 503


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({}, "the query is empty"),
        ({"text": "  "}, "the query is empty"),
        ({"text": "red", "k": 0}, "k must lie between 1 and 200, not 0"),
        ({"text": "red", "k": 201}, "not 201"),
        ({"text": "red", "k": "many"}, "k: "),
        ({"text": "red", "kind": "video"}, "choose image, text or any"),
        ({"text": "red", "filter": "prize < 3"}, "did you mean 'price'"),
        ({"text": "red", "filter": "price <"}, "character 8"),
        ({"text": "red", "filter": "x" * 2001}, "the limit is 2000"),
        ({"query": '"red" -'}, "the query ends after '-'"),
        ({"query": '"red" - "red"'}, "cancel each other out"),
        ({"query": "./secret.png"}, None),
        ({"query": "http://127.0.0.1/x.png"}, "not fetched: upload the image"),
        ({"text": "red", "rerank": 10}, "no pair scorer"),
        ({"text": "a\x00b"}, "not text at 2"),
        ({"q": "red"}, "no parameter 'q'"),
    ],
)
def test_a_mistake_is_one_sentence(
    client: TestClient, parameters: dict[str, Any], sentence: str | None
) -> None:
    answer = client.get("/api/search", params=parameters)
    if sentence is None:  # a path is only a text here
        assert answer.status_code == 200
        return
    assert answer.status_code == 422
    assert sentence in answer.json()["error"]
    assert client.get("/api/search", params={"text": "red"}).status_code == 200


def test_a_mistake_in_a_filter_says_where(client: TestClient) -> None:
    body = client.get("/api/search", params={"text": "red", "filter": "price < 3 andd tone = 'warm'"}).json()
    assert body["position"] == 10


def test_unknown_paths_and_methods(client: TestClient) -> None:
    assert "/api/nothing" in client.get("/api/nothing").json()["error"]
    assert client.get("/api/items").status_code == 422


def test_an_empty_index_and_another_model(tmp_path: Path) -> None:
    model = ColourModel()
    with (
        EmbeddedIndex.create(tmp_path / "empty", model.dim, fingerprint=model.fingerprint()) as index,
        TestClient(create_app(index, model)) as client,
    ):
        answer = client.get("/api/search", params={"text": "red"})
        assert answer.status_code == 409
        assert "is empty" in answer.json()["error"]
        assert ids(client.get("/api/browse")) == []
    with (
        EmbeddedIndex.create(tmp_path / "other", model.dim, model="theirs", fingerprint="x") as index,
        pytest.raises(IndexFault, match="theirs"),
    ):
        create_app(index, model)


def test_an_unexpected_failure_is_told_and_the_service_goes_on(folder: Path) -> None:
    class Failing(ColourModel):
        def encode_text(self, texts: Any, *, batch_size: int = 256) -> np.ndarray:
            if "explode" in texts:
                raise RuntimeError("secret detail")
            return super().encode_text(texts)

    with (
        EmbeddedIndex(folder / "index") as index,
        TestClient(create_app(index, Failing()), raise_server_exceptions=False) as client,
    ):
        answer = client.get("/api/search", params={"text": "explode"})
        assert answer.status_code == 500
        assert "log" in answer.json()["error"]
        assert "secret" not in answer.text
        assert client.get("/api/search", params={"text": "red"}).status_code == 200
        assert 'diptych_requests_total{path="/api/search",status="500"} 1\n' in client.get("/metrics").text


def test_limits_must_let_something_pass() -> None:
    with pytest.raises(SettingsError, match=r"\b0\b"):
        Limits(k=0)


# ---------------------------------------------------------------------- a database that goes away


def test_a_database_that_goes_away_is_503_and_comes_back() -> None:
    model = ColourModel()
    with postgres() as server, tempfile.TemporaryDirectory() as folder:
        url = server.index_url("web")
        with PostgresIndex.create(url, model.dim, fingerprint=model.fingerprint()) as index:
            fill(index, Path(folder), model)
            with TestClient(create_app(index, model, token=TOKEN)) as client:
                before = ids(client.get("/api/search", params={"text": "red", "k": 5}))
                server.stop()
                for answer in (
                    client.get("/api/search", params={"text": "red"}),
                    client.get("/api/health"),
                    client.delete("/api/items", params={"id": "red/ring.png"}, headers=AUTH),
                ):
                    assert answer.status_code == 503
                    assert "does not answer" in answer.json()["error"]
                    assert answer.headers["retry-after"]
                assert client.get("/").status_code == 200
                server.start()
                assert ids(client.get("/api/search", params={"text": "red", "k": 5})) == before


# ---------------------------------------------------------------------- running


def test_serve_refuses_what_cannot_work(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0"):
        serve(folder / "index", ColourModel(), host="0.0.0.0")
    with pytest.raises(SettingsError, match="--token"):
        serve(folder / "index", ColourModel(), private=True)
    with pytest.raises(SettingsError, match=r"\b8\b"):
        serve(folder / "index", ColourModel(), token="short")
    with pytest.raises(SettingsError, match="70000"):
        serve(folder / "index", ColourModel(), port=70000)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SettingsError, match=r"127\.0\.0\.1"):
            serve(folder / "index", ColourModel(), port=other.getsockname()[1])
    with pytest.raises(IndexFault, match="nothing"):
        serve(folder / "nothing", ColourModel(), port=0)


def serving(
    asks: Callable[[httpx.Client], None],
    place: Path,
    model: ColourModel,
    capfd: pytest.CaptureFixture[str],
    number: int = signal.SIGINT,
    **options: Any,
) -> str:
    """Ask a service that runs here, then end it by a signal; what it said."""
    failed: list[BaseException] = []
    said = ""

    def ask() -> None:
        nonlocal said
        while not (found := re.search(r"http://[\d.:]+", said)):
            time.sleep(0.05)
            said += capfd.readouterr().out
        try:
            with httpx.Client(base_url=found.group(), timeout=20) as client:
                asks(client)
        except BaseException as error:
            failed.append(error)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask)
    thread.start()
    serve(place, model, port=0, **options)  # returns: an interrupt is how a service ends
    thread.join()
    if failed:
        raise failed[0]
    return said


def test_serve_says_where_pairs_are_judged(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def asks(client: httpx.Client) -> None:
        assert client.get("/audit").text == "<p>pairs</p>"

    page = (b"<p>pairs</p>", "default-src 'none'")
    assert "/audit" in serving(asks, folder / "index", ColourModel(), capfd, audit=page)
    assert "/audit" not in serving(lambda _: None, folder / "index", ColourModel(), capfd)


@pytest.mark.parametrize(("number", "host"), [(signal.SIGINT, "127.0.0.1"), (signal.SIGTERM, "127.0.0.2")])
def test_serve_runs_and_stops_cleanly(
    number: int, host: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def asks(client: httpx.Client) -> None:
        assert client.get("/api/search", params={"text": "red"}).status_code == 200
        assert client.get("/api/health", headers={"Host": "evil.example"}).status_code == 421

    serving(asks, folder / "index", ColourModel(), capfd, number, host=host)


def test_the_weights_are_read_once_however_many_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Counting(ColourModel):
        asked = 0

        def fingerprint(self) -> str:
            self.asked += 1
            return super().fingerprint()

    def asks(client: httpx.Client) -> None:
        for n in range(3):
            items = {"items": json.dumps({"id": f"note{n}", "text": "a red note"})}
            assert client.post("/api/items", data=items, headers=AUTH).json() == {"added": 1}
        gone = client.delete("/api/items", params={"id": ["note0", "note1"]}, headers=AUTH)
        assert gone.json() == {"deleted": 2}

    make_index(tmp_path, ColourModel()).close()
    model = Counting()
    serving(asks, tmp_path / "index", model, capfd, token=TOKEN)
    assert model.asked == 1
    with EmbeddedIndex.create(tmp_path / "other", model.dim, model="theirs", fingerprint="x"):
        pass
    with pytest.raises(IndexFault, match="theirs"):
        serve(tmp_path / "other", model, port=0)


def test_an_address_of_ten_megabytes_is_answered_and_the_service_goes_on(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def asked(client: httpx.Client, size: int) -> bytes:
        """All of the answer: what comes back to a client that is still sending when it is cut off, too."""
        host, port = client.base_url.host, client.base_url.port
        with socket.create_connection((host, port or 80), timeout=20) as raw:
            with suppress(ConnectionError):
                raw.sendall(
                    b"GET /api/search?text=%b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                    % (b"x" * size)
                )
            answer = b""
            with suppress(ConnectionError):
                while piece := raw.recv(65_536):
                    answer += piece
        return answer

    def asks(client: httpx.Client) -> None:
        begun = time.monotonic()
        answer = asked(client, 10_000_000)
        assert time.monotonic() - begun < 10
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'{"error":"the request is not valid HTTP, or its head is too long' in answer
        answer = asked(client, 20_000)
        assert answer.startswith(b"HTTP/1.1 414 ")
        assert b'{"error":"the address is longer than' in answer
        assert client.get("/api/search", params={"text": "red"}).status_code == 200

    serving(asks, folder / "index", ColourModel(), capfd, limits=Limits(query=200, filter=200, items=8))


@pytest.mark.parametrize(
    ("wanted", "status"), [("bytes=9-2", 400), ("lines=1", 400), ("bytes=99999999-", 416)]
)
def test_a_wrong_range_is_a_sentence(client: TestClient, wanted: str, status: int) -> None:
    place = {"id": "red/circle.png"}
    seen = client.get("/api/image", params=place).headers["etag"]
    for further in ({}, {"If-Range": seen}):  # which hid the refusal
        answer = client.get("/api/image", params=place, headers={"Range": wanted, **further})
        assert answer.status_code == status
        assert "range" in answer.json()["error"]
    answer = client.get("/api/image", params=place, headers={"Range": wanted, "If-Range": '"of another"'})
    assert answer.status_code == 200
    part = client.get("/api/image", params={"id": "red/circle.png"}, headers={"Range": "bytes=0-3"})
    assert part.status_code == 206
    assert part.content == b"\x89PNG"
