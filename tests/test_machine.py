"""What was made here, and what was not: which folders are served, which approximate indexes are loaded."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from colour_model import ColourModel
from commands import diptych
from fastapi.testclient import TestClient
from PIL import Image
from resealed import VECTORS, D, make, reseal

from diptych import machine
from diptych.index.engines.embedded.approximate import CodeTable
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.ingest.build import index_collection
from diptych.index.protocol import Item
from diptych.web.app import create_app
from diptych.web.uploads import Pictures


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of somebody who has not used diptych yet."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# ---------------------------------------------------------------------- the key


def test_the_key_is_made_once_and_is_private(home: Path) -> None:
    assert machine.own_key() is None
    key = machine.own_key(make=True)
    assert key is not None
    assert len(key) == 32
    assert machine.own_key() == machine.own_key(make=True) == key
    assert (home / "key").stat().st_mode & 0o077 == 0


def test_a_link_or_a_damaged_file_is_no_key(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    (tmp_path / "zeros").write_bytes(bytes(32))
    (home / "key").symlink_to(tmp_path / "zeros")
    assert machine.own_key(make=True) is None
    (home / "key").unlink()
    (home / "key").write_bytes(b"short")
    assert machine.own_key(make=True) is None


def test_a_home_that_cannot_be_written_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "file"))
    assert machine.own_key(make=True) is None
    machine.record_root(tmp_path)
    assert machine.known_roots() == []


# ---------------------------------------------------------------------- approximate indexes


def graph_index(path: Path) -> Path:
    pytest.importorskip("usearch")
    make(path)
    with EmbeddedIndex.open(path, writable=True) as index:
        index.build_graph("image", codes=False)
        assert not index.search(VECTORS[0], 3, kind="image").exact
    return path


def test_a_graph_of_somebody_else_is_not_loaded(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = graph_index(tmp_path / "index")
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "another"))
    with caplog.at_level(logging.WARNING), EmbeddedIndex.open(path) as index:
        for _ in range(3):
            hits = index.search(VECTORS[0], 3, kind="image")
            assert hits.exact
            assert hits.ids[0] == "image 0"
        assert index.verify() == []
    assert diptych("index", "verify", path).stdout == "sound\n"
    said = caplog.messages[0]
    assert "not made by you on this machine" in said
    assert "diptych index" in said
    with EmbeddedIndex.open(path, writable=True) as index:  # what 'diptych index' does
        index.build_graph("image", codes=False)
        assert not index.search(VECTORS[0], 3, kind="image").exact
    shutil.copy(tmp_path / "another" / "key", home / "key")
    monkeypatch.setenv("DIPTYCH_HOME", str(home))  # with the key of the other machine
    with EmbeddedIndex.open(path) as index:
        assert not index.search(VECTORS[0], 3, kind="image").exact


def test_a_graph_stays_signed_when_rows_move(home: Path, tmp_path: Path) -> None:
    path = graph_index(tmp_path / "index")
    with EmbeddedIndex.open(path, writable=True) as index:
        index.delete(["image 7"])
        index.compact()
        assert not index.search(VECTORS[0], 3, kind="image").exact
        assert index.verify() == []


USE = """
import sys, numpy as np
from diptych.errors import DiptychError
from diptych.index.engines.embedded.index import EmbeddedIndex
vectors = np.load(sys.argv[2])
try:
    with EmbeddedIndex.open(sys.argv[1], writable=True) as index:
        index.search_many(vectors, 5, kind="image")
        index.build_graph("image", codes=False)
        index.compact()
except DiptychError as error:
    print(error)
"""


def test_a_forged_graph_with_the_right_checksum_does_not_end_the_process(home: Path, tmp_path: Path) -> None:
    """One process for each of some forgeries: what usearch does with them is a matter of luck."""
    sound = graph_index(tmp_path / "index")
    np.save(tmp_path / "vectors.npy", VECTORS[:8])
    rng = np.random.default_rng(0)
    for number in range(4):
        folder = tmp_path / f"forged{number}"
        shutil.copytree(sound, folder)
        (file,) = folder.glob("graph-*.usearch")
        data = np.frombuffer(file.read_bytes(), np.uint8).copy()
        places = rng.integers(0 if number % 2 else 64, len(data), 200)
        data[places] = rng.integers(0, 256, 200)
        file.write_bytes(data.tobytes())
        reseal(folder, "UPDATE graphs SET checksum = ?", zlib.crc32(data.tobytes()))
        done = subprocess.run(
            [sys.executable, "-c", USE, folder, tmp_path / "vectors.npy"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-500:]
        assert "not made by you" in done.stderr


@pytest.mark.parametrize("change", ["compact", "build"])
def test_codes_that_can_no_longer_be_read_are_left_out(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk failed between two reads of their file; a Python error came out of both."""

    def fails(self: CodeTable, path: str) -> None:
        monkeypatch.undo()  # once
        raise RuntimeError(f"{path} holds no codes (seeking file failed)")

    with EmbeddedIndex.open(make(tmp_path / "index"), writable=True) as index:
        assert not index.search(VECTORS[0], 3, kind="image").exact
        index.add([Item(f"new {n}") for n in range(32)], VECTORS[:32])
        monkeypatch.setattr(CodeTable, "load", fails)
        if change == "compact":
            index.compact()
        else:
            index.build_graph("image", codes=True)
        assert CodeTable.load is not fails
        assert index.search(VECTORS[0], 3, kind="image").exact == (change == "compact")
        assert index.search(VECTORS[0], 1, kind="image").ids == ["image 0"]
        assert index.verify() == []


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_codes_of_other_shapes_are_no_codes(place: int, tmp_path: Path) -> None:
    table = CodeTable(D)
    table.add(np.arange(9, dtype=np.uint64), VECTORS[:9])
    path = tmp_path / "graph-000001-image.codes"
    table.save(str(path))
    assert table.coder is not None
    arrays = [table.coder.mean, table.coder.rotation, table.keys, np.ascontiguousarray(table._codes.T)]
    CodeTable(D).load(str(path))
    for wrong in (np.zeros((3, 3), np.float32), np.zeros(0, np.int8), arrays[place][:-1]):  # type: ignore[index]
        given = [np.array([1, D], np.int64), *arrays[:place], wrong, *arrays[place + 1 :]]
        with path.open("wb") as file:
            for array in given:
                np.lib.format.write_array(file, array)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            CodeTable(D).load(str(path))


# ---------------------------------------------------------------------- folders


def draw(folder: Path) -> Path:
    folder.mkdir()
    Image.new("RGB", (32, 32), "red").save(folder / "red.png")
    return folder


def test_indexed_folders_are_remembered(home: Path, tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos ü")
    assert machine.known_roots() == []
    index_collection(ColourModel(), photos, tmp_path / "index")
    index_collection(ColourModel(), photos, tmp_path / "index")
    assert machine.known_roots() == [photos.resolve()]


def test_what_is_served_is_not_decided_by_the_index(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = draw(tmp_path / "photos")
    with EmbeddedIndex.create(tmp_path / "index", 3, fingerprint=ColourModel().fingerprint()) as index:
        number = index.collection("all", "/").number
        path = str((photos / "red.png").resolve()).lstrip("/")
        items = [
            Item("secret", path=path, collection=number),
            Item("kept", path=path, collection=number, thumbnail=b"\xff\xd8\xff small"),
        ]
        index.add(items, np.eye(3, dtype=np.float32)[:2])
        assert index.file(items[0]) is not None

        def client(**options: object) -> TestClient:
            return TestClient(create_app(index, ColourModel(), local=True, **options))  # type: ignore[arg-type]

        with client() as unknown:
            assert unknown.get("/api/image", params={"id": "secret"}).status_code == 404
            assert unknown.get("/api/thumbnail", params={"id": "secret"}).status_code == 404
            assert unknown.get("/api/image", params={"id": "kept"}).content == b"\xff\xd8\xff small"
            assert "red.png" not in str(
                unknown.get("/api/items", params={"id": "secret"}).json()[0].get("file")
            )
        with client(roots=[photos]) as told:
            assert (
                told.get("/api/image", params={"id": "secret"}).content == (photos / "red.png").read_bytes()
            )
        machine.record_root(photos)
        with client() as known:
            assert known.get("/api/image", params={"id": "secret"}).status_code == 200


def test_folders_that_are_not_served_are_named(home: Path, tmp_path: Path) -> None:
    photos, others = draw(tmp_path / "photos"), draw(tmp_path / "others")
    with EmbeddedIndex.create(tmp_path / "index", 3) as index:
        for root in (str(photos), str(others), "/gone/elsewhere", "", "a\x00b"):
            index.collection("photos", root)
        machine.record_root(photos)

        class Unlimited:
            body = pixels = 0

        pictures = Pictures(index, Unlimited(), None)  # type: ignore[arg-type]
        (sentence,) = pictures.withheld()
        assert f"--root {others.resolve()}," in sentence
        pictures.close()


def test_a_page_of_answers_holds_no_pictures_of_unknown_folders(home: Path, tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos")
    with EmbeddedIndex.create(tmp_path / "index", 3) as index:
        number = index.collection("all", str(photos)).number
        items = [Item(id, path="red.png", collection=number) for id in ("red", "same")]
        index.add(items, np.eye(3, dtype=np.float32)[:2])
    command = ("search", tmp_path / "index", "--like", "red", "--html", tmp_path / "page.html")
    for options, shown in (((), False), (("--root", photos), True)):
        done = diptych(*command, *options)
        assert ("--root" in done.stderr) is not shown
        assert ("data:image/webp" in (tmp_path / "page.html").read_text()) is shown
