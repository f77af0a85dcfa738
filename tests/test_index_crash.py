"""A writer killed with SIGKILL at random moments loses nothing it acknowledged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "index_crash.py"
KILLS = 20


@pytest.fixture(scope="module")
def crashing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("index_crash", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["index_crash"] = module
    spec.loader.exec_module(module)
    return module


def test_random_kills_lose_nothing(crashing: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "crash.index"
    EmbeddedIndex.create(path, crashing.DIMENSION).close()
    contents: dict[str, int] = {}
    done = 0
    for number in range(KILLS):
        contents, acknowledged = crashing.crash(path, contents, 1000 + number, patience=0.2, search=True)
        done += acknowledged
    assert done > 0


def test_a_writer_that_ends_by_itself_is_noticed(crashing: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "crash.index"
    with (
        EmbeddedIndex.create(path, crashing.DIMENSION),  # has the lock: the child is refused at once
        pytest.raises(AssertionError, match="status 1"),
    ):
        crashing.crash(path, {}, 1, patience=0.0, search=False)


def test_the_check_would_notice(crashing: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "index"
    with EmbeddedIndex.create(path, crashing.DIMENSION) as index:
        index.add([Item("i1", content="5")], crashing.vector_of("i1", 5)[None])
        index.add([Item("i2", content="6")], crashing.vector_of("i2", 7)[None])
    with pytest.raises(AssertionError, match="last written"):
        crashing.check(path, [{"i1": 5, "i2": 6}], search=False)
    with pytest.raises(AssertionError, match="1 states"):
        crashing.check(path, [{"i1": 5}], search=False)
    file = next(path.glob("vectors-*"))
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError, match="rows 0 and 1"):
        crashing.check(path, [{"i1": 5, "i2": 6}], search=False)


def test_bytes_of_an_unfinished_write_are_ignored_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "index"
    rows = np.eye(3, dtype=np.float32)
    with EmbeddedIndex.create(path, 3) as index:
        index.add([Item("a")], rows[:1])
    file = next(path.glob("vectors-*"))
    with file.open("ab") as tail:
        tail.write(b"torn bytes of a write that never finished")
    (path / "vectors-000009-image.f32").write_bytes(b"a compaction that never finished")
    with EmbeddedIndex.open(path) as reader:
        assert reader.verify() == []
        assert reader.search(rows[0], 5).ids == ["a"]
    with EmbeddedIndex.open(path, writable=True) as index:
        assert not (path / "vectors-000009-image.f32").exists()
        index.add([Item("b")], rows[1:2])
        assert index.verify() == []
        assert index.search(rows[1], 5).ids == ["b", "a"]
        assert file.stat().st_size == 2 * 3 * 4
