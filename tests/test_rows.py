"""Rows on disk: killed at every step of writing, damaged, linked elsewhere, on a full and on a read-only disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disks import fill, make_read_only, small_disk

from diptych.cache import feature_pack
from diptych.cache.feature_pack import FeaturePack
from diptych.cache.rows import HEADER, RowFile
from diptych.errors import DataError, StorageError

ROWS = np.arange(60, dtype=np.float32).reshape(12, 5)

KILLS = """
import os, signal, sys
from pathlib import Path
import numpy as np
import diptych.cache.feature_pack as packs
from diptych.cache.rows import RowFile

packs.FILE_BYTES = 5 * 5 * 2
folder, rows = Path(sys.argv[1]), np.arange(60, dtype=np.float32).reshape(12, 5)
names = [name for name in ("pwrite", "fsync", "replace", "ftruncate", "truncate", "close", "open") if hasattr(os, name)]

def file(place):
    with RowFile(place / "a.npy", "k", dtype="<f4") as file:
        if not file.finished:
            for start in range(file.progress.done, 12, 4):
                file.append(rows[start : start + 4], min(4, 12 - start))
            file.change()[:] *= 1
            file.finish()
    return np.load(place / "a.npy")

def pack(place):
    pack = packs.FeaturePack(place / "pack")
    for start in range(0, 12, 4):
        pack.append([str(n) for n in range(start, start + 4)], rows[start : start + 4])
    out = np.empty((12, 5), np.float16)
    packs.FeaturePack(place / "pack").read(pack.find(map(str, range(12))), out)
    return out

def killed(write, place, at):
    # in a child that ends itself at its at-th call of the system; half of what it would have written is written
    left = [at]
    def wrap(name):
        call = getattr(os, name)
        def counted(*args, **more):
            left[0] -= 1
            if not left[0]:
                if name == "pwrite":
                    call(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)
        setattr(os, name, counted)
    child = os.fork()
    if child == 0:
        for name in names:
            wrap(name)
        write(place)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

for write in (file, pack):
    at = 1
    while killed(write, place := folder / f"{write.__name__}-{at}", at):
        killed(write, place, at)  # the run that goes on is killed too
        assert np.array_equal(write(place), rows), (write, at)
        at += 1
    assert np.array_equal(write(place), rows)
    print(write.__name__, at - 1)
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_call_of_the_system_loses_nothing(tmp_path: Path) -> None:
    """Every run that was killed, twice, ends with the rows of one that was not; and reading them needs no torch."""
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert int(counts["file"]) > 30
    assert int(counts["pack"]) > 30


def write_file(place: Path) -> None:
    with RowFile(place / "a.npy", "k") as file:
        if not file.finished:
            file.append(ROWS[:6], 6)
            file.append(ROWS[6:], 6)
            file.finish()


def write_pack(place: Path) -> None:
    pack, keys = FeaturePack(place / "pack"), [str(n) for n in range(12)]
    if (pack.find(keys) < 0).any():
        pack.append(keys, ROWS)


@pytest.mark.parametrize("offset", [0, 100, HEADER, HEADER + 59, HEADER + 60, HEADER + 119])
def test_a_flipped_byte_of_a_file_is_found(offset: int, tmp_path: Path) -> None:
    write_file(tmp_path)
    path = tmp_path / "a.npy"
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with RowFile(path, "k") as file:
        assert not file.finished
        kept = file.progress.done
        assert kept == (6 if offset >= HEADER + 60 else 0 if offset >= HEADER else 12)
        if kept < 12:
            file.append(ROWS[kept:], 12 - kept)
        file.finish()
    assert np.array_equal(np.load(path), ROWS)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        *[(write_file, name) for name in (".a.npy.log", ".a.npy.part", ".a.npy.lock")],
        *[(write_pack, name) for name in ("pack/index", "pack/rows-000000.f16", "pack/append.lock")],
        *[(write_pack, name) for name in ("pack/pack.json", "pack/stamps.json")],
    ],
)
def test_a_link_is_neither_read_nor_written(write: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """A folder of somebody else may hold a link in the place of any file."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    place = tmp_path / "place"
    (place / name).parent.mkdir(parents=True)
    if name == "pack/stamps.json":  # is first written under another name
        write(place)
        (place / name).unlink()
    (place / name).symlink_to(precious)
    with pytest.raises(DataError, match=re.escape("a.npy" if write is write_file else name)):
        write(place)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    "line", ['{"done": 4}', "[]", '{"done": "x", "rows": 1, "bytes": 1, "crc": 1}', "1" * 5000]
)
def test_a_log_that_somebody_made_up_is_not_believed(line: str, tmp_path: Path) -> None:
    with RowFile(tmp_path / "a.npy", "k") as file:
        file.append(ROWS[:6], 6)
    with file.log.open("a") as log:
        log.write(line + "\n")
    with RowFile(tmp_path / "a.npy", "k") as file:
        assert file.progress.done == 6
        file.append(ROWS[6:], 6)
        file.finish()
    assert np.array_equal(np.load(tmp_path / "a.npy"), ROWS)


@pytest.mark.parametrize("write", [write_file, write_pack])
def test_a_full_disk_is_a_sentence_and_keeps_what_is_there(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        ballast = fill(disk)
        with pytest.raises(StorageError, match="disk"):
            write(disk)
        ballast.unlink()
        write(disk)
        make_read_only(disk)
        write(disk)  # nothing is missing: nothing is written
        assert len(FeaturePack(disk / "pack")) in (0, 12)


def test_a_second_writer_waits_for_the_first(tmp_path: Path) -> None:
    code = "from test_rows import *; write_file(Path(sys.argv[1])); print('done')"
    with RowFile(tmp_path / "a.npy", "k") as file:
        file.append(ROWS[:6], 6)
        command = [sys.executable, "-c", code, str(tmp_path)]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(3)
        file.append(ROWS[6:], 6)
        file.finish()
    assert other.communicate(timeout=60)[0] == "done\n"
    assert np.array_equal(np.load(tmp_path / "a.npy"), ROWS)


def test_a_long_log_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process would write over what it had not read."""
    FeaturePack(tmp_path / "p").append(["a", "b", "c", "d", "e"], np.eye(5, dtype=np.float16))
    monkeypatch.setattr(feature_pack, "WHOLE", 2 * feature_pack.ENTRY.itemsize + 1)
    FeaturePack(tmp_path / "p").append(["f"], np.ones((1, 5), np.float16))
    assert (FeaturePack(tmp_path / "p").find(["a", "e", "f"]) >= 0).all()
