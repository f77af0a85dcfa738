"""diptych serve, index and search as a user runs them, over both engines; and everything that can go wrong."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psycopg
import pytest
from colours import ColourModel, fill, make_index
from commands import diptych, refused, training
from disks import fill as fill_disk
from disks import make_read_only, small_disk
from fastapi.testclient import TestClient
from servers import Server, served
from small import precomputed

from diptych.index.engines.opening import empty_index, open_index
from diptych.index.engines.postgres.index import PostgresIndex
from diptych.index.models import open_model
from diptych.web.app import create_app

TOKEN = "correct-horse"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a run and its index, never changed."""
    folder = tmp_path_factory.mktemp("serve")
    precomputed(folder / "toy_precomp")
    diptych(*training("vse-infinity", folder / "toy_precomp", epochs=1), "--output_dir", folder / "run")
    diptych("index", folder / "run", folder / "toy_precomp", "--index", folder / "toy.index")
    return folder


def found(place: object, query: str = "a red dog") -> list[tuple[str, float]]:
    """What the command line finds."""
    answer = json.loads(diptych("search", place, query, "-k", 8, "--all", "--json").stdout)
    return [(hit["id"], hit["score"]) for hit in answer["hits"]]


def answered(client: httpx.Client, query: str = "a red dog") -> list[tuple[str, float]]:
    """What the service finds."""
    answer = client.get("/api/search", params={"text": query, "k": 8})
    assert answer.status_code == 200, answer.text
    return [(hit["id"], hit["score"]) for hit in answer.json()["hits"]]


# --- both engines through the commands


def test_a_folder_is_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_TOKEN", TOKEN)
    place = shutil.copytree(folder / "toy.index", folder / "copy.index")
    options = ("--max_k", 20, "--host_name", "photos.example.org")
    with served(place, *options) as url, httpx.Client(base_url=url) as client:
        assert answered(client) == found(place)
        assert "between 1 and 20" in client.get("/api/search", params={"text": "a", "k": 21}).json()["error"]
        assert client.get("/").headers["content-type"].startswith("text/html")
        for host, status in {"photos.example.org": 200, "localhost": 200, "evil.example.org": 421}.items():
            assert client.get("/api/health", headers={"Host": host}).status_code == status
        note = {"items": json.dumps({"id": "note", "text": "a small bird"})}
        assert client.post("/api/items", data=note).status_code == 401
        assert client.post("/api/items", data=note, headers=AUTH).json() == {"added": 1}
        diptych("index", "remove", place, "note")  # the service holds no lock between changes
        assert client.get("/api/items", params={"id": "note"}).json() == [None]


def test_a_database_is_indexed_searched_served_and_may_go_away(folder: Path, server: Server) -> None:
    url = server.index_url("toy").replace("postgres:@", "postgres:sesame@")
    for count in ("34 added", "34 unchanged"):
        said = diptych("index", folder / "run", folder / "toy_precomp", "--index", url).stdout
        assert count in said
        assert "postgres@" in said  # in the command to go on with, without the password
        assert "sesame" not in said
    best, local = found(url), found(folder / "toy.index")
    assert [id for id, _ in best] == [id for id, _ in local]
    assert [score for _, score in best] == pytest.approx([score for _, score in local], abs=1e-6)
    assert "postgresql" in diptych("index", "info", url).stdout
    assert diptych("index", "verify", url).stdout == "sound\n"
    assert "freed" in diptych("index", "compact", url).stdout
    assert len(diptych("index", "duplicates", url, "--limit", 3).stdout.splitlines()) == 3
    with served(url) as address, httpx.Client(base_url=address, timeout=30) as client:
        assert answered(client) == best
        server.stop()
        for path in ("/api/search?text=red", "/api/health", "/api/about", "/api/items?id=a"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "does not answer" in answer.json()["error"]
        counters = client.get("/metrics")
        assert counters.status_code == 200
        assert 'diptych_requests_total{path="/api/search",status="503"} 1' in counters.text
        assert "postgresql://" in refused("search", url, "red")
        assert "postgresql://" in refused("index", folder / "run", folder / "toy_precomp", "--index", url)
        assert "postgresql://" in refused("serve", url, "--port", 0)
        server.start()
        assert answered(client) == best
    assert "removed 1 image, " in diptych("index", "remove", url, best[0][0]).stdout


# --- what cannot be served


def other_run(folder: Path) -> Path:
    if not (folder / "other").exists():
        more = ("--output_dir", folder / "other", "--seed", 7)
        diptych(*training("vse-infinity", folder / "toy_precomp", epochs=1), *more)
    return folder / "other"


def test_an_index_of_another_model_is_refused_by_name(folder: Path, server: Server) -> None:
    url = server.index_url("theirs")
    diptych("index", folder / "run", folder / "toy_precomp", "--index", url)
    other = other_run(folder)
    for place in (folder / "toy.index", url):
        for command in (
            ("serve", place, "--model", other, "--port", 0),
            ("search", place, "red", "--model", other),
            ("index", other, folder / "toy_precomp", "--index", place),
        ):
            sentence = refused(*command)
            assert f"'{folder / 'run'}'" in sentence
            assert f"'{other}'" in sentence


def test_a_half_copied_index_is_refused(folder: Path, server: Server, tmp_path: Path) -> None:
    place = shutil.copytree(folder / "toy.index", tmp_path / "half.index")
    next(place.glob("vectors-*")).unlink()
    url = server.index_url("half")
    diptych("index", folder / "run", folder / "toy_precomp", "--index", url)
    with psycopg.connect(server.url, autocommit=True) as db:
        db.execute("TRUNCATE half.vectors")
    for command in ("serve", "search"):
        rest = ("red",) if command == "search" else ()
        assert "half.index" in refused(command, place, *rest)
        assert "postgresql://" in refused(command, url, *rest)


def test_places_that_are_no_index(folder: Path, server: Server, tmp_path: Path) -> None:
    for command in ("serve", "search"):
        rest = ("red",) if command == "search" else ()
        assert tmp_path.name in refused(command, tmp_path, *rest)
        assert "nothing" in refused(command, tmp_path / "nothing", *rest)
        assert "postgresql://" in refused(command, server.index_url("none"), *rest)
        assert "redis" in refused(command, "redis://localhost", *rest)
        assert "'a;b'" in refused(command, server.index_url("a;b"), *rest)


def test_a_model_that_is_gone_or_was_never_named(folder: Path, tmp_path: Path) -> None:
    for name, sentence in (
        (str(tmp_path / "gone"), "--model"),
        ("", "--model"),
    ):
        place = tmp_path / f"index{len(name)}"
        empty_index(place, 16, model=name, fingerprint="f").close()
        assert sentence in refused("serve", place)
        assert sentence in refused("search", place, "red")


def test_an_empty_collection_is_told(folder: Path, server: Server, tmp_path: Path) -> None:
    model = open_model(folder / "run")
    for place in (tmp_path / "empty.index", server.index_url("empty")):
        facts = {"model": str(folder / "run"), "fingerprint": model.fingerprint()}
        empty_index(place, model.dim, **facts).close()
        assert "empty" in refused("search", place, "red")
        with open_index(place) as index, TestClient(create_app(index, model)) as client:
            answer = client.get("/api/search", params={"text": "red"})
            assert answer.status_code == 409
            assert "empty" in answer.json()["error"]
            assert client.get("/api/browse").json()["hits"] == []
            assert client.get("/api/health").json()["images"] == 0


def test_flags_that_cannot_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "toy.index"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused("serve", place, "--port", port)
        for flags, sentence in {
            ("--host", "0.0.0.0"): "0.0.0.0",
            ("--private",): "--token",
            ("--token", "short"): "at least 8 printable ASCII characters",
            ("--port", "70000"): "70000",
            ("--max_k", "0"): "k=0",
            ("--host", "no.such.name.invalid"): "no.such.name.invalid",
        }.items():
            given = () if "--port" in flags else ("--port", port)
            more = () if "0.0.0.0" in flags or "--host" not in flags else ("--token", TOKEN)
            assert sentence in refused("serve", place, *given, *flags, *more)
    monkeypatch.setenv("DIPTYCH_TOKEN", "short")
    assert "at least 8 printable" in refused("serve", place)


@pytest.mark.parametrize(("package", "extra"), [("pgvector", "postgres"), ("python_multipart", "serve")])
def test_a_missing_package_is_named_with_its_extra(package: str, extra: str, folder: Path) -> None:
    place = "postgresql://localhost/none" if extra == "postgres" else str(folder / "toy.index")
    code = f"import sys; sys.modules['{package}'] = None; from diptych.cli import main; main(['serve', '{place}'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"error: .* needs the package '.*{package}.*': install it with pip install 'diptych\[{extra}\]'\.\n",
        done.stderr,
    )


@pytest.mark.parametrize("engine", ["embedded", "postgres"])
def test_mistakes_in_a_search(engine: str, folder: Path, server: Server) -> None:
    place: Any = folder / "toy.index"
    if engine == "postgres":
        place = server.index_url("mistakes")
        diptych("index", folder / "run", folder / "toy_precomp", "--index", place)
    assert "at least 1, not 0" in refused("search", place, "red", "-k", 0)
    typo = refused("search", place, "red", "--filter", "splitt = 'train'")
    assert "splitt" in typo
    assert "'split'" in typo
    assert "character 9" in refused("search", place, "red", "--filter", "split = ")
    assert "nobody" in refused("search", place, "--like", "nobody")
    with (
        open_index(place) as index,
        TestClient(create_app(index, open_model(folder / "run"))) as client,
    ):
        answer = client.get("/api/search", params={"text": "red", "filter": "split = 'train' andd id = 'a'"})
        assert answer.json()["position"] == 16
        assert "character 17" in answer.json()["error"]
        for k in (0, 201):
            answer = client.get("/api/search", params={"text": "red", "k": k})
            assert f" 200, not {k}" in answer.json()["error"]


# --- disks


def add(client: TestClient, name: str) -> Any:
    items = [{"id": f"{name}{n}", "text": f"red {n} " + "word " * 3000} for n in range(60)]
    return client.post("/api/items", data={"items": json.dumps(items)}, headers=AUTH)


def goes_on(client: TestClient) -> None:
    answer = client.get("/api/search", params={"text": "red", "k": 5})
    assert {hit["id"].split("/")[0] for hit in answer.json()["hits"]} == {"red"}


def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    model = ColourModel()
    with small_disk(tmp_path / "disk", 4) as disk:
        make_index(disk, model).close()
        app = lambda index: create_app(  # noqa: E731
            index, model, token=TOKEN, writer=lambda: open_index(disk / "index", writable=True)
        )
        with open_index(disk / "index") as index, TestClient(app(index)) as client:
            ballast = fill_disk(disk)
            answer = add(client, "a")
            assert answer.status_code == 507
            assert "full" in answer.json()["error"]
            goes_on(client)
            ballast.unlink()
            assert add(client, "b").json() == {"added": 60}
            assert client.get("/api/health").json()["texts"] == 120
            assert index.verify() == []
        make_read_only(disk)
        with open_index(disk / "index") as index, TestClient(app(index)) as client:
            answer = add(client, "c")
            assert answer.status_code == 507
            assert "cannot be written" in answer.json()["error"]
            goes_on(client)


def test_a_database_whose_disk_is_full_or_that_is_read_only(server: Server, tmp_path: Path) -> None:
    """The server's own errors, raised by a trigger and by a setting."""
    model = ColourModel()
    url = server.index_url("disk")
    with PostgresIndex.create(url, model.dim, fingerprint=model.fingerprint()) as index:
        fill(index, tmp_path / "pictures", model)
        with (
            TestClient(create_app(index, model, token=TOKEN)) as client,
            psycopg.connect(server.url, autocommit=True) as db,
        ):
            db.execute(
                "CREATE FUNCTION disk.full() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$"
            )
            db.execute("CREATE TRIGGER filled BEFORE INSERT ON disk.items EXECUTE FUNCTION disk.full()")
            answer = add(client, "a")
            assert answer.status_code == 507
            assert "full" in answer.json()["error"]
            goes_on(client)
            db.execute("DROP TRIGGER filled ON disk.items")
            assert add(client, "b").json() == {"added": 60}
            assert index.verify() == []
        with psycopg.connect(server.url, autocommit=True) as db:
            db.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
    try:
        with (
            open_index(url, writable=True) as index,
            TestClient(create_app(index, model, token=TOKEN)) as client,
        ):
            answer = add(client, "c")
            assert answer.status_code == 507
            assert "cannot be written" in answer.json()["error"]
            goes_on(client)
    finally:
        with psycopg.connect(server.url, autocommit=True) as db:
            db.execute("SET default_transaction_read_only = off")
            db.execute("ALTER DATABASE postgres RESET default_transaction_read_only")
