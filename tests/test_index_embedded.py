"""The embedded index: exact answers, changes, readers beside a writer, and all that can be wrong."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from diptych import progress
from diptych.errors import DataError, IndexFault, QueryError, SettingsError, StorageError
from diptych.index.base import Index
from diptych.index.engines.embedded import segments, words
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.opening import empty_index, index_exists, open_index
from diptych.index.protocol import PRECISIONS, Item, Precision, Vectors

D = 24


def unit_rows(n: int, seed: int = 0, dimension: int = D) -> Vectors:
    rows = np.random.default_rng(seed).normal(size=(n, dimension)).astype(np.float32)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def images(n: int, start: int = 0) -> list[Item]:
    return [Item(f"i{k}", text=f"number {k}", metadata={"n": k}) for k in range(start, start + n)]


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16 * D * 4)


@pytest.fixture
def index(tmp_path: Path) -> EmbeddedIndex:
    made = EmbeddedIndex.create(tmp_path / "x.index", D, model="mine", fingerprint="f00d")
    made.add(images(50), unit_rows(50))
    return made


def stored(rows: Vectors, precision: Precision) -> np.ndarray:
    """What each precision keeps of a vector, in float64."""
    if precision == "binary":
        return np.where(rows >= 0, 1.0, -1.0) / np.sqrt(rows.shape[1])
    return rows.astype(np.float16 if precision == "float16" else np.float32).astype(np.float64)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("count", [1, 7, 100])
def test_search_is_exact(tmp_path: Path, precision: Precision, count: int, small_segments: None) -> None:
    rows, queries = unit_rows(count), unit_rows(5, seed=9)
    kept = stored(rows, precision)
    gone = {f"i{n}" for n in range(0, count, 5)} if count > 5 else set()
    with EmbeddedIndex.create(tmp_path / "i", D, precision=precision) as index:
        index.add(images(count), rows)
        index.delete(sorted(gone))
        for query, hits in zip(queries, index.search_many(queries, 10), strict=True):
            scores = {}
            for n in range(count):  # the definition, slowly
                if f"i{n}" not in gone:
                    scores[f"i{n}"] = sum(float(a) * float(b) for a, b in zip(kept[n], query, strict=True))
            expected = sorted(scores, key=lambda id: -scores[id])[:10]
            np.testing.assert_allclose(hits.scores, [scores[id] for id in expected], atol=1e-7)
            assert precision == "binary" or hits.ids == expected  # binary has ties
            assert hits.exact


def test_a_batch_answers_exactly_like_single_queries(index: EmbeddedIndex) -> None:
    queries = unit_rows(33, seed=5)
    together = index.search_many(queries, 7)
    for query, hits in zip(queries, together, strict=True):
        alone = index.search(query, 7)
        assert alone.ids == hits.ids
        assert alone.scores == hits.scores  # bit for bit


def test_ties_keep_the_order_of_adding(tmp_path: Path) -> None:
    same = np.repeat(unit_rows(1), 30, axis=0)
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add(images(30), same)
        assert index.search(same[0], 8).ids == [f"i{n}" for n in range(8)]


def test_more_hits_than_items_gives_all(index: EmbeddedIndex) -> None:
    assert len(index.search(unit_rows(1)[0], 500)) == 50


def test_kinds_are_searched_apart_or_together(index: EmbeddedIndex) -> None:
    rows = unit_rows(3, seed=2)
    index.add([Item(f"t{n}", "text", text="t", image_id="i0") for n in range(3)], rows)
    assert index.search(rows[0], 3, kind="text").ids[0] == "t0"
    assert not set(index.search(rows[0], 50, kind="image").ids) & {"t0", "t1", "t2"}
    assert index.search(rows[0], 1).ids == ["t0"]
    assert (index.count("image"), index.count("text"), len(index)) == (50, 3, 53)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.6])
def test_a_filtered_search_is_exact_and_full(tmp_path: Path, share: float) -> None:
    count = 1000
    rows = unit_rows(count)
    chosen = set(np.random.default_rng(3).choice(count, int(count * share), replace=False).tolist())
    items = [Item(f"i{n}", metadata={"chosen": n in chosen, "n": n}) for n in range(count)]
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add(items, rows)
        dropped = sorted(chosen)[0]
        index.delete([f"i{dropped}"])
        query = unit_rows(1, seed=7)[0]
        scores = rows.astype(np.float64) @ query.astype(np.float64)
        expected = sorted(chosen - {dropped}, key=lambda n: -scores[n])[:10]
        hits = index.search(query, 10, filter="chosen = true")
        assert hits.ids == [f"i{n}" for n in expected]
        assert len(index.search(query, count, filter="chosen = true")) == len(chosen) - 1
        assert index.search(query, 10, filter="n < 0").ids == []


def test_words_rank_by_bm25(tmp_path: Path) -> None:
    texts = ["a red shoe", "a red car and a red bus", "blue shoes", "nothing at all", ""]
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add([Item(f"i{n}", text=t, metadata={"n": n}) for n, t in enumerate(texts)], unit_rows(5))
        assert index.search_words("shoe red", 5).ids[0] == "i0"
        assert set(index.search_words("shoe", 5).ids) == {"i0", "i2"}  # shoes and shoe share their stem
        assert index.search_words("shoe", 5, filter="n > 0").ids == ["i2"]
        assert index.search_words("zebra", 5).ids == []
        assert index.search_words('") OR 1=1; DROP TABLE items --', 5).ids == []
        assert index.search_words("+ - * ()", 5).ids == []
        index.update([Item("i0", text="a green hat")], unit_rows(1))
        assert index.search_words("shoe", 5).ids == ["i2"]
        index.delete(["i2"])
        index.compact()
        assert index.search_words("shoe", 5).ids == []
        assert index.search_words("hat", 5).ids == ["i0"]
        assert index.verify() == []


def test_common_words_are_left_out_while_others_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "COMMON", 10)
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        texts = ["the dog" if n % 40 == 0 else "the thing" for n in range(200)]
        index.add([Item(f"i{n}", text=t) for n, t in enumerate(texts)], unit_rows(200))
        assert set(index.search_words("the dog", 200).ids) == {f"i{n}" for n in range(0, 200, 40)}
        assert len(index.search_words("the", 200)) == 200  # nothing else to go by
        index.add([Item(f"d{n}", text="dog") for n in range(30)], unit_rows(30, seed=1))
        assert len(index.search_words("the dog", 300)) == 230  # both are common now


def test_few_of_ever_new_words_are_remembered(index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "COMMON", 10)
    monkeypatch.setattr(words, "REMEMBERED", 20)
    for n in range(100):
        index.search_words(f"new{n} number", 5, kind="image")
    assert 0 < len(index._words._common) <= 21


def test_update_replaces_and_delete_removes(index: EmbeddedIndex) -> None:
    new = unit_rows(1, seed=4)
    index.update([Item("i3", text="other", metadata={"n": -1}, thumbnail=b"jpeg")], new)
    assert len(index) == 50
    assert index.search(new[0], 1).ids == ["i3"]
    item = index.get(["i3", "nobody"])
    assert item[0] is not None
    assert item[0].metadata == {"n": -1}
    assert item[1] is None
    assert index.thumbnail("i3") == b"jpeg"
    assert index.delete(["i3", "nobody"]) == 1
    assert index.get(["i3"]) == [None]
    assert index.thumbnail("i3") is None
    assert "i3" not in index.search(new[0], 50).ids


def test_texts_leave_with_their_image(index: EmbeddedIndex) -> None:
    index.add(
        [Item("i1#text0", "text", image_id="i1"), Item("i2#text0", "text", image_id="i2")], unit_rows(2)
    )
    assert index.delete(["i1"]) == 1
    assert index.get(["i1#text0"]) == [None]
    assert index.get(["i2#text0"]) != [None]


def test_verifying_and_compacting_say_how_far_they_are(
    index: EmbeddedIndex,
    small_segments: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0)
    index.add(images(60, 50), unit_rows(60, seed=1))
    index.delete(["i0"])
    index.verify()
    index.compact()
    assert capsys.readouterr().err == ""
    index.delete(["i1"])
    count = len(list(index.path.glob("vectors-*")))
    assert count > 1
    index.verify(show_progress=True)
    assert f"segments of vectors: {count}/{count}" in capsys.readouterr().err
    index.compact(show_progress=True)
    assert f"segments of images: {count}/{count}" in capsys.readouterr().err


def test_compaction_keeps_what_is_there(index: EmbeddedIndex, small_segments: None) -> None:
    index.add(images(60, 50), unit_rows(60, seed=1))
    index.update([Item("i7", thumbnail=b"x")], unit_rows(1, seed=8))
    index.delete([f"i{n}" for n in range(0, 100, 2)])
    queries = unit_rows(6, seed=3)
    before = index.search_many(queries, 20)
    freed = index.compact()
    after = index.search_many(queries, 20)
    assert freed > 0
    assert [h.ids for h in after] == [h.ids for h in before]
    assert [h.scores for h in after] == [h.scores for h in before]
    assert index.info.deleted == 0
    assert index.thumbnail("i7") == b"x"
    assert index.verify() == []
    size = sum(f.stat().st_size for f in index.path.glob("vectors-*"))
    assert size == len(index) * D * 4
    assert index.compact() == 0
    index.delete(index.search(queries[0], 200).ids)
    index.compact()
    assert len(index) == 0
    assert index.search(queries[0], 3).ids == []
    index.add(images(1), unit_rows(1))
    assert index.search(queries[0], 3).ids == ["i0"]


def test_vectors_and_sample(index: EmbeddedIndex) -> None:
    rows = unit_rows(50)
    assert np.array_equal(index.vectors(["i9", "i2"]), rows[[9, 2]])
    with pytest.raises(QueryError, match="nobody"):
        index.vectors(["nobody"])
    assert index.sample(size=10).shape == (10, D)
    assert np.array_equal(index.sample(size=10), index.sample(size=10))
    assert np.array_equal(index.sample(), rows)
    assert np.array_equal(index.sample(filter="n < 3"), rows[:3])


def test_near_duplicates(tmp_path: Path) -> None:
    rows = unit_rows(300)
    rows[250] = rows[3] + 0.01
    rows[251] = rows[3] + 0.02
    scores = rows.astype(np.float64) @ rows.T.astype(np.float64)
    pairs = sorted(
        ((scores[a, b], f"i{a}", f"i{b}") for a in range(300) for b in range(a + 1, 300)), reverse=True
    )
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add(images(300), rows)
        best = index.near_duplicates(limit=40)
        assert [(p.first.id, p.second.id) for p in best] == [(a, b) for _, a, b in pairs[:40]]
        above = index.near_duplicates(threshold=0.9, limit=1000)
        assert {(p.first.id, p.second.id) for p in above} == {(a, b) for s, a, b in pairs if s >= 0.9}
        index.delete(["i3"])
        assert [(p.first.id, p.second.id) for p in index.near_duplicates(limit=1)] == [("i250", "i251")]
        with pytest.raises(SettingsError, match=r"\b1\b.*\b0\b"):
            index.near_duplicates(limit=0)


def test_near_duplicates_cross_blocks(index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = index.near_duplicates(limit=25)
    monkeypatch.setattr("diptych.index.scoring.BLOCK", 7)
    pieces = index.near_duplicates(limit=25)
    assert [(p.first.id, p.second.id) for p in pieces] == [(p.first.id, p.second.id) for p in whole]


def test_info_and_collections(index: EmbeddedIndex, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    (tmp_path / "secret.jpg").write_bytes(b"x")
    (tmp_path / "photos" / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    collection = index.collection("photos", str(tmp_path / "photos"))
    assert index.collection("photos", str(tmp_path / "photos")) == collection
    assert index.collection("other").number == 1
    info = index.info
    assert (info.dimension, info.model, info.fingerprint, info.precision) == (D, "mine", "f00d", "float32")
    assert info.counts == {"image": 50, "text": 0}
    assert len(info) == 50
    assert info.columns == {"n": ("number",)}
    assert [c.name for c in info.collections] == ["photos", "other"]
    assert index.file(Item("a", path="a.jpg")) == (tmp_path / "photos" / "a.jpg")
    for path in ("../secret.jpg", "link.jpg", str(tmp_path / "secret.jpg"), "nothing.jpg", ""):
        assert index.file(Item("a", path=path)) is None
    assert index.file(Item("a", path="a.jpg", collection=1)) is None


def test_contents(index: EmbeddedIndex) -> None:
    index.add([Item("x", content="1"), Item("y", "text", content="2", collection=1)], unit_rows(2))
    assert dict(index.contents(1)) == {"y": "2"}
    assert dict(index.contents(0, "image"))["x"] == "1"


# ---------------------------------------------------------------------- readers beside a writer


def test_a_reader_sees_each_finished_operation(index: EmbeddedIndex) -> None:
    query = unit_rows(1, seed=4)
    with EmbeddedIndex.open(index.path) as reader:
        assert len(reader) == 50
        generation = reader.generation
        index.add([Item("new")], query)
        assert reader.search(query[0], 1).ids == ["new"]
        assert reader.generation == generation + 1
        index.delete(["new"])
        assert reader.search(query[0], 50).ids.count("new") == 0


def test_a_reader_does_not_see_half_an_operation(index: EmbeddedIndex) -> None:
    query = unit_rows(1, seed=4)[0]
    with EmbeddedIndex.open(index.path) as reader:
        before = reader.search(query, 50).ids
        with index._store.writing() as db:
            from diptych.index.engines.embedded import store

            store.remove(db, ["i0"])
            store.insert(db, index.path, index._layout, [Item("new")], query[None])
            assert reader.search(query, 50).ids == before
        assert reader.search(query, 1).ids == ["new"]


def test_a_reader_outlives_compaction(index: EmbeddedIndex) -> None:
    query = unit_rows(1, seed=4)[0]
    with EmbeddedIndex.open(index.path) as reader:
        index.delete(["i0"])
        expected = reader.search(query, 10).ids
        state = reader._store._state
        index.compact()
        assert state is not None
        assert len(state.segments[0].rows.between(0, 1)[0]) == D
        assert reader.search(query, 10).ids == expected


def test_one_writer_at_a_time(index: EmbeddedIndex) -> None:
    with pytest.raises(IndexFault, match=r"x\.index"):
        EmbeddedIndex.open(index.path, writable=True)
    index.close()
    EmbeddedIndex.open(index.path, writable=True).close()


def test_a_reader_cannot_write(index: EmbeddedIndex) -> None:
    with EmbeddedIndex.open(index.path) as reader, pytest.raises(IndexFault, match=r"x\.index"):
        reader.delete(["i0"])


def test_threads_search_while_one_writes(index: EmbeddedIndex) -> None:
    queries = unit_rows(4, seed=6)
    failures: list[BaseException] = []
    stop = threading.Event()

    def search() -> None:
        try:
            while not stop.is_set():
                for query in queries:
                    ids = index.search(query, 200, filter="n >= 0").ids
                    extra = [id for id in ids if int(id[1:]) >= 50]
                    # each batch of ten is there whole or not at all
                    assert len(ids) - len(extra) == 50
                    assert len(extra) % 10 == 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(15):
        index.add(images(10, 50 + 10 * turn), unit_rows(10, seed=turn))
        if turn % 5 == 4:
            index.delete([f"i{n}" for n in range(50 + 10 * (turn - 1), 60 + 10 * (turn - 1))])
            index.compact()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert index.verify() == []


# ---------------------------------------------------------------------- bad input


def test_wrong_arguments_say_so(index: EmbeddedIndex) -> None:
    row = unit_rows(1)[0]
    with pytest.raises(SettingsError, match=r"\b1\b.*\b0\b"):
        index.search(row, 0)
    with pytest.raises(IndexFault, match=rf"1×3.*\b{D}\b.*'mine'"):
        index.search(row[:3])
    with pytest.raises(DataError, match=r"\b0\b"):
        index.search(row * np.nan)
    with pytest.raises(DataError, match=r"\b1\b"):
        index.add(images(2, 90), np.stack([row, row * np.inf]))
    with pytest.raises(DataError, match=r"\b1\b"):
        index.add(images(2, 90), np.stack([row, row * np.float32(3e19)]))
    with pytest.raises(DataError, match=r"\b2\b.*\b1\b"):
        index.add(images(2, 90), row[None])
    with pytest.raises(DataError, match="'i90'"):
        index.add([*images(1, 90), *images(1, 90)], unit_rows(2))
    with pytest.raises(IndexFault, match="'i3'"):
        index.add(images(1, 3), row[None])
    with pytest.raises(DataError, match="'x'"):
        index.add([Item("new", metadata={"x": {"a": 1}})], row[None])
    with pytest.raises(DataError, match="'new'"):
        index.add([Item("new", metadata={"x": float("nan")})], row[None])
    with pytest.raises(QueryError, match="'n'"):
        index.search(row, 5, filter="nn < 3")
    assert len(index) == 50
    assert index.verify() == []


def test_numbers_beyond_float16_are_refused_without_a_warning(tmp_path: Path) -> None:
    with EmbeddedIndex.create(tmp_path / "i", D, precision="float16") as index:
        with pytest.raises(SettingsError, match=r"100000.*float32"):
            index.add(images(1), np.full((1, D), 1e5, np.float32))
        assert len(index) == 0


def test_nothing_to_add_or_find(tmp_path: Path) -> None:
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add([], np.zeros((0, D)))
        assert index.search(unit_rows(1)[0], 3).ids == []
        assert index.search_words("x", 3).ids == []
        assert index.near_duplicates() == []
        assert index.sample().shape == (0, D)
        assert index.compact() == 0
        assert index.verify() == []


def test_another_model_is_refused_by_name(index: EmbeddedIndex) -> None:
    index.close()
    with pytest.raises(IndexFault, match=r"mine.*f00d.*yours"):
        open_index(index.path, fingerprint="beef", model="yours")
    with open_index(index.path, fingerprint="f00d") as same:
        assert len(same) == 50


def test_creating_over_something_is_refused(index: EmbeddedIndex, tmp_path: Path) -> None:
    with pytest.raises(IndexFault, match=r"x\.index"):
        EmbeddedIndex.create(index.path, D)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.jpg").touch()
    with pytest.raises(IndexFault, match="full"):
        empty_index(tmp_path / "full", D)
    assert (tmp_path / "full" / "photo.jpg").exists()
    with pytest.raises(SettingsError, match="precision 'int3'"):
        EmbeddedIndex.create(tmp_path / "new", D, precision="int3")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"\b1\b"):
        EmbeddedIndex.create(tmp_path / "new", 0)


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    assert not index_exists(tmp_path)
    for writable in (False, True):
        with pytest.raises(IndexFault, match=r"index\.db"):
            EmbeddedIndex.open(tmp_path, writable=writable)
        with pytest.raises(IndexFault, match="nowhere"):
            EmbeddedIndex.open(tmp_path / "nowhere", writable=writable)


def test_a_half_copied_index_is_refused(index: EmbeddedIndex, tmp_path: Path) -> None:
    index.close()
    file = next(index.path.glob("vectors-*"))
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(IndexFault, match=rf"{file.name}.* {len(data) - 10} .* {len(data)} "):
        EmbeddedIndex.open(index.path)
    file.unlink()
    with pytest.raises(IndexFault, match=file.name):
        EmbeddedIndex.open(index.path)
    file.write_bytes(data)
    database = index.path / "index.db"
    whole = database.read_bytes()
    database.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IndexFault, match=r"index\.db"):
        _use(index.path)
    database.write_bytes(b"")
    with pytest.raises(IndexFault, match=r"index\.db"):
        EmbeddedIndex.open(index.path)
    database.write_bytes(b"not a database at all" * 100)
    with pytest.raises(IndexFault, match=r"index\.db"):
        EmbeddedIndex.open(index.path)


def _use(path: Path) -> None:
    with EmbeddedIndex.open(path) as index:
        index.search(unit_rows(1)[0], 50)
        assert index.verify() == []


def test_verify_finds_a_flipped_bit(index: EmbeddedIndex) -> None:
    file = next(index.path.glob("vectors-*"))
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)
    assert index.verify() == [f"{file.name} is damaged between rows 0 and 50."]


def test_another_format_is_refused(index: EmbeddedIndex) -> None:
    with index._store.writing() as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    index.close()
    with pytest.raises(IndexFault, match=r"\b99\b.*\b2\b"):
        EmbeddedIndex.open(index.path)


def test_a_full_disk_leaves_the_index_intact(index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    with monkeypatch.context() as full:

        def half(handle: int, data: memoryview, at: int) -> int:
            whole(handle, data[: len(data) // 2], at)
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "pwrite", half)
        with pytest.raises(StorageError, match=r"vectors-000001-image\.f32"):
            index.add(images(5, 80), unit_rows(5))
    assert len(index) == 50
    assert index.verify() == []
    assert index._store._writer is not None
    pages = index._store._writer.execute("PRAGMA page_count").fetchone()[0]
    index._store._writer.execute(f"PRAGMA max_page_count = {pages}")  # how SQLite meets a full disk
    with pytest.raises(StorageError, match=r"x\.index"):
        index.add(images(2000, 1000), unit_rows(2000))
    assert index.verify() == []
    count = len(index)
    index._store._writer.execute("PRAGMA max_page_count = 1000000")
    index.add(images(5, 80), unit_rows(5))
    assert len(index) == count + 5
    assert index.verify() == []


READ_ONLY = """
import mmap, os, sys, numpy as np  # before the files of another user are out of sight
from diptych.errors import StorageError
from diptych.index.engines.embedded.index import EmbeddedIndex
if os.getuid() == 0:  # to whom every folder is writable
    os.setuid(65534)
path = sys.argv[1]
with EmbeddedIndex.open(path) as index:
    print(len(index), index.verify(), len(list(index.contents(0))))
try:
    EmbeddedIndex.open(path, writable=True)
except StorageError as error:
    print(error)
"""


def test_a_read_only_folder_is_read(index: EmbeddedIndex, tmp_path: Path) -> None:
    index.close()
    place = Path("/tmp") / f"diptych-read-only-{os.getpid()}"  # where another user may look
    shutil.copytree(index.path, place)
    try:
        for file in place.iterdir():
            file.chmod(0o444)
        place.chmod(0o555)
        root = Path(__file__).parent.parent
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(place)],
            capture_output=True,
            text=True,
            cwd=root,
            check=False,
        )
        assert done.stdout.startswith("50 [] 50"), done.stderr
        assert "cannot be written" in done.stdout
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


def test_a_closed_index_says_so(index: EmbeddedIndex) -> None:
    index.close()
    index.close()
    with pytest.raises(IndexFault, match=r"x\.index"):
        index.search(unit_rows(1)[0])


def test_an_unknown_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="'redis'"):
        open_index("redis://localhost/x")


def test_opening_is_light(index: EmbeddedIndex) -> None:
    index.close()
    code = (
        "import sys; from diptych.index.engines.opening import open_index; i = open_index(sys.argv[1]); "
        "print(len(i), i.info.dimension, [m for m in ('torch', 'PIL', 'usearch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(index.path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"50 {D} []"


def test_it_is_an_index(index: EmbeddedIndex) -> None:
    one: Index = index
    assert one.count() == 50
