"""Power loss: every state that a disk may be left in opens as the state before a change, or as the one after it.

A recording layer stands in front of the calls by which files are synced, renamed and removed. At each of them, and at
the end, it asks what a disk may hold if the power goes now: of what was written and not synced every prefix of whole
sectors, or all but one byte, is there, and a name that was not synced with its folder has not come or has not gone yet.
Here the files of SQLite are taken as they are; test_power_calls.py reads its system calls, too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resealed import VECTORS, make
from small import texts

from diptych.aggregators import Mean
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.regions import Regions
from diptych.errors import IndexFault
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item
from diptych.model.retriever import Retriever, Tower
from diptych.storage import parse_json
from diptych.training.checkpoint import Progress, has_state, save_state

SECTOR = 512  # bytes that a disk writes whole
SQLITE = ("index.db", "index.db-wal", "index.db-shm")
Names = dict[str, int | None]
"""What lies below a folder: the inodes of files by name, None for folders."""
Tree = dict[str, bytes | None]
"""The same with the bytes of files."""


class Disk:
    """What of a folder has reached the disk, and the states that it may be left in."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, syncs: bool = True) -> None:
        self.folder = folder
        self.states: list[Tree] = []
        self.written: dict[int, bytes] = {}  # of each inode
        self.history = [self._names()]  # since the names were last synced
        self.synced = dict(self.written)
        for call in ("replace", "rename", "link", "unlink", "rmdir"):
            monkeypatch.setattr(os, call, self._noted(getattr(os, call)))
        monkeypatch.setattr(os, "fsync", self._syncing(os.fsync) if syncs else lambda handle: None)

    def _names(self) -> Names:
        found: Names = {}
        for path in sorted(self.folder.rglob("*")):
            found[str(path.relative_to(self.folder))] = number = (
                path.stat().st_ino if path.is_file() else None
            )
            if number is not None:
                self.written[number] = path.read_bytes()
        return found

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **options: Any) -> Any:
            self.look()
            done = call(*given, **options)
            self.look()
            return done

        return noted

    def _syncing(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def syncing(handle: int) -> None:
            self.look()
            call(handle)
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            if path.is_file():
                self.synced[path.stat().st_ino] = path.read_bytes()
            elif path == self.folder:
                self.history = [self._names()]
            self.look()

        return syncing

    def look(self) -> None:
        """Note the states that the disk may be left in now: all prefixes of the changed names, with all contents."""
        now = self._names()
        if now != self.history[-1]:
            self.history.append(now)
        own = {name: number for name, number in now.items() if Path(name).name in SQLITE}
        for names in self.history:
            names = {n: i for n, i in names.items() if Path(n).name not in SQLITE} | own
            whole = {name: None if i is None else self.written[i] for name, i in names.items()}
            sql = own.values()
            old = {n: self._old(i) if i is not None and i not in sql else whole[n] for n, i in names.items()}
            self.add(whole)
            self.add(old)
            for name in (name for name in whole if whole[name] != old[name]):
                new_bytes, old_bytes = whole[name] or b"", old[name] or b""
                pairs = enumerate(zip(new_bytes, old_bytes, strict=False))
                same = next((n for n, (a, b) in pairs if a != b), min(len(new_bytes), len(old_bytes)))
                first = same + SECTOR - same % SECTOR
                for cut in (0, *range(first, len(new_bytes), SECTOR), max(same, len(new_bytes) - 1)):
                    self.add({**whole, name: new_bytes[:cut] + old_bytes[cut:]})

    def _old(self, number: int) -> bytes:
        return self.synced.get(number, b"")

    def add(self, tree: Tree) -> None:
        if tree not in self.states:
            self.states.append(tree)

    def left(self, place: Path) -> Iterator[Path]:
        """Each state, as a folder."""
        for tree in self.states:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for name, data in sorted(tree.items()):
                if data is None:
                    (place / name).mkdir(parents=True, exist_ok=True)
                else:
                    (place / name).parent.mkdir(parents=True, exist_ok=True)
                    (place / name).write_bytes(data)
            yield place


def answers(folder: Path) -> Any:
    """What an index says; opened for writing first, as the next writer does."""
    with EmbeddedIndex.open(folder, writable=True):
        pass
    with EmbeddedIndex.open(folder) as index:
        assert index.verify() == []
        ids = sorted(index.contents(0)) if hasattr(index, "contents") else []
        hits = [index.search(row, 40, exact=True) for row in VECTORS[:3]]
        return ids, [[(hit.item.id, hit.item.text, round(hit.score, 5)) for hit in one] for one in hits]


CHANGES: dict[str, Callable[[EmbeddedIndex], object]] = {
    "add": lambda index: index.add([Item(f"new {n}", text="new") for n in range(4)], VECTORS[:4]),
    "update": lambda index: index.update([Item(f"image {n}", text="other") for n in range(4)], VECTORS[4:8]),
    "delete": lambda index: index.delete(["image 1", "image 2"]),
    "compact": lambda index: index.compact(),
    "graph": lambda index: index.build_graph("text", codes=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "index")
    before = answers(folder)
    with EmbeddedIndex.open(folder, writable=True) as index, monkeypatch.context() as patch:
        disk = Disk(folder, patch)
        CHANGES[change](index)
        disk.look()
    after = answers(folder)
    assert change in ("compact", "graph") or before != after
    assert len(disk.states) > 2 or change == "delete"  # which changes the catalog alone
    seen = [answers(place) for place in disk.left(tmp_path / "left")]
    assert all(found in (before, after) for found in seen)
    assert after in seen


def small_retriever(seed: int) -> Retriever:
    torch.manual_seed(seed)
    words = build_vocabulary(texts(50), min_count=1)
    towers = Tower(Regions(16, 12, hidden=8), Mean()), Tower(BiGRU(len(words), 6, 12), Mean())
    return Retriever(*towers, RegionInput(16), WordInput(words))


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [small_retriever(seed) for seed in (0, 1)]
    models[0].save_pretrained(tmp_path / "disk" / "model")
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "disk", patch)
        models[1].save_pretrained(tmp_path / "disk" / "model")
        disk.look()
    known = [model.fingerprint() for model in models]
    found = [
        Retriever.from_pretrained(place / "model").fingerprint() for place in disk.left(tmp_path / "left")
    ]
    assert set(found) == set(known)


def test_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    save_state(run, {"retriever": {"a": torch.zeros(300)}}, Progress(step=1), [])
    with monkeypatch.context() as patch:
        disk = Disk(run, patch)
        save_state(run, {"retriever": {"a": torch.ones(300)}}, Progress(step=2), [])
        disk.look()
    steps = []
    for place in disk.left(tmp_path / "left"):
        assert has_state(place)
        step = parse_json((place / "last" / "progress.json").read_bytes())["step"]
        weights = np.frombuffer((place / "last" / "retriever.safetensors").read_bytes()[-1200:], np.float32)
        assert set(weights) == {float(step - 1)}
        steps.append(step)
    assert set(steps) == {1, 2}


def test_the_model_of_a_disk_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is renamed before it is synced may be empty under its name."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a").write_bytes(b"before")
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "disk", patch)
        (tmp_path / "disk" / "b").write_bytes(b"after")
        os.replace(tmp_path / "disk" / "b", tmp_path / "disk" / "a")
        disk.look()
    assert {"a": b""} in disk.states


@pytest.mark.parametrize("change", ["add", "compact"])
def test_an_index_that_syncs_nothing_would_be_noticed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "index")
    with EmbeddedIndex.open(folder, writable=True) as index, monkeypatch.context() as patch:
        disk = Disk(folder, patch, syncs=False)
        CHANGES[change](index)
        disk.look()
    with pytest.raises(IndexFault):
        [answers(place) for place in disk.left(tmp_path / "left")]
