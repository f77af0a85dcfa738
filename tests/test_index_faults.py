"""The embedded index where things go wrong: disks, threads, neighbours, and names that are no names."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from colour_model import ColourModel
from disks import fill, grow, make_read_only, small_disk

from diptych.errors import DataError, IndexFault, StorageError
from diptych.index.engines.embedded import approximate, catalog, scan, segments
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.opening import open_index
from diptych.index.protocol import Item, Vectors

D = 64


def rows(n: int, seed: int = 0) -> Vectors:
    made = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    return np.asarray(made / np.linalg.norm(made, axis=1, keepdims=True))


def items(n: int, start: int = 0) -> list[Item]:
    return [Item(f"i{k}", text=f"number {k}", metadata={"n": k}) for k in range(start, start + n)]


def fails(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[EmbeddedIndex]:
    with EmbeddedIndex.create(tmp_path / "x.index", D) as made:
        made.add(items(50), rows(50))
        yield made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1) as made:
        yield made


def add_for_ever(index: EmbeddedIndex) -> None:
    for start in range(0, 10**6, 50):
        index.add(items(50, start), rows(50, seed=start))


# ---------------------------------------------------------------------- a real full or read-only disk


def test_a_full_disk_refuses_writes_and_loses_nothing(disk: Path) -> None:
    path = disk / "i"
    with EmbeddedIndex.create(path, D) as index:
        with pytest.raises(StorageError, match="disk/i"):
            add_for_ever(index)
        stored = len(index)
    assert stored > 0
    fill(disk)
    for writable in (False, True):  # what is acknowledged is there while the disk is still full
        with EmbeddedIndex.open(path, writable=writable) as index:
            assert len(index) == stored
            assert index.verify() == []
            assert index.search(rows(1)[0], 1).ids == ["i0"]
    with EmbeddedIndex.open(path, writable=True) as index:
        with pytest.raises(StorageError, match=r"vectors-000001-image\.f32"):
            index.add(items(50, 10_000), rows(50))
        with pytest.raises(StorageError, match=r"graph-000014-image\.usearch"):
            index.build_graph("image")
        assert not list(path.glob("graph-*"))
    grow(disk)
    with EmbeddedIndex.open(path, writable=True) as index:
        assert index.delete([f"i{n}" for n in range(50)]) == 50
        assert len(index) == stored - 50
        assert index.verify() == []


def test_a_write_that_fails_gives_the_disk_back(disk: Path) -> None:
    with EmbeddedIndex.create(disk / "i", D) as index:
        index.add(items(1500), rows(1500))
        index.delete([f"i{n}" for n in range(10)])
        file = disk / "i" / "vectors-000001-image.f32"
        for change in (lambda: index.add(items(5000, 2000), rows(5000)), index.compact):
            with pytest.raises(StorageError):
                change()
            assert file.stat().st_size == 1500 * D * 4
            assert list((disk / "i").glob("vectors-*")) == [file]
            assert index.delete([f"i{len(index)}"]) == 1  # as one does to make room
    with file.open("ab") as end:
        end.write(b"what a killed writer left")
    with EmbeddedIndex.open(disk / "i", writable=True):
        assert file.stat().st_size == 1500 * D * 4


def test_an_index_is_searched_on_a_full_disk(disk: Path) -> None:
    with EmbeddedIndex.create(disk / "i", D) as index:
        index.add(items(50), rows(50))
    fill(disk)  # not even the index of SQLite's log has room
    with EmbeddedIndex.open(disk / "i") as index:
        assert index.search(rows(1)[0], 1).ids == ["i0"]
        assert index.verify() == []
    with pytest.raises(StorageError, match="disk/i"):
        EmbeddedIndex.open(disk / "i", writable=True)


def test_a_full_disk_has_no_room_for_a_new_index(disk: Path) -> None:
    ballast = fill(disk)
    with pytest.raises(StorageError):
        EmbeddedIndex.create(disk / "i", D)
    ballast.unlink()
    EmbeddedIndex.create(disk / "i", D).close()


def test_a_read_only_disk_is_read(disk: Path) -> None:
    with EmbeddedIndex.create(disk / "i", D) as index:
        index.add(items(50), rows(50))
    make_read_only(disk)
    with EmbeddedIndex.open(disk / "i") as index:
        assert index.search(rows(1)[0], 1).ids == ["i0"]
    with pytest.raises(StorageError, match="Read-only"):
        EmbeddedIndex.open(disk / "i", writable=True)
    with pytest.raises(StorageError, match="Read-only"):
        EmbeddedIndex.create(disk / "j", D)


def test_a_failed_opening_keeps_nothing_open(disk: Path) -> None:
    with EmbeddedIndex.create(disk / "i", D) as index:
        index.add(items(50), rows(50))
    next((disk / "i").glob("vectors-*")).unlink()
    for writable in (False, True):
        with pytest.raises(IndexFault, match="disk/i"):
            EmbeddedIndex.open(disk / "i", writable=writable)
    make_read_only(disk)  # refused while a file is open for writing


# ---------------------------------------------------------------------- readers and writers side by side


def test_the_name_of_a_file_is_synced_until_rows_of_it_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, path = segments.RowLayout(D, "float32"), tmp_path / "vectors"
    path.write_bytes(b"the remains of a first append that failed before it synced the folder")
    synced: list[Path] = []
    sync = segments.sync
    monkeypatch.setattr(segments, "sync", lambda folder: (sync(folder), synced.append(folder)))
    for committed, count in ((0, 1), (0, 2), (5, 2)):  # the second: the first was not committed either
        segments.append(path, layout, committed, rows(5))
        assert synced == [tmp_path] * count
    np.testing.assert_array_equal(segments.attach(path, layout, 10).stored, np.tile(rows(5), (2, 1)))


@pytest.mark.parametrize("act", [EmbeddedIndex.close, EmbeddedIndex.compact])
def test_a_writer_waits_for_no_reader(index: EmbeddedIndex, act: Callable[[EmbeddedIndex], object]) -> None:
    reading, done = threading.Event(), threading.Event()

    def read() -> None:
        with EmbeddedIndex.open(index.path) as reader:
            reader._store.read(lambda state, db: (reading.set(), done.wait(20)))

    thread = threading.Thread(target=read)
    thread.start()
    reading.wait()
    index.delete(["i0"])
    start = time.monotonic()
    act(index)
    assert time.monotonic() - start < 5
    done.set()
    thread.join()
    index.close()
    with EmbeddedIndex.open(index.path, writable=True) as again:
        assert len(again) == 49


def test_another_thread_may_close_an_index(index: EmbeddedIndex) -> None:
    lock = index._store._lock
    assert lock is not None
    thread = threading.Thread(target=index.close)
    thread.start()
    thread.join()
    assert not lock.is_locked
    EmbeddedIndex.open(index.path, writable=True).close()


def test_what_an_index_says_while_another_process_compacts(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that vanish while they are looked at are no fault, and no crash."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16 * D * 4)
    failures: list[BaseException] = []
    stop = threading.Event()

    def look() -> None:
        try:
            with EmbeddedIndex.open(index.path) as reader:
                while not stop.is_set():
                    assert reader.info.size > 0
                    assert reader.verify() == []
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(15):
        index.add(items(40, 100 * (turn + 1)), rows(40, seed=turn))
        index.delete([f"i{n}" for n in range(100 * (turn + 1), 100 * (turn + 1) + 20)])
        index.compact()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_no_more_files_may_be_opened(index: EmbeddedIndex) -> None:
    """The first of several files cannot be opened, then the second, and so on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    index.close()
    refused = 0
    for free in range(14):
        held = [os.open(index.path, os.O_RDONLY) for _ in range(14)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        for one in held[:free]:
            os.close(one)
        try:
            with EmbeddedIndex.open(index.path, writable=True) as again:
                assert again.search(rows(1)[0], 1).ids == ["i0"]
                again.compact()
        except StorageError:
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for one in held[free:]:
                os.close(one)
    assert 3 < refused < 14


def test_a_folder_that_cannot_be_listed_is_one_sentence(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer looks for remains first."""

    index.close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", fails)
        with pytest.raises(StorageError, match=str(index.path)):
            EmbeddedIndex.open(index.path, writable=True)
    EmbeddedIndex.open(index.path, writable=True).close()


def test_a_graph_that_cannot_be_read_back_is_one_sentence(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is read for its checksum; what was there before stays."""

    with monkeypatch.context() as patch:
        patch.setattr(approximate, "signed", fails)
        with pytest.raises(StorageError, match=str(index.path)):
            index.build_graph("image", codes=True)
    assert not index.info.approximate
    assert index.search(rows(1)[0], 1).ids == ["i0"]
    index.build_graph("image", codes=True)
    assert index.info.approximate


def test_a_catalog_that_cannot_be_asked_for_is_one_sentence(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer looks first whether its catalog still lies there."""

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "identity", fails)
        with pytest.raises(StorageError, match=str(index.path)):
            index.delete(["i0"])
    assert index.search(rows(1)[0], 1).ids == ["i0"]


def test_a_missing_file_is_a_fault(index: EmbeddedIndex) -> None:
    assert index.count() == 50
    file = next(index.path.glob("vectors-*"))
    file.unlink()
    assert index.verify() == [f"{file.name} is missing."]


# ---------------------------------------------------------------------- names and texts


def test_a_folder_that_is_no_index_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(IndexFault, match=r"index\.db"):
        EmbeddedIndex.open(tmp_path, writable=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "item",
    [
        Item("\ud800"),
        Item("new", text="half a pair \ud83d"),
        Item("new", path="\udcff.jpg"),
        Item("new", metadata={"title": "\ud800"}),
        Item("new", metadata={"\ud800": 1}),
        Item("new", content="\ud800"),
    ],
)
def test_what_is_no_text_is_refused(index: EmbeddedIndex, item: Item) -> None:
    with pytest.raises(DataError, match=r"\\ud[0-9a-f]{3}"):
        index.add([item], rows(1))
    assert len(index) == 50
    assert index.thumbnail("\ud800") is None
    assert index.get(["\ud800"]) == [None]
    assert index.delete(["\ud800"]) == 0


def test_odd_names_and_long_texts_come_back_as_they_were(index: EmbeddedIndex) -> None:
    odd = [
        Item("ключ/鍵 🔑.jpg", text="a\x00b"),
        Item("e\u0301"),  # é in two characters: another name than é in one
        Item("\u00e9"),
        Item("x" * 5000, text="long word " * 100_000),
        Item("'; DROP TABLE items; --", metadata={"a b`c": "\x00"}),
        Item("i0#text0", "text", text="of an image", image_id="i0"),
    ]
    index.add(odd, rows(len(odd), seed=1))
    found = index.get([item.id for item in odd])
    assert found == odd
    assert index.search_words("b", 5).ids == [odd[0].id]
    index.update([Item(item.id, item.kind, text="changed") for item in odd], rows(len(odd), seed=2))
    index.compact()
    assert index.verify() == []
    assert index.search_words("b", 5).ids == []
    assert index.delete([item.id for item in odd]) == len(odd)
    index.compact()
    assert index.verify() == []
    assert len(index) == 50


def test_a_copy_of_a_live_index_is_whole(index: EmbeddedIndex, tmp_path: Path) -> None:
    shutil.copytree(index.path, tmp_path / "copy")
    with EmbeddedIndex.open(tmp_path / "copy") as copy:
        assert len(copy) == 50
        assert copy.verify() == []


# ---------------------------------------------------------------------- equal and nearly equal scores


def test_scores_of_tiny_vectors_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_TIES", 50)
    vectors, query = rows(500) * np.float32(1e-6), rows(1, seed=7)[0]
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add(items(500), vectors)
        best = np.argsort(-(vectors.astype(np.float64) @ query))[:5]
        assert index.search(query, 5).ids == [f"i{n}" for n in best]


def test_equal_scores_of_huge_vectors_keep_the_order_of_addition(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(1 << 22, 1 << 24, D).astype(
        np.float32
    )  # whole numbers: float64 adds them without an error
    vectors = np.stack([rng.permutation(values) for _ in range(400)])
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add(items(400), vectors)
        assert index.search(np.ones(D, np.float32), 5).ids == [f"i{n}" for n in range(5)]


def test_compaction_keeps_the_order_of_equal_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16 * D * 4)
    one = rows(1)
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        for item in items(60):
            index.add([item, Item(f"{item.id}#text0", "text")], np.repeat(one, 2, axis=0))
        index.delete(["i3", "i40"])
        before = {kind: index.search(one[0], 120, kind=kind).ids for kind in (None, "image", "text")}
        assert before["image"] == [f"i{n}" for n in range(60) if n not in (3, 40)]
        index.compact()
        assert {kind: index.search(one[0], 120, kind=kind).ids for kind in (None, "image", "text")} == before
        index.delete(["i20"])
        index.compact()
        assert index.search(one[0], 120, kind="image").ids == [id for id in before["image"] if id != "i20"]
        assert index.verify() == []


# ---------------------------------------------------------------------- filters and snapshots


def test_a_filter_of_an_older_snapshot_sees_what_was_there_then(index: EmbeddedIndex) -> None:
    with index._store.reading() as db:
        old = index._store.state
        db.execute("SELECT 1 FROM meta").fetchone()  # the snapshot begins
        index.delete(["i7"])
        index._read(lambda state, now: index._columns.select(state, now, "n < 10", None))
        for filter, expected in (("n < 10", 10), ("n = null", 0)):
            chosen = index._columns.select(old, db, filter, None)
            assert sum(map(len, chosen.values())) == expected
    assert len(index.search(rows(1)[0], 50, filter="n < 10")) == 9


def test_a_column_that_becomes_metadata_is_read_anew(index: EmbeddedIndex) -> None:
    query = rows(1)[0]
    assert index.search(query, 5, filter="text = 'number 3'").ids == ["i3"]
    index.add([Item("new", metadata={"text": "number 3"})], rows(1, seed=8))
    assert index.search(query, 5, filter="text = 'number 3'").ids == ["new"]


# ---------------------------------------------------------------------- another index in the same place


def rebuild(path: Path, seed: int) -> None:
    """Put another index of as many changes in the place of one."""
    shutil.rmtree(path)
    with EmbeddedIndex.create(path, D) as index:
        index.add([Item(f"other{n}") for n in range(50)], rows(50, seed))


@pytest.mark.parametrize("asked_before", [False, True])
def test_an_index_made_anew_is_not_taken_for_the_one_that_was_open(
    tmp_path: Path, asked_before: bool
) -> None:
    path = tmp_path / "x.index"
    with EmbeddedIndex.create(path, D) as first:
        first.add(items(50), rows(50))
    with EmbeddedIndex.open(path) as reader:
        if not asked_before:  # then the reader has no connection to the old files left
            for db in reader._store._idle:
                db.close()
            reader._store._idle.clear()
        rebuild(path, seed=1)
        with pytest.raises(IndexFault, match=r"x\.index"):
            reader.search(rows(1)[0], 1)
    with EmbeddedIndex.open(path) as reader:
        assert reader.search(rows(1, seed=1)[0], 1).ids == ["other0"]


def test_a_writer_does_not_write_into_an_index_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    with EmbeddedIndex.create(path, D) as writer:
        writer.add(items(50), rows(50))
        rebuild(path, seed=1)
        with pytest.raises(IndexFault, match=r"x\.index"):
            writer.add(items(5, 100), rows(5, seed=2))
    with EmbeddedIndex.open(path) as reader:
        assert reader.verify() == []
        assert len(reader) == 50


def test_a_service_does_not_write_into_an_index_of_another_model(tmp_path: Path) -> None:
    model = ColourModel()
    EmbeddedIndex.create(tmp_path / "i", model.dim, model="other", fingerprint="f00d").close()
    with pytest.raises(IndexFault, match=r"other.*f00d"):
        open_index(tmp_path / "i", writable=True, fingerprint=model.fingerprint())
