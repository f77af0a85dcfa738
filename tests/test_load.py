"""Loading files of vectors into an index: the same as indexing, repeated, interrupted, several at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from colour_model import ColourModel
from commands import diptych, process, refused
from dual_folders import clip_folder
from shard_data import embedded_tars, held, write_tars
from small import photos

from diptych.errors import DataError, IndexFault, SettingsError
from diptych.index.engines.opening import empty_index, open_index
from diptych.index.ingest import target
from diptych.index.ingest.build import index_collection
from diptych.index.protocol import Item
from diptych.vectors import files
from diptych.vectors.embed import embed
from diptych.vectors.load import load, open_sources
from diptych.vectors.manifest import MANIFEST


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_tars(tmp_path_factory.mktemp("load"))


def rows_of(out: Path) -> int:
    return sum(shard.receipt.rows for shard in files.open_vectors(out).shards)


def test_loading_equals_indexing(tmp_path: Path) -> None:
    data, model = photos(tmp_path / "photos"), ColourModel()
    embed(model, open_sources(data), tmp_path / "out", model_name="colours")
    index_collection(model, data, tmp_path / "indexed", model_name="colours")
    load(tmp_path / "out", tmp_path / "loaded")
    assert held(tmp_path / "loaded") == held(tmp_path / "indexed")
    again = index_collection(ColourModel(), data, tmp_path / "loaded", model_name="colours")
    assert (again.added, again.updated, again.removed) == (0, 0, 0)


def test_a_second_run_writes_nothing(out: Path, tmp_path: Path) -> None:
    first = load(out, tmp_path / "i")
    assert (first.written, first.unchanged) == (rows_of(out), 0)
    before = held(tmp_path / "i")
    with open_index(tmp_path / "i") as index:
        generation = index.generation
    second = load(out, tmp_path / "i")
    assert (second.written, second.unchanged, second.shards) == (0, rows_of(out), first.shards)
    with open_index(tmp_path / "i") as index:
        assert index.generation == generation
    assert held(tmp_path / "i") == before


def test_parts_make_the_whole(out: Path, tmp_path: Path) -> None:
    load(out, tmp_path / "whole")
    for part in ((2, 3), (3, 3), (1, 3)):
        load(out, tmp_path / "parts", part=part)
    assert held(tmp_path / "parts") == held(tmp_path / "whole")


def test_several_loaders_at_once(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "PAUSE", 0.001)
    failures: list[BaseException] = []

    def run(part: tuple[int, int]) -> None:
        try:
            load(out, tmp_path / "i", part=part)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(part,)) for part in ((1, 2), (2, 2), (1, 1), (1, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    load(out, tmp_path / "alone")
    assert held(tmp_path / "i") == held(tmp_path / "alone")


def test_a_killed_loader_goes_on(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "i"
    for pause in (0.5, 1.0, 1.5, 2.0):
        running = process("index", "load", out, "--index", place, start_new_session=True)
        time.sleep(pause)
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    load(out, place)
    load(out, tmp_path / "whole")
    assert held(place) == held(tmp_path / "whole")


def test_a_later_collection_has_its_number_before_its_ids(out: Path, tmp_path: Path) -> None:
    model = ColourModel()
    with empty_index(tmp_path / "i", model.dim, fingerprint=model.fingerprint()) as index:
        index.add([Item("mine", collection=index.collection("mine").number)], np.eye(1, model.dim))
    load(out, tmp_path / "i")
    ids = [item.id for item, _, _ in held(tmp_path / "i")]
    assert ids.count("mine") == 1
    assert all(id.startswith("1/") for id in ids if id != "mine")
    with open_index(tmp_path / "i") as index:
        texts = [item for item, _, _ in held(tmp_path / "i") if item.kind == "text"]
        assert all(index.get([text.image_id])[0] is not None for text in texts)
    assert load(out, tmp_path / "i").written == 0


def test_what_was_embedded_anew_is_written_again(out: Path, tmp_path: Path) -> None:
    load(out, tmp_path / "i")
    with open_index(tmp_path / "i", writable=True) as index:
        item = next(one for one, _, _ in held(tmp_path / "i") if one.kind == "image")
        index.delete([item.id])
    assert load(out, tmp_path / "i").written >= 1
    load(out, tmp_path / "whole")
    assert held(tmp_path / "i") == held(tmp_path / "whole")


# ---------------------------------------------------------------------- bad input


def test_another_model_is_refused_by_name(out: Path, tmp_path: Path) -> None:
    model = ColourModel("other")
    empty_index(tmp_path / "i", model.dim, model="theirs", fingerprint=model.fingerprint()).close()
    with pytest.raises(IndexFault, match=r"theirs.*colours"):
        load(out, tmp_path / "i")
    with open_index(tmp_path / "i") as index:
        assert len(index) == 0
        assert index.info.collections == ()


def test_a_damaged_shard_is_left_out_and_named(out: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(out, tmp_path / "bad"))
    shards = sorted((bad / "shards").glob("*.parquet"))
    cut, changed, gone = shards[:3]
    os.truncate(cut, cut.stat().st_size // 2)
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    gone.unlink()
    done = load(bad, tmp_path / "i")
    assert [name for name, _ in done.failed] == [one.stem for one in (cut, changed, gone)]
    reasons = [reason for _, reason in done.failed]
    assert "is half-written" in reasons[0]
    assert "is not the file that was written" in reasons[1]
    assert "is missing" in reasons[2]
    assert done.shards == len(shards) - 3
    said = refused("index", "load", bad, "--index", tmp_path / "i")
    assert f"3 of {len(shards)}" in said
    for one in (cut, changed, gone):
        shutil.copy(out / "shards" / one.name, one)
    load(bad, tmp_path / "i")
    load(out, tmp_path / "whole")
    assert held(tmp_path / "i") == held(tmp_path / "whole")


def test_what_is_not_embedded_yet_is_loaded_later(out: Path, tmp_path: Path) -> None:
    half = Path(shutil.copytree(out, tmp_path / "half"))
    content = json.loads((half / MANIFEST).read_text())
    content["complete"] = False
    content["shards"] = [{name: one[name] for name in ("name", "file")} for one in content["shards"]]
    (half / MANIFEST).write_text(json.dumps(content))
    receipts = sorted((half / "shards").glob("*.json"))
    kept = {one: one.read_bytes() for one in receipts[1:]}
    for one in kept:
        one.unlink()
    said = diptych("index", "load", half, "--index", tmp_path / "i")
    assert "1 shard, " in said.stdout
    assert f"{len(kept)} shards " in said.stderr
    for one, data in kept.items():
        one.write_bytes(data)
    load(half, tmp_path / "i")
    load(out, tmp_path / "whole")
    assert held(tmp_path / "i") == held(tmp_path / "whole")


def test_refusals(out: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json"):
        load(tmp_path / "nothing", tmp_path / "i")
    assert not (tmp_path / "i").exists()
    assert "--shard" in refused("index", "load", out, "--index", tmp_path / "i", "--shard", "5/4")
    load(out, tmp_path / "i")
    with pytest.raises(SettingsError, match=r"float32.*binary"):
        load(out, tmp_path / "i", precision="binary")
    other = ColourModel()
    with empty_index(tmp_path / "taken", other.dim, fingerprint=other.fingerprint()) as index:
        id = held(tmp_path / "i")[0][0].id
        index.collection("first")
        index.collection(*_collection(out))
        index.add([Item(f"1/{id}", collection=0)], np.eye(1, other.dim))
    with pytest.raises(DataError, match="1/part-000/0000"):
        load(out, tmp_path / "taken")


def _collection(out: Path) -> tuple[str, str]:
    manifest = files.open_vectors(out).manifest
    return manifest.name, manifest.root


def test_the_commands(tmp_path: Path) -> None:
    clip = clip_folder(tmp_path / "clip")
    tars = write_tars(tmp_path / "tars")
    assert "diptych index load" in diptych("embed", clip, tars, tmp_path / "out").stdout
    said = diptych("index", "load", tmp_path / "out", "--index", tmp_path / "i", "--approximate").stdout
    assert "rows/s" in said
    assert "next: diptych search" in said
    assert diptych("index", "verify", tmp_path / "i").stdout.endswith("sound\n")
    hits = json.loads(diptych("search", tmp_path / "i", "red", "-k", 3, "--json").stdout)["hits"]
    assert len(hits) == 3
