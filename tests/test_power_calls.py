"""Power loss, by the system calls of a change: every prefix of what was not synced opens as before or as after it.

``strace`` writes down what a process does to the files of an index, SQLite's included. The calls are done again, one
after the other, on a model of a disk; at each sync and at the end, the disk may hold what was synced and any prefix of
what was not, or all of it but one call. Once a change has returned, every state is the one after it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from resealed import make
from test_power import CHANGES, answers

sys.path.insert(0, str(Path(__file__).parent / "attack"))
from system_calls import DONE, strace_works, traced

from diptych.errors import DiptychError
from diptych.index.engines.embedded.index import EmbeddedIndex

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not strace_works(), reason="there is no strace that may attach"
)

CALLS = (
    "openat,creat,write,pwrite64,writev,pwritev,ftruncate,truncate,fallocate,lseek,rename,renameat,renameat2,link,linkat,"
    "unlink,unlinkat,fsync,fdatasync,rmdir"
)
RETURNED = "the change has returned"
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)")
_PART = re.compile(r'"((?:\\x[0-9a-f]{2})*)"|(\d+)<([^>]*)>|([^,\s]+)')


@dataclass
class Step:
    """One change of a disk: ``name`` is the path of a name that comes or goes, ``file`` the number of a file."""

    name: str = ""
    file: int | None = None
    gone: str = ""
    at: int = 0
    data: bytes | None = None
    size: int | None = None

    def apply(self, names: dict[str, int], files: dict[int, bytes]) -> None:
        if self.name or self.gone:
            names.pop(self.gone, None)
            if self.name and self.file is not None:
                names[self.name] = self.file
            return
        assert self.file is not None
        content = files.get(self.file, b"")
        if self.size is not None:
            files[self.file] = content[: self.size].ljust(self.size, b"\0")
        elif self.data is not None:
            files[self.file] = (
                content[: self.at].ljust(self.at, b"\0") + self.data + content[self.at + len(self.data) :]
            )


@dataclass
class Replay:
    """A disk on which calls are done again; ``states`` are (whether the change had returned, what may be left)."""

    folder: Path
    before: Path  # a copy of it as it was
    names: dict[str, int] = field(default_factory=dict)  # as the process sees them
    files: dict[int, bytes] = field(default_factory=dict)
    synced_names: dict[str, int] = field(default_factory=dict)
    synced_files: dict[int, bytes] = field(default_factory=dict)
    pending: list[Step] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # where in its file a descriptor is
    returned: bool = False
    states: list[tuple[bool, dict[str, bytes]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, path in enumerate(sorted(self.before.iterdir())):
            self.synced_files[number] = self.files[number] = path.read_bytes()
            self.synced_names[path.name] = self.names[path.name] = number
        self.next = len(self.names)

    def own(self, path: str) -> str | None:
        """The name of a file of the folder; None for others."""
        return Path(path).name if str(Path(path).parent) == str(self.folder) else None

    def do(self, call: str, parts: list[tuple[bytes, int, str, str]], result: int) -> None:
        """Do a call again."""
        folders = [path for _, _, path, _ in parts if path] or [""]  # a name may be relative to a descriptor
        texts = [str(Path(folders[0], os.fsdecode(text))) for text, *_ in parts if text]
        if call == "rmdir":
            self.look()
            self.returned |= texts[0].endswith(RETURNED)
        if result < 0:
            return
        if call == "openat":
            self.places[result] = 0
            name, flags = self.own(texts[0]), "".join(one for *_, one in parts)
            if name is not None and "O_CREAT" in flags and name not in self.names:
                self.change(Step(name=name, file=self.next))
                self.next += 1
            if name is not None and "O_TRUNC" in flags:
                self.change(Step(file=self.names[name], size=0))
        elif call.startswith(("rename", "link", "unlink")):
            name, other = self.own(texts[0]), self.own(texts[-1])
            assert (name is None) == (other is None), "a file came from elsewhere"
            if name is not None and other is not None:
                gone = "" if call.startswith("link") else name
                new = "" if call.startswith("unlink") else other
                self.change(Step(name=new, gone=gone, file=self.names[name]))
        else:
            self.file_call(call, parts, result)

    def file_call(self, call: str, parts: list[tuple[bytes, int, str, str]], result: int) -> None:
        """A call with a descriptor."""
        _, handle, path, _ = parts[0]
        name, numbers = self.own(path), [int(one) for *_, one in parts if one.isdigit()]
        if call in ("fsync", "fdatasync"):
            self.sync(name, path)
        elif call == "lseek":
            self.places[handle] = result
        elif name is not None:
            file = self.names[name]
            if call == "ftruncate":
                self.change(Step(file=file, size=numbers[0]))
            elif call in ("write", "pwrite64"):
                at = numbers[-1] if call == "pwrite64" else self.places[handle]
                self.change(Step(file=file, at=at, data=parts[1][0][:result]))
                self.places[handle] = at + result if call == "write" else self.places[handle]
            else:
                raise AssertionError(f"{call} is not modelled")

    def now(self) -> dict[str, bytes]:
        """The folder as processes see it."""
        return {name: self.files.get(number, b"") for name, number in self.names.items()}

    def change(self, step: Step) -> None:
        step.apply(self.names, self.files)
        self.pending.append(step)

    def sync(self, name: str | None, path: str) -> None:
        """What the disk may hold before a sync, and what it holds after it."""
        self.look()
        whole = path == str(self.folder)
        number = None if name is None else self.names.get(name)
        done = [
            step
            for step in self.pending
            if (whole and (step.name or step.gone))
            or (not step.name and not step.gone and step.file == number)
        ]
        for step in done:
            step.apply(self.synced_names, self.synced_files)
        self.pending = [step for step in self.pending if step not in done]
        self.look()

    def look(self) -> None:
        """Note every prefix of what was not synced, and all of it but one."""
        some = [self.pending[:count] for count in range(len(self.pending) + 1)]
        some += [self.pending[:n] + self.pending[n + 1 :] for n in range(len(self.pending))]
        for steps in some:
            names, files = dict(self.synced_names), dict(self.synced_files)
            for step in steps:
                step.apply(names, files)
            # what is shared between processes is not read after a loss of power
            tree = {name: files.get(number, b"") for name, number in names.items() if name != "index.db-shm"}
            if (self.returned, tree) not in self.states:
                self.states.append((self.returned, tree))

    def left(self, place: Path) -> Iterator[tuple[bool, Path]]:
        """Each state, as a folder."""
        for returned, tree in self.states:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for name, data in tree.items():
                (place / name).write_bytes(data)
            yield returned, place


def replayed(tmp_path: Path, log: Path, syncs: bool = True) -> Replay:
    """The states that the calls of a log may leave."""
    disk = Replay(tmp_path / "index", tmp_path / "before")
    for line in log.read_text().splitlines():
        found = _CALL.search(line)
        if found is None or (not syncs and "sync" in found[1]):
            continue
        parts = [
            (_bytes(text), int(handle or 0), os.fsdecode(_bytes(path)), other)
            for text, handle, path, other in _PART.findall(found[2])
        ]
        disk.do(found[1], parts, int(found[3]))
    disk.look()
    return disk


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", "")) if text.startswith("\\x") else text.encode()


def recorded(change: str, tmp_path: Path) -> Path:
    """The log of a change of ``tmp_path / "index"``, which was copied to ``tmp_path / "before"``."""
    folder, log = make(tmp_path / "index"), tmp_path / "log"
    shutil.copytree(folder, tmp_path / "before")

    def work(place: Path) -> None:
        with EmbeddedIndex.open(place, writable=True) as index:
            {**CHANGES, **USEARCH}[change](index)
            with suppress(FileNotFoundError):
                (place / RETURNED).rmdir()

    options = ["-o", str(log), "-y", "-xx", "-s", "10000000", "-e", f"trace={CALLS}"]
    assert traced(work, folder, options, tmp_path / "said") == DONE
    return log


USEARCH = {"usearch": lambda index: index.build_graph("image", codes=False)}


@pytest.mark.parametrize("change", [*CHANGES, *USEARCH])
def test_an_index(change: str, tmp_path: Path) -> None:
    disk = replayed(tmp_path, recorded(change, tmp_path))
    now = {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()}
    assert now == disk.now(), "a call is not modelled"
    before, after = answers(tmp_path / "before"), answers(tmp_path / "index")
    assert change in ("compact", "graph", "usearch") or before != after
    seen = [(returned, answers(place)) for returned, place in disk.left(tmp_path / "left")]
    for returned, found in seen:
        assert found == after or (found == before and not returned)
    assert before in [found for _, found in seen]
    assert any(returned for returned, _ in seen)


@pytest.mark.parametrize("change", ["add", "delete"])
def test_an_index_that_syncs_nothing_would_be_noticed(change: str, tmp_path: Path) -> None:
    disk = replayed(tmp_path, recorded(change, tmp_path), syncs=False)
    after = answers(tmp_path / "index")

    def sound(place: Path) -> bool:
        try:
            return bool(answers(place) == after)
        except (DiptychError, AssertionError):
            return False

    assert not all(sound(place) for returned, place in disk.left(tmp_path / "left") if returned)
