"""Files of vectors into Milvus: several loaders at once, killed and repeated, give what an embedded index holds."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from colour_model import ColourModel
from commands import diptych, process, refused
from milvus_server import MilvusServer
from shard_data import embedded_tars, held

pytest.importorskip("pymilvus")
from diptych.index.engines.milvus.index import MilvusIndex
from diptych.index.engines.opening import open_index
from diptych.vectors.load import load

names = itertools.count()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_tars(tmp_path_factory.mktemp("load"))


def loader(out: Path, url: str, *options: object) -> subprocess.Popen[str]:
    return process("index", "load", out, "--index", url, *options, start_new_session=True)


def test_loaders_at_once_and_killed(server: MilvusServer, out: Path, tmp_path: Path) -> None:
    url = server.url(f"load{next(names)}")
    killed = [
        loader(out, url, "--shard", f"{part}/3") for part in (1, 2, 3)
    ]  # all find no index and make one
    time.sleep(6)
    for one in killed:
        os.killpg(one.pid, signal.SIGKILL)
        one.communicate()
    running = [loader(out, url, "--shard", f"{part}/2") for part in (1, 2)] + [loader(out, url)]
    for one in running:
        said = one.communicate(timeout=300)
        assert one.returncode == 0, said
    load(out, tmp_path / "local")
    assert held(url) == held(tmp_path / "local")
    with MilvusIndex.open(url) as index:
        generation = index.generation
        assert len(index.info.collections) == 1
    assert ", 0 texts" not in (said := diptych("index", "load", out, "--index", url).stdout)
    assert "(0 written" in said
    with MilvusIndex.open(url) as index, open_index(tmp_path / "local") as local:
        assert index.generation == generation
        query = np.ones(ColourModel.dim, np.float32)
        for kind in ("image", "text"):
            # loaders wrote in another order: equal scores may stand in another order too
            a, b = index.search(query, 20, kind=kind), local.search(query, 20, kind=kind)
            assert a.scores == b.scores


def test_a_manifest_of_another_model_is_refused(server: MilvusServer, out: Path) -> None:
    url = server.url(f"load{next(names)}")
    MilvusIndex.create(url, ColourModel.dim, model="theirs", fingerprint="other").close()
    assert "'theirs'" in refused("index", "load", out, "--index", url)
    with MilvusIndex.open(url) as index:
        assert len(index) == 0


def test_a_server_that_is_away_is_told(out: Path) -> None:
    assert "does not answer" in refused("index", "load", out, "--index", "milvus://127.0.0.1:1/none")
