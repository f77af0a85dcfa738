"""Embedding into files: one shard, one file, whoever does it, killed or not."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from colour_model import ColourModel
from commands import diptych, process, refused
from disks import fill, small_disk
from dual_folders import clip_folder
from shard_data import checksums, contents, write_tars
from small import photos

from diptych.errors import DataError, SettingsError, StorageError
from diptych.index.engines.opening import open_index
from diptych.index.ingest import pipeline
from diptych.index.ingest.build import index_collection
from diptych.index.models import open_model
from diptych.vectors import embed as embedding
from diptych.vectors import files
from diptych.vectors.embed import embed, embed_shard, parse_part
from diptych.vectors.files import open_vectors
from diptych.vectors.load import open_sources
from diptych.vectors.manifest import is_vectors, read_receipt


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tars(tmp_path_factory.mktemp("data") / "tars")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("model") / "clip")


@pytest.fixture(scope="module")
def whole(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    done = embed(ColourModel(), open_sources(tars), out, model_name="colours")
    assert done.complete
    return out


def test_a_tar_becomes_a_file(tars: Path, whole: Path) -> None:
    folder = open_vectors(whole)
    assert [shard.name for shard in folder.shards] == [f"part-{n:03d}" for n in range(4)]
    assert (folder.manifest.model, folder.manifest.dim, folder.missing) == ("colours", 8, ())
    assert folder.manifest.complete
    assert is_vectors(whole)
    assert not is_vectors(tars)
    shard = folder.shards[1]
    assert (shard.receipt.images, shard.receipt.texts) == (5, 10)
    shard.check()
    (id, reason), *more = shard.receipt.unreadable
    assert (id, more) == ("part-001/0003", [])
    assert "0003.png" in reason
    ((items, vectors),) = shard.batches()
    assert [item.kind for item in items] == ["image"] * 5 + ["text"] * 10
    assert items[0].id == "part-001/0000"
    assert items[5].id == "part-001/0000#text0"
    assert items[5].image_id == "part-001/0000"
    assert items[0].text == f"{items[5].text}\n{items[6].text}"
    assert items[0].metadata == items[5].metadata
    assert items[0].metadata["price"] == 0
    assert items[0].thumbnail is not None
    assert items[0].thumbnail.startswith(b"\xff\xd8")
    assert items[5].thumbnail is None
    model = ColourModel()
    captions = open_sources(tars).open("part-001").captions
    good = [captions.images[row] for row in (0, 1, 2, 4, 5)]
    assert np.array_equal(vectors[:5], np.asarray(model.encode_image(good)))
    assert np.array_equal(vectors[5:], np.asarray(model.encode_text([item.text for item in items[5:]])))


def test_items_are_those_of_an_index(tmp_path: Path) -> None:
    """A folder of photos: the same ids, columns, paths and vectors that ``index`` stores."""
    data = photos(tmp_path / "photos", 7)
    model = ColourModel()
    embed(model, open_sources(data, rows=3), tmp_path / "out")
    index_collection(model, data, tmp_path / "index")
    folder = open_vectors(tmp_path / "out")
    assert [(shard.name, shard.receipt.images) for shard in folder.shards] == [
        ("00000", 3),
        ("00001", 3),
        ("00002", 1),
    ]
    with open_index(tmp_path / "index") as index:
        assert folder.manifest.root == index.info.collections[0].root
        assert folder.manifest.name == index.info.collections[0].name
        for shard in folder.shards:
            for items, vectors in shard.batches(rows=2):
                assert index.get([item.id for item in items]) == items
                assert np.array_equal(index.vectors([item.id for item in items]), vectors)


def test_parts_and_one_process_write_the_same_bytes(tars: Path, whole: Path, tmp_path: Path) -> None:
    for number in (3, 1, 2):
        done = embed(ColourModel(), open_sources(tars), tmp_path, model_name="colours", part=(number, 3))
        assert done.complete == (number == 2)
    assert checksums(tmp_path) == checksums(whole)


def test_row_groups_are_bounded_and_change_nothing(
    tars: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "GROUP", 4)
    monkeypatch.setattr(pipeline, "CHUNK", 2)
    monkeypatch.setattr(embedding, "TEXTS", 5)
    embed(ColourModel(), open_sources(tars), tmp_path, batch_size=3)
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(tmp_path / "shards" / "part-000.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [4, 4, 4, 4, 2]
    (ids, vectors), (expected_ids, expected) = contents(tmp_path), contents(whole)
    assert ids == expected_ids
    np.testing.assert_array_equal(vectors, expected)


def test_what_is_there_is_not_embedded_again(tars: Path, whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "shards" / "part-002.json").unlink()  # killed between the file and its receipt
    (out / "shards" / "part-003.parquet").write_bytes(b"half")
    assert open_vectors(out).manifest.complete  # says what was; the embedding looks for itself
    model = ColourModel()
    done = embed(model, open_sources(tars), out, model_name="colours")
    assert (done.before, len(done.receipts), model.encoded_images) == (2, 4, 12)
    assert checksums(out) == checksums(whole)


def test_retry_reads_mended_pictures(tmp_path: Path) -> None:
    data = photos(tmp_path / "photos", 4)
    good = (data / "picture2.png").read_bytes()
    (data / "picture2.png").write_bytes(good[:50])
    first = embed(ColourModel(), open_sources(data, rows=2), tmp_path / "out")
    assert [id for id, _ in first.unreadable] == ["picture2.png"]
    (data / "picture2.png").write_bytes(good)
    assert embed(ColourModel(), open_sources(data, rows=2), tmp_path / "out").images == 3
    again = embed(ColourModel(), open_sources(data, rows=2), tmp_path / "out", retry=True)
    assert (again.before, again.images, again.unreadable) == (1, 4, [])


def test_another_number_of_threads_stays_within_the_promise(tars: Path, clip: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            embed(open_model(clip), open_sources(tars), tmp_path / str(number))
    finally:
        torch.set_num_threads(threads)
    (ids, one), (other_ids, other) = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert ids == other_ids
    np.testing.assert_allclose(one, other, atol=1e-5)


# --- bad input -------------------------------------------------------------------------------------


def test_a_broken_or_missing_shard_leaves_the_others_alone(tars: Path, tmp_path: Path) -> None:
    data = shutil.copytree(tars, tmp_path / "tars")
    content = (data / "part-001.tar").read_bytes()
    (data / "part-001.tar").write_bytes(content[: len(content) // 2])
    (data / "part-002.tar").unlink()
    sources = open_sources(data / "part-{000..003}.tar")
    done = embed(ColourModel(), sources, tmp_path / "out")
    assert not done.complete
    assert [name for name, _ in done.failed] == ["part-001", "part-002"]
    assert "truncated" in done.failed[0][1]
    assert "does not exist" in done.failed[1][1]
    with pytest.raises(DataError, match=r"\b2\b.*\b4\b.*part-001"):
        open_vectors(tmp_path / "out").check_complete()
    shutil.copy(tars / "part-001.tar", data)
    shutil.copy(tars / "part-002.tar", data)
    done = embed(ColourModel(), open_sources(data / "part-{000..003}.tar"), tmp_path / "out")
    assert (done.before, done.complete) == (2, True)


def test_a_shard_that_changed_is_refused(tars: Path, tmp_path: Path) -> None:
    data = shutil.copytree(tars, tmp_path / "tars")
    embed(ColourModel(), open_sources(data), tmp_path / "out")
    write_tars(data, tars=1, images=40)
    done = embed(ColourModel(), open_sources(data), tmp_path / "out")
    assert [name for name, _ in done.failed] == ["part-000"]
    assert "into another folder" in done.failed[0][1]


def test_a_shard_of_nothing_readable_is_refused(tmp_path: Path) -> None:
    data = photos(tmp_path / "photos", 4)
    for name in ("picture2.png", "picture3.png"):
        (data / name).write_bytes(b"no picture")
    done = embed(ColourModel(), open_sources(data, rows=2), tmp_path / "out")
    assert [name for name, _ in done.failed] == ["00001"]
    assert "none of the 2 images" in done.failed[0][1]
    assert sorted(file.name for file in (tmp_path / "out" / "shards").iterdir()) == [
        "00000.json",
        "00000.parquet",
    ]


def test_a_folder_of_another_model_or_other_data_is_refused(tars: Path, whole: Path, tmp_path: Path) -> None:
    before = checksums(whole)
    with pytest.raises(DataError, match="colours"):
        embed(ColourModel("others"), open_sources(tars), whole)
    with pytest.raises(DataError, match=r"\b4\b"):
        embed(ColourModel(), open_sources(tars / "part-000.tar"), whole)
    with pytest.raises(DataError, match="texts"):
        embed(ColourModel(), open_sources(tars), whole, texts=False)
    assert checksums(whole) == before
    data = photos(tmp_path / "photos", 4)
    embed(ColourModel(), open_sources(data, rows=2), tmp_path / "out")
    shutil.copy(data / "picture0.png", data / "another.png")
    with (data / "metadata.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"image": "another.png", "caption": "one more"}))
    with pytest.raises(DataError, match=r"\b2\b"):
        embed(ColourModel(), open_sources(data, rows=2), tmp_path / "out")


@pytest.mark.parametrize("text", ["5/4", "0/4", "4", "a/b", "1/0", "-1/4"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="1/4, 2/4, 3/4"):
        parse_part(text)
    assert parse_part("4/4") == (4, 4)


def test_damaged_files_are_one_sentence(whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    shard = open_vectors(out).shards[0]
    content = bytearray(shard.path.read_bytes())
    shard.path.write_bytes(content[:-10])
    with pytest.raises(DataError, match="half-written"):
        list(shard.batches())
    content[len(content) // 3] ^= 255
    shard.path.write_bytes(content)
    with pytest.raises(DataError, match=r"part-000\.json"):
        shard.check()
    with pytest.raises(DataError, match=r"part-000\.json"):
        list(shard.batches())
    shard.path.unlink()
    with pytest.raises(DataError, match=r"part-000\.json"):
        list(shard.batches())
    endless = re.sub(r'"dim": \d+', '"dim": Infinity', (out / "manifest.json").read_text())
    assert "Infinity" in endless
    for content_of_manifest in ("", "[]", "{}", '{"format": "other", "version": 1}', endless):
        (out / "manifest.json").write_text(content_of_manifest)
        with pytest.raises(DataError, match=r"manifest\.json"):
            open_vectors(out)
    (out / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_vectors(out)


def test_a_manifest_leads_nowhere_else(whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    content = json.loads((out / "manifest.json").read_text())
    content["shards"][0]["name"] = "../../secret"
    (out / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"\.\./\.\./secret"):
        open_vectors(out)


def test_a_failure_in_the_middle_leaves_no_file(tars: Path, tmp_path: Path) -> None:
    class Failing(ColourModel):
        def encode_text(self, texts, *, batch_size=256):  # type: ignore[no-untyped-def]
            raise RuntimeError("out of memory")

    sources = open_sources(tars)
    with pytest.raises(RuntimeError):
        embed_shard(Failing(), "part-000", sources.open("part-000"), tmp_path)
    assert list((tmp_path / "shards").iterdir()) == []


def test_what_killed_processes_left_goes_at_the_end(tars: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for name in ("part-001.parquet", "part-001.json", "part-003.json"):
        (out / "shards" / f".new-{name}-0123456789ab").write_bytes(b"PAR1")
    with files.new_file(out / "shards" / "part-002.json") as being_written:
        embed(ColourModel(), open_sources(tars), out, model_name="colours")
        assert [file.name for file in out.rglob(".new-*")] == [Path(being_written.name).name]
        being_written.write((whole / "shards" / "part-002.json").read_bytes())
    assert checksums(out) == checksums(whole)


def test_a_full_disk_loses_nothing(tars: Path, whole: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        embed(ColourModel(), open_sources(tars), disk / "out", model_name="colours", part=(1, 4))
        fill(disk, leave=8192)
        with pytest.raises(StorageError, match=r"part-001\.parquet"):
            embed(ColourModel(), open_sources(tars), disk / "out", model_name="colours")
        assert read_receipt(disk / "out", "part-000") is not None
        assert not list((disk / "out").rglob(".new-*"))
        (disk / "ballast").unlink()
        assert embed(ColourModel(), open_sources(tars), disk / "out", model_name="colours").before == 1
        assert checksums(disk / "out") == checksums(whole)


# --- the command line --------------------------------------------------------------------------------


def test_the_command(tars: Path, clip: Path, tmp_path: Path) -> None:
    said = diptych("embed", clip, tars, tmp_path / "out")
    assert "4 shards, 23 images, 46 texts (0 shards were there, 1 picture skipped)" in said.stdout
    assert "skipped part-001/0003: " in said.stderr
    assert "4 shards were there" in diptych("embed", clip, tars, tmp_path / "out").stdout
    for number in (1, 2):
        diptych("embed", clip, tars, tmp_path / "parts", "--shard", f"{number}/2")
    assert checksums(tmp_path / "parts") == checksums(tmp_path / "out")
    assert "parts of 4" in refused("embed", clip, tars, tmp_path / "out", "--shard", "5/4")
    other = clip_folder(tmp_path / "other", seed=1)
    assert "clip" in refused("embed", other, tars, tmp_path / "out")
    (tmp_path / "one").mkdir()
    shutil.copy(tars / "part-000.tar", tmp_path / "one" / "a.tar")
    (tmp_path / "one" / "b.tar").write_bytes((tars / "part-000.tar").read_bytes()[:2000])
    assert "1 of 2" in refused("embed", clip, tmp_path / "one", tmp_path / "o")


def test_killed_runs_go_on_and_end_alike(tars: Path, clip: Path, tmp_path: Path) -> None:
    """``kill -9`` at random moments: a finished shard stays, nothing half-written ever has a name."""
    data = write_tars(tmp_path / "many", tars=12, images=24)
    diptych("embed", clip, data, tmp_path / "whole")
    out, rng = tmp_path / "out", random.Random(0)
    for _ in range(2):
        running = process("embed", clip, data, out)
        start = time.monotonic()
        had = len(list(out.glob("shards/*.json")))
        while running.poll() is None and time.monotonic() - start < 120:
            if len(list(out.glob("shards/*.json"))) > had + rng.randrange(3):
                break
            time.sleep(0.005)
        os.kill(running.pid, signal.SIGKILL)
        running.communicate()
        for file in out.glob("shards/*.parquet"):
            if (receipt := read_receipt(out, file.stem)) is not None:
                assert receipt.bytes == file.stat().st_size
    assert "shards were there" in diptych("embed", clip, data, out).stdout
    assert checksums(out) == checksums(tmp_path / "whole")
