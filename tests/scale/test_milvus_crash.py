"""A Milvus that is killed, away, full, or wants a password: nothing acknowledged is lost, each is one sentence."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from colours import ColourModel, fill
from commands import diptych, refused, training
from engine_contract import DIM, collection
from fastapi.testclient import TestClient
from milvus_server import KILLABLE, MilvusServer, milvus
from servers import served
from small import precomputed

from diptych.errors import SettingsError, StorageError, Unavailable
from diptych.index.protocol import Item
from diptych.web.app import create_app

pytest.importorskip("pymilvus")
from diptych.index.engines.milvus import server as conversation
from diptych.index.engines.milvus.index import MilvusIndex

KILLS, BATCH = 20, 25
PATIENCE = 180  # seconds until a server that was killed answers again, on a busy machine


@pytest.fixture(scope="module")
def server() -> Iterator[MilvusServer]:
    """One that these tests may kill."""
    with milvus(KILLABLE) as running:
        yield running


def until(answer: Any, patience: float = PATIENCE) -> Any:
    """The first answer that is no refusal to answer now."""
    end = time.monotonic() + patience
    while True:
        try:
            return answer()
        except Unavailable:
            assert time.monotonic() < end
            time.sleep(0.2)


def test_kills_during_updates_lose_nothing(server: MilvusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer repeats what was not acknowledged; a service answers, or 503, and nothing else."""
    monkeypatch.setattr(
        conversation, "PATIENCE", 5.0
    )  # seconds a request is repeated while the server is away
    url, model = server.url("killed"), ColourModel()
    rng, acknowledged, refusals = random.Random(0), dict[str, int](), 0
    done = threading.Event()
    failures: list[BaseException] = []
    statuses: list[int] = []

    def write() -> None:
        nonlocal refusals
        try:
            with MilvusIndex.open(url, writable=True) as index:
                version = 0
                while not done.is_set():
                    version += 1
                    start = rng.randrange(0, 400, BATCH)
                    ids = [f"item {n}" for n in range(start, start + BATCH)]
                    items = [Item(id, metadata={"version": version}, content=str(version)) for id in ids]
                    vectors = np.tile(np.eye(1, model.dim, version % model.dim, dtype=np.float32), (BATCH, 1))
                    while True:  # the same again, until it is acknowledged
                        try:
                            index.update(items, vectors)
                            acknowledged.update(dict.fromkeys(ids, version))
                            break
                        except Unavailable:
                            refusals += 1
                            time.sleep(0.2)
        except BaseException as error:
            failures.append(error)

    def search(client: TestClient) -> None:
        try:
            while not done.is_set():
                answer = client.get("/api/search", params={"text": "red", "k": 3})
                assert answer.status_code in (200, 503), answer.text
                statuses.append(answer.status_code)
                time.sleep(0.05)
        except BaseException as error:
            failures.append(error)

    with MilvusIndex.create(url, model.dim, fingerprint=model.fingerprint()) as index:
        index.add([Item("first")], np.eye(1, model.dim))
    with MilvusIndex.open(url) as index, TestClient(create_app(index, model)) as client:
        threads = [threading.Thread(target=write), threading.Thread(target=search, args=(client,))]
        for thread in threads:
            thread.start()
        for _ in range(KILLS):
            before = len(acknowledged), sum(acknowledged.values())
            end = time.monotonic() + PATIENCE
            while (len(acknowledged), sum(acknowledged.values())) == before and not failures:
                assert time.monotonic() < end  # the writer goes on after every kill
                time.sleep(0.01)
            seen = len(statuses)
            while 200 not in statuses[seen:] and not failures:  # and so does the service
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(rng.random() / 5)
            server.kill()
            server.start()
        last = sum(acknowledged.values())
        end = time.monotonic() + PATIENCE
        while sum(acknowledged.values()) == last and not failures and time.monotonic() < end:
            time.sleep(0.05)
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert refusals > 0
        assert set(statuses) == {200, 503}
        assert until(lambda: client.get("/api/search", params={"text": "red"})).status_code == 200
        found = {item.id: item for item in index.get(list(acknowledged)) if item is not None}
        assert set(found) == set(acknowledged)
        older = {id: item.content for id, item in found.items() if int(item.content) < acknowledged[id]}
        assert older == {}
        assert len(index) == len(acknowledged) + 1
        every = index.search(np.ones(model.dim), 1000).ids
        assert len(every) == len(set(every)) == len(index)
        assert index.verify() == []
    print(f"\n{len(statuses)} searches, {statuses.count(503)} refused; {refusals} writes repeated")


def test_the_commands_and_the_service(server: MilvusServer, tmp_path: Path) -> None:
    precomputed(tmp_path / "toy_precomp")
    diptych(*training("vse-infinity", tmp_path / "toy_precomp", epochs=1), "--output_dir", tmp_path / "run")
    diptych("index", tmp_path / "run", tmp_path / "toy_precomp", "--index", tmp_path / "toy.index")
    url = server.url("toy")
    for count in ("34 added", "34 unchanged"):
        assert count in diptych("index", tmp_path / "run", tmp_path / "toy_precomp", "--index", url).stdout

    def found(place: object) -> list[Any]:
        answer = json.loads(diptych("search", place, "a red dog", "-k", 8, "--json").stdout)
        return [(hit["id"], round(hit["score"], 5)) for hit in answer["hits"]]

    assert found(url) == found(tmp_path / "toy.index")
    info = diptych("index", "info", url).stdout
    assert "milvus" in info
    assert "none: every search is exact" in info
    assert diptych("index", "verify", url).stdout == "sound\n"
    assert "freed" in diptych("index", "compact", url).stdout
    assert len(diptych("index", "duplicates", url, "--limit", 3).stdout.splitlines()) == 3
    assert "needs 2.5 or newer" in refused("search", url, "a red dog", "--hybrid")
    assert "precision" in refused(
        "index",
        tmp_path / "run",
        tmp_path / "toy_precomp",
        "--index",
        server.url("half"),
        "--precision",
        "float16",
    )
    approximate = diptych(
        "index", tmp_path / "run", tmp_path / "toy_precomp", "--index", url, "--approximate"
    )
    assert "add index=hnsw or index=diskann to its URL" in approximate.stderr
    best = found(url)
    with served(url) as address, httpx.Client(base_url=address, timeout=90) as client:

        def answered() -> list[Any]:
            answer = client.get("/api/search", params={"text": "a red dog", "k": 8})
            if answer.status_code == 503:
                raise Unavailable(answer.text)
            return [(hit["id"], round(hit["score"], 5)) for hit in answer.json()["hits"]]

        assert answered() == best
        assert client.get("/").headers["content-type"].startswith("text/html")
        server.kill()
        for path in ("/api/search?text=red", "/api/health", "/api/about", "/api/items?id=a"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "does not answer" in answer.json()["error"]
        assert "does not answer" in refused("search", url, "red")
        assert "does not answer" in refused(
            "index", tmp_path / "run", tmp_path / "toy_precomp", "--index", url
        )
        assert "does not answer" in refused("serve", url, "--port", 0)
        server.start()
        assert until(answered) == best
    assert "removed 1 image" in diptych("index", "remove", url, best[0][0]).stdout
    assert "34 images" in diptych("index", tmp_path / "run", tmp_path / "toy_precomp", "--index", url).stdout
    assert found(url) == best


def test_a_server_that_is_too_old(server: MilvusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "OLDEST", (9, 1))
    with pytest.raises(SettingsError, match=r"2\.3\.5-lite.*9\.1"):
        MilvusIndex.open(server.url("any"))


def test_a_full_server_keeps_what_it_has(server: MilvusServer, tmp_path: Path) -> None:
    model, url = ColourModel(), server.url("full")
    with until(lambda: MilvusIndex.create(url, model.dim, fingerprint=model.fingerprint())) as index:
        fill(index, tmp_path / "pictures", model)
        index.compact()
    server.kill()
    server.configure({**KILLABLE, "quotaAndLimits.limitWriting.diskProtection.diskQuota": 0.001})
    server.start()
    try:
        with until(lambda: MilvusIndex.open(url, writable=True)) as index:
            count = until(lambda: len(index))
            with TestClient(create_app(index, model, token="correct-horse")) as client:
                headers = {"Authorization": "Bearer correct-horse"}
                end = time.monotonic() + PATIENCE
                answer = None
                while time.monotonic() < end:  # the server looks at its disk every few seconds
                    item = {"items": json.dumps({"id": "more", "text": "red"})}
                    answer = client.post("/api/items", data=item, headers=headers)
                    if answer.status_code == 507:
                        break
                    time.sleep(0.5)
                assert answer is not None
                assert answer.status_code == 507, answer.text
                assert "is full" in answer.json()["error"]
                assert client.get("/api/search", params={"text": "red"}).status_code == 200
            with pytest.raises(StorageError):
                index.update([Item("other")], np.eye(1, model.dim))
            assert len(index) in (count, count + 1)
    finally:
        server.kill()
        server.configure(KILLABLE)
        server.start()


def test_a_wrong_password_is_told_without_repeating_it(server: MilvusServer) -> None:
    items, vectors = collection(5)
    server.kill()
    server.configure({**KILLABLE, "common.security.authorizationEnabled": True})
    server.start()
    try:
        right = server.url("secret", login="root:Milvus@")
        with until(lambda: MilvusIndex.create(right, DIM)) as index:
            index.add(items, vectors)
            assert "Milvus@" not in index.path
        for login in ("root:sesame@", "nobody:sesame@", ""):
            for attempt in (MilvusIndex.open, MilvusIndex.exists, lambda url: MilvusIndex.create(url, DIM)):
                with pytest.raises(SettingsError, match="password") as caught:
                    attempt(server.url("secret", login=login))
                assert "sesame" not in str(caught.value)
        said = refused("search", server.url("secret", login="root:sesame@"), "red")
        assert "password" in said
        assert "sesame" not in said
    finally:
        server.kill()
        server.configure(KILLABLE)
        server.start()


def test_a_server_that_is_away() -> None:
    for attempt in (MilvusIndex.open, MilvusIndex.exists, lambda url: MilvusIndex.create(url, DIM)):
        start = time.monotonic()
        with pytest.raises(Unavailable, match=r"milvus://127\.0\.0\.1:1/none") as caught:
            attempt("milvus://me:secret@127.0.0.1:1/none")
        assert "secret" not in str(caught.value)
        assert time.monotonic() - start < 50
