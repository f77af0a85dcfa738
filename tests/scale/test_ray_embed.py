"""Embedding and evaluation on a real Ray cluster of three nodes: a worker, a node and the driver are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from commands import diptych, process, refused
from dual_folders import clip_folder
from ray_cluster import RayCluster, kill
from shard_data import checksums, write_tars
from test_evaluate_vectors import tied_vectors, write_vectors

from diptych.evaluation.report import Report

TARS, IMAGES = 20, 100
DEADLINE = 420  # seconds for what takes a tenth of it on an idle machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tars(tmp_path_factory.mktemp("data") / "tars", TARS, IMAGES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("model") / "clip")


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes, and three processes that divide the work."""
    folder = tmp_path_factory.mktemp("whole")
    parts = [process("embed", model, data, folder / "parts", "--shard", f"{n}/3") for n in (1, 2, 3)]
    finished(process("embed", model, data, folder / "one"))
    for part in parts:
        finished(part)
    assert checksums(folder / "parts") == checksums(folder / "one")
    return folder / "one"


def finished(running: subprocess.Popen[str]) -> tuple[str, str]:
    said = running.communicate(timeout=DEADLINE)
    assert running.returncode == 0, said
    return said


def receipts(out: Path) -> int:
    return len(list(out.glob("shards/*.json")))


def wait_for(running: subprocess.Popen[str], out: Path, count: int) -> None:
    """Until so many shards are whole."""
    end = time.monotonic() + DEADLINE
    while receipts(out) < count:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end, f"{receipts(out)} shards"
        time.sleep(0.05)


def test_a_worker_a_node_and_the_driver_are_killed(
    cluster: RayCluster, model: Path, data: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    driver = process("embed", model, data, out, "--ray", cluster.address)
    wait_for(driver, out, 2)
    kill(cluster.busy_workers()[0])
    wait_for(driver, out, 5)
    cluster.kill_node("127.0.0.3")
    wait_for(driver, out, 9)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    before = receipts(out)
    assert 9 <= before < TARS, before
    written = {f.name: f.stat().st_mtime_ns for f in out.glob("shards/*.json")}
    cluster.start("127.0.0.3")
    said, _ = finished(process("embed", model, data, out, "--ray", cluster.address))
    assert f"{TARS} shards, {TARS * IMAGES - 1:,} images" in said
    kept = sum((out / "shards" / name).stat().st_mtime_ns == when for name, when in written.items())
    assert kept == before, "what was whole is embedded again"
    assert checksums(out) == checksums(whole)


def test_a_node_dies_while_ranks_are_counted(cluster: RayCluster, tmp_path: Path) -> None:
    image, text, image_of = tied_vectors(4000, 64)
    folder = write_vectors(tmp_path / "vectors", image, text, image_of, [500, 501, 2000, 3900])
    script = (
        "import sys; from pathlib import Path; from diptych.evaluation.shards import evaluate_vectors;"
        "from diptych.vectors.on_ray import connected;"
        "report, address = None, sys.argv[2]\n"
        "with connected(address) as cluster:\n"
        "    report = evaluate_vectors(sys.argv[1], rows=1000, bootstrap=50, run=cluster.run)\n"
        "report.save(sys.argv[3])\n"
    )
    arguments = [sys.executable, "-c", script, str(folder), cluster.address, str(tmp_path / "ray.json")]
    running = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + DEADLINE
    while not any(p in cluster.busy_workers() for p in cluster.processes("127.0.0.4")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    cluster.kill_node("127.0.0.4")
    finished(running)
    cluster.start("127.0.0.4")
    diptych("evaluate", folder, "--bootstrap", 50, "--output", tmp_path / "one.json")
    one, other = Report.load(tmp_path / "one.json"), Report.load(tmp_path / "ray.json")
    assert one.metrics == other.metrics
    assert one.intervals == other.intervals
    assert one.card.protocol_fields() == other.card.protocol_fields()


def test_the_command_evaluates_on_ray(cluster: RayCluster, whole: Path, tmp_path: Path) -> None:
    diptych("evaluate", whole, "--output", tmp_path / "one.json")
    finished(process("evaluate", whole, "--ray", cluster.address, "--output", tmp_path / "ray.json"))
    one, other = Report.load(tmp_path / "one.json"), Report.load(tmp_path / "ray.json")
    assert (one.metrics, one.intervals) == (other.metrics, other.intervals)


# --- bad input -------------------------------------------------------------------------------------


def test_a_shard_that_kills_no_worker_but_fails_is_named(
    cluster: RayCluster, model: Path, data: Path, tmp_path: Path
) -> None:
    tars = write_tars(tmp_path / "tars", 3)
    half = (tars / "part-002.tar").read_bytes()
    (tars / "part-002.tar").write_bytes(half[: len(half) // 2])
    ended = process("embed", model, tars, tmp_path / "out", "--ray", cluster.address)
    _, error = ended.communicate(timeout=DEADLINE)
    assert ended.returncode == 2
    assert "1 of 3 shards could not be embedded, the others are whole; part-002" in error
    assert receipts(tmp_path / "out") == 2


@pytest.mark.parametrize("joining", ["", "def fail(**_): raise ConnectionError\nray.init = fail\n"])
def test_another_version_of_ray_is_refused(
    cluster: RayCluster, model: Path, data: Path, tmp_path: Path, joining: str
) -> None:
    """Ray itself names a version that is close to its own; 2.49.2 only fails, with an error that says nothing."""
    script = (
        f"import sys, ray; ray.__version__ = '2.49.0'\n{joining}"
        "from diptych.cli import main; main(['embed', *sys.argv[1:]])"
    )
    arguments = [str(model), str(data), str(tmp_path / "out"), "--ray", cluster.address]
    ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: the Ray cluster at 127.0.0.2:")
    assert f"runs ray {ray.__version__} on Python " in ended.stderr
    assert "this machine has ray 2.49.0" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_no_cluster_is_one_sentence(model: Path, data: Path, tmp_path: Path) -> None:
    assert "127.0.0.2:9" in refused("embed", model, data, tmp_path, "--ray", "127.0.0.2:9")
    assert "nowhere" in refused("embed", model, data, tmp_path, "--ray", "nowhere")
    assert np.isfinite(receipts(tmp_path))


def test_more_cpus_than_a_node_has_are_refused(
    cluster: RayCluster, model: Path, data: Path, tmp_path: Path
) -> None:
    ended = process("embed", model, data, tmp_path / "out", "--ray", cluster.address, "--cpus", 3)
    assert "no node of the Ray cluster" in ended.communicate(timeout=DEADLINE)[1]
    assert ended.returncode == 2
