"""A changed bit or a missing end is noticed before it is an answer, and two that create one index make one."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diptych.errors import DiptychError, IndexFault
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item

D = 16
rng = np.random.default_rng(0)
VECTORS = rng.normal(size=(60, D)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in three blocks, texts, thumbnails, removed rows and a graph."""
    path = tmp_path_factory.mktemp("damage") / "index"
    with EmbeddedIndex.create(path, D) as index:
        for start in range(0, 48, 16):
            items = [
                Item(
                    f"image {n}",
                    text=f"a picture of thing number {n}",
                    metadata={"price": n, "name": f"thing {n}"},
                    thumbnail=bytes([n]) * 200,
                )
                for n in range(start, start + 16)
            ]
            index.add(items, VECTORS[start : start + 16])
        texts = [Item(f"text {n}", "text", text=f"text {n}", image_id=f"image {n}") for n in range(12)]
        index.add(texts, VECTORS[48:])
        index.delete(["image 3", "image 20"])
        index.build_graph("image")
    return path


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "index")
    return tmp_path / "index"


def answers(path: Path) -> list[object]:
    """What a user may see of an index."""
    out: list[object] = []
    with EmbeddedIndex.open(path) as index:
        for kind, exact in (("image", True), ("image", None), ("text", True)):
            for hits in index.search_many(VECTORS[:8], 5, kind=kind, exact=exact):  # type: ignore[arg-type]
                out.append([(hit.item, round(hit.score, 6)) for hit in hits])
        for filter in ("price < 20", 'name like "%1"', 'text contains "number 4"'):
            out.append(
                [(hit.item, round(hit.score, 6)) for hit in index.search(VECTORS[0], 9, filter=filter)]
            )
        out.append([(hit.item, round(hit.score, 4)) for hit in index.search_words("thing number 7", 5)])
        out.append([index.thumbnail(f"image {n}") for n in range(48)])
        out.append(index.get([f"image {n}" for n in range(48)] + ["text 1"]))
    return out


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_sound_index_verifies(folder: Path) -> None:
    with EmbeddedIndex.open(folder) as index:
        assert index.verify() == []


@pytest.mark.parametrize("pattern", ["vectors-*-image*", "vectors-*-text*", "graph-*", "index.db"])
def test_no_changed_bit_is_an_answer(pattern: str, sound: Path, folder: Path) -> None:
    expected = answers(sound)
    (file,) = folder.glob(pattern)
    whole = file.read_bytes()
    draw = np.random.default_rng(len(pattern))
    noticed = unnoticed = 0
    for _ in range(60):
        file.write_bytes(whole)
        flip(file, int(draw.integers(len(whole))), int(draw.integers(8)))
        try:
            assert answers(folder) == expected
        except DiptychError:
            noticed += 1
            continue
        with EmbeddedIndex.open(folder) as index:
            unnoticed += index.verify() == []
    if pattern == "graph-*":
        assert unnoticed == 0  # whatever changed, everything is scanned
    elif pattern != "index.db":
        assert noticed == 60
    # what is left of the catalog: free pages, and bytes that SQLite itself does not read


def test_verify_sees_every_item_and_thumbnail(sound: Path, folder: Path) -> None:
    database = folder / "index.db"
    whole = database.read_bytes()
    draw = np.random.default_rng(3)
    places = [whole.index(f"thing number {n}".encode()) for n in (5, 17, 40)]
    places += [whole.index(bytes([n]) * 200) + 20 for n in (7, 33)]
    places += [whole.index(f'"name": "thing {n}"'.encode()) for n in (9, 44)]
    for place in places:
        for bit in draw.choice(8, 3, replace=False).tolist():
            database.write_bytes(whole)
            flip(database, place + int(draw.integers(8)), bit)
            try:
                with EmbeddedIndex.open(folder) as index:
                    assert index.verify()
            except IndexFault:
                pass


def test_the_full_text_is_verified(folder: Path) -> None:
    import sqlite3

    db = sqlite3.connect(folder / "index.db")
    db.execute("INSERT INTO image_words(rowid, text) VALUES (4294967300, 'a stray word')")
    db.commit()
    db.close()
    with EmbeddedIndex.open(folder) as index:
        assert any("full text" in fault for fault in index.verify())


def test_vectors_cut_short_under_a_reader_are_refused_and_it_lives(folder: Path) -> None:
    """In a process of its own: what is wrong here would end it."""
    code = f"""
import os, numpy as np
from pathlib import Path
from diptych.errors import IndexFault
from diptych.index.engines.embedded.index import EmbeddedIndex
folder = Path({str(folder)!r})
with EmbeddedIndex.open(folder) as index:
    q = np.ones({D}, np.float32)
    assert len(index.search(q, 5, exact=True)) == 5
    os.truncate(next(folder.glob("vectors-*-image*")), 100)
    for ask in (lambda: index.search(q, 5, exact=True), lambda: index.vectors(["image 40"]),
                lambda: index.search(q, 5, filter="price < 30"), lambda: index.sample("image")):
        try:
            ask()
            raise SystemExit("not refused")
        except IndexFault as error:
            assert "has 100 of" in str(error), error
    assert len(index.search(q, 5, kind="text", exact=True)) == 5  # the others are served on
    print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_a_damaged_graph_is_told_and_built_again(
    sound: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (graph,) = folder.glob("graph-*")
    flip(graph, graph.stat().st_size // 2, 1)
    with caplog.at_level(logging.WARNING), EmbeddedIndex.open(folder, writable=True) as index:
        assert index.search(VECTORS[0], 5, kind="image").exact
        assert index.search(VECTORS[0], 5, kind="image").exact
        assert len(caplog.records) == 1
        assert "until 'diptych index' builds it again" in caplog.text
        with pytest.raises(IndexFault, match="image"):
            index.search(VECTORS[0], 5, kind="image", exact=False)
        index.build_graph("image")
        assert not index.search(VECTORS[0], 5, kind="image").exact
        assert index.verify() == []


def test_changes_keep_every_checksum(folder: Path) -> None:
    with EmbeddedIndex.open(folder, writable=True) as index:
        index.update([Item("image 5", text="again", thumbnail=b"x")], VECTORS[5:6])
        index.delete([f"image {n}" for n in range(30, 40)])
        assert index.verify() == []
        index.compact()
        assert index.verify() == []
        assert index.thumbnail("image 5") == b"x"
        index.add([Item("new", text="one more")], VECTORS[:1])
        assert index.search(VECTORS[0], 1, kind="image", exact=True)[0].score == pytest.approx(1)
    with EmbeddedIndex.open(folder) as index:
        assert index.verify() == []


def test_two_processes_that_create_one_index_make_one(tmp_path: Path) -> None:
    code = """
import sys, time
import numpy as np
from diptych.errors import DiptychError
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item
print("ready", flush=True)
for line in sys.stdin:
    place, start = line.split()
    time.sleep(max(0.0, float(start) - time.time()))
    try:
        with EmbeddedIndex.create(place, 4) as index:
            index.add([Item("a")], np.ones((1, 4)))
        print("made", flush=True)
    except DiptychError as error:
        print("refused:", error, flush=True)
"""
    rounds = 30
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        import time

        for number in range(rounds):
            place = tmp_path / f"index{number}"
            if number % 3 == 0:
                place.mkdir()
            for worker in workers:
                worker.stdin.write(f"{place} {time.time() + 0.03}\n")  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]
            said = [worker.stdout.readline() for worker in workers]  # type: ignore[union-attr]
            assert sorted(line.startswith("made") for line in said) == [False, False, True], said
            with EmbeddedIndex.open(place) as index:
                assert index.count() == 1
                assert index.verify() == []
    finally:
        for worker in workers:
            worker.communicate()
    assert {p.name for p in tmp_path.iterdir()} == {f"index{n}" for n in range(rounds)}
    assert os.stat(tmp_path / "index0" / "index.db").st_mode & 0o777 == 0o666 & ~_umask(tmp_path)


def _umask(folder: Path) -> int:
    (folder / "probe").touch()
    return ~(folder / "probe").stat().st_mode & 0o777


def test_warming_finds_damage_before_a_search(folder: Path) -> None:
    with EmbeddedIndex.open(folder) as index:
        index.warm()
    (file,) = folder.glob("vectors-*-text*")
    flip(file, 5, 1)
    with EmbeddedIndex.open(folder) as index, pytest.raises(IndexFault, match=r"vectors-000002-text\.f32"):
        index.warm()
