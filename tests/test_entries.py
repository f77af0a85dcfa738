"""Folders that may come from a stranger are read and written through ``Entries`` or the functions of storage.py."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path

import pytest
from shard_data import embedded_tars

from diptych.errors import DataError
from diptych.vectors.files import open_vectors
from diptych.vectors.manifest import MANIFEST, SHARDS, is_vectors

PACKAGE = Path(__file__).parent.parent / "src" / "diptych"
ROOMS = ("index/engines/embedded", "vectors")  # the other rooms with such folders are not covered yet
TOUCHING = {
    "open", "read_bytes", "read_text", "write_bytes", "write_text", "unlink", "rename", "truncate",
    "touch", "symlink_to",
}  # fmt: skip
THROUGH = {"FILES", "sources"}  # Entries; the shards of a data folder, which may contain links
ALLOWED = {
    ("index/engines/embedded/approximate.py", "unlink"),  # of a path from FILES.path, after a failed save
    ("index/engines/embedded/store.py", "unlink"),  # of a path from FILES.path
    ("index/engines/embedded/approximate.py", "rename"),  # of rows in a graph, no file
}


def touched(source: str) -> list[tuple[str, int]]:
    """(name, line) of calls that open, change or remove a file without ``Entries``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "open":
            found.append(("open", node.lineno))
        elif isinstance(node.func, ast.Attribute) and node.func.attr in TOUCHING:
            owner = node.func.value
            if not (isinstance(owner, ast.Name) and owner.id in THROUGH):
                found.append((node.func.attr, node.lineno))
    return found


def test_nothing_goes_round_it() -> None:
    seen = set()
    for room in ROOMS:
        for path in sorted((PACKAGE / room).glob("*.py")):
            name = str(path.relative_to(PACKAGE))
            for call, line in touched(path.read_text("utf-8")):
                assert (name, call) in ALLOWED, f"{name}:{line} calls {call}: go through Entries"
                seen.add((name, call))
    assert seen == ALLOWED, "the list allows more than is used"


@pytest.mark.parametrize(
    "source",
    ["(folder / name).read_bytes()", "open(path)", "os.open(path, 0)", "path.unlink()", "os.rename(a, b)"],
)
def test_the_search_would_notice(source: str) -> None:
    assert touched(source)
    assert not touched("FILES.open(path)")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return embedded_tars(tmp_path)


def read_all(out: Path) -> None:
    for shard in open_vectors(out).written:
        shard.check()
        list(shard.batches())


@pytest.mark.parametrize("what", ["manifest", "receipt", "shard", "shards"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_vectors_with_links_and_pipes(what: str, kind: str, out: Path, tmp_path: Path) -> None:
    """Whoever opened a pipe would wait for ever."""
    place = {
        "manifest": out / MANIFEST,
        "receipt": next((out / SHARDS).glob("*.json")),
        "shard": next((out / SHARDS).glob("*.parquet")),
        "shards": out / SHARDS,
    }[what]
    target = tmp_path / "elsewhere"
    shutil.move(place, target)
    if kind == "link":
        place.symlink_to(target)
    else:
        os.mkfifo(place)
    if what == "manifest":
        assert not is_vectors(out)
    if what == "receipt":  # read only of a folder that is not finished
        return
    with pytest.raises(DataError):
        read_all(out)
