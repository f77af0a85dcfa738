"""A catalog from a stranger names files: only plain files of the index's own folder are read, changed or removed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import process, refused
from resealed import VECTORS, make, name_in_journal, reseal

from diptych.errors import IndexFault
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.embedded.segments import FILES
from diptych.index.protocol import Item, Precision

OUTSIDE = b"the only copy of a thesis\n" * 400
SEGMENT, GRAPH, CODES = "vectors-000099-image.f32", "graph-000099-text.usearch", "graph-000099-text.codes"
TABLES = [("segments", SEGMENT), ("graphs", GRAPH), ("graphs", CODES)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("names") / "index")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A file beside the index, which stays as it is."""
    file = tmp_path / "thesis.tex"
    file.write_bytes(OUTSIDE)
    yield file
    assert file.read_bytes() == OUTSIDE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "thesis.tex"]


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Whoever waits for a FIFO is interrupted."""

    def stop(*_: object) -> None:
        raise TimeoutError("it waits for a file that never ends")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def name_it(folder: Path, table: str, name: object, rows: int = 0) -> None:
    """Record a file of this name."""
    if table == "segments":
        reseal(folder, "INSERT INTO segments VALUES (99, 'image', ?, ?)", rows, name)
    else:
        size = len(OUTSIDE)
        reseal(folder, "INSERT INTO graphs VALUES ('text', ?, 8, ?, ?, '{}')", name, size, _crc(OUTSIDE))


def _crc(data: bytes) -> int:
    import zlib

    return zlib.crc32(data)


def use(folder: Path, name: str) -> None:
    """Every use of the index is refused with a sentence that names the file."""
    place, before = str(folder), contents(folder)
    for command in (
        ("index", "verify", place),
        ("index", "info", place),
        ("index", "remove", place, "image 4"),
        ("index", "compact", place),
        ("search", place, "number"),
    ):
        assert name in refused(*command), command
    for writable in (False, True):
        with pytest.raises(IndexFault):
            EmbeddedIndex.open(folder, writable=writable)
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    """The plain files with rows, as they are."""
    return {p.name: p.read_bytes() for p in folder.glob("*-0*") if p.is_file()}


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(("table", "own"), TABLES)
@pytest.mark.parametrize(
    "form", ["../thesis.tex", "{absolute}", "x/../../thesis.tex", "{own}/../../thesis.tex"]
)
@pytest.mark.parametrize("rows", [0, 3])
def test_a_name_of_another_folder(
    form: str, table: str, own: str, rows: int, folder: Path, outside: Path
) -> None:
    name = form.format(absolute=outside, own=own)
    name_it(folder, table, name, rows)
    use(folder, "thesis.tex")


@pytest.mark.parametrize("table", ["segments", "graphs"])
@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "index.db", "notes.txt", f"{SEGMENT}\n", f"./{SEGMENT}", f"a\x00{SEGMENT}", b"blob", 7,
     "vectors-000099-image.f32x", "vectors-٠٠٠٠٩٩-image.f32", "graph-000099-.codes", "vectors-000099-a/b.f32",
     "\x1b[2J" * 1000],
)  # fmt: skip
def test_a_name_that_no_index_gives_its_files(table: str, name: object, folder: Path, outside: Path) -> None:
    (folder / "notes.txt").write_bytes(OUTSIDE)
    name_it(folder, table, name)
    use(folder, "")
    said = refused("index", "verify", folder)
    assert "\x1b" not in said
    assert len(said) < 600
    assert (folder / "notes.txt").read_bytes() == OUTSIDE


@pytest.mark.parametrize(("precision", "suffix"), [("float32", "f32"), ("float16", "f16"), ("binary", "b1")])
def test_every_name_that_is_written_is_known(precision: Precision, suffix: str, tmp_path: Path) -> None:
    path = make(tmp_path / "index", precision)
    with EmbeddedIndex.open(path, writable=True) as index:
        if precision != "binary":
            pytest.importorskip("usearch")
            index.build_graph("text")
        index.compact()
        assert index.verify() == []
    names = [p.name for p in path.iterdir() if "-0" in p.name]
    assert {name.split(".")[1] for name in names} >= {suffix, "codes"}
    assert all(FILES.path(path, name) == path / name for name in names)


def test_only_own_remains_are_removed(folder: Path, outside: Path) -> None:
    for name in ("vectors-notes.txt", "graph-of-my-family.png"):
        (folder / name).write_bytes(OUTSIDE)
    (folder / SEGMENT).write_bytes(OUTSIDE)
    EmbeddedIndex.open(folder, writable=True).close()
    assert (folder / "vectors-notes.txt").read_bytes() == OUTSIDE
    assert (folder / "graph-of-my-family.png").read_bytes() == OUTSIDE
    assert not (folder / SEGMENT).exists()


# ---------------------------------------------------------------------- links, pipes, folders


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def dangling(path: Path, outside: Path) -> None:
    path.symlink_to(outside.with_name("new file"))


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def directory(path: Path, outside: Path) -> None:
    path.mkdir()


KINDS_OF_ENTRY = [link, dangling, pipe, directory]


@pytest.mark.parametrize(("table", "name"), TABLES)
@pytest.mark.parametrize("entry", KINDS_OF_ENTRY)
@pytest.mark.parametrize("rows", [0, 3])
def test_a_recorded_file_that_is_no_plain_file(
    entry: Callable[[Path, Path], None], table: str, name: str, rows: int, folder: Path, outside: Path
) -> None:
    entry(folder / name, outside)
    name_it(folder, table, name, rows)
    use(folder, name)


@pytest.mark.parametrize("pattern", ["vectors-*-image*", "graph-*", "index.db", "writer.lock"])
def test_own_file_replaced_by_a_link(pattern: str, folder: Path, tmp_path: Path) -> None:
    (file,) = folder.glob(pattern)
    target = tmp_path / "elsewhere"
    file.rename(target)
    file.symlink_to(target)
    before = target.read_bytes()
    for command in (("index", "remove", folder, "image 4"), ("index", "compact", folder)):
        said = refused(*command)
        assert file.name in said
        assert "link" in said
    assert target.read_bytes() == before


@pytest.mark.parametrize("entry", KINDS_OF_ENTRY)
@pytest.mark.parametrize("name", [SEGMENT, CODES])
def test_a_stray_entry_in_the_way_of_writing(
    entry: Callable[[Path, Path], None], name: str, folder: Path, outside: Path
) -> None:
    entry(folder / name, outside)
    for command in (("index", "remove", folder, "image 4"), ("index", "compact", folder)):
        assert name in refused(*command)


@pytest.mark.parametrize("entry", [link, pipe])
@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_files_of_the_database(
    entry: Callable[[Path, Path], None], suffix: str, folder: Path, outside: Path
) -> None:
    """In a process of its own: SQLite waits for a pipe, and nothing but a kill ends it."""
    (folder / f"index.db{suffix}").unlink(missing_ok=True)
    entry(folder / f"index.db{suffix}", outside)
    child = process("index", "remove", folder, "image 4")
    try:
        said = child.communicate(timeout=20)[1]
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == 2
    assert f"index.db{suffix} is a link, a pipe" in said


def test_a_journal_that_names_another_file(folder: Path, outside: Path) -> None:
    """SQLite removed that file when an index was verified or opened for writing."""
    name_in_journal(folder / "index.db", outside)
    use(folder, "index.db-journal names another file")


def test_a_catalog_of_another_name_is_verified_as_a_copy(folder: Path, tmp_path: Path) -> None:
    """A journal beside it would be undone in the other place."""
    (folder / "index.db-journal").touch()
    os.link(folder / "index.db", tmp_path / "own.db")
    before = (folder / "index.db").stat().st_mtime_ns
    with EmbeddedIndex.open(folder) as index:
        assert index.verify() == []
    journal = folder / "index.db-journal"
    name_in_journal(folder / "index.db", tmp_path / "none")
    journal.write_bytes(journal.read_bytes()[:512])
    with EmbeddedIndex.open(folder) as index:
        assert index.verify() == []
    assert (folder / "index.db").stat().st_mtime_ns == before
    assert journal.exists()


@pytest.mark.parametrize("pattern", ["vectors-*-image*", "graph-*"])
def test_verify_names_a_file_that_became_a_link_since(pattern: str, folder: Path, tmp_path: Path) -> None:
    with EmbeddedIndex.open(folder) as index:
        (file,) = folder.glob(pattern)
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        (fault,) = index.verify()
    assert file.name in fault
    assert "link" in fault


# ---------------------------------------------------------------------- writing chosen bytes


@pytest.mark.parametrize("absolute", [False, True])
def test_vectors_chosen_by_a_stranger_become_no_script(absolute: bool, tmp_path: Path) -> None:
    """The rows of a binary index are the signs of its vectors: any bytes one likes."""
    script = tmp_path / "script.sh"
    script.write_bytes(b"#!/bin/sh\necho safe\n")
    folder = make(tmp_path / "index", "binary")
    name_it(folder, "segments", str(script) if absolute else "../script.sh")
    chosen = np.unpackbits(np.frombuffer(b"rm", np.uint8)).astype(np.float32) * 2 - 1
    with (
        pytest.raises(IndexFault, match=r"script\.sh"),
        EmbeddedIndex.open(folder, writable=True) as index,
    ):
        index.add([Item("new")], chosen[None])
    assert script.read_bytes() == b"#!/bin/sh\necho safe\n"


def test_a_catalog_that_changes_while_it_is_open(folder: Path, outside: Path) -> None:
    with EmbeddedIndex.open(folder, writable=True) as index:
        name_it(folder, "segments", "../thesis.tex")
        with pytest.raises(IndexFault, match=r"thesis\.tex"):
            index.add([Item("new")], VECTORS[:1])
        with pytest.raises(IndexFault, match=r"thesis\.tex"):
            index.compact()


def test_the_folder_itself_may_be_reached_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with EmbeddedIndex.open(tmp_path / "link", writable=True) as index:
        index.add([Item("new")], VECTORS[:1])
        index.compact()
        assert index.verify() == []


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("writable", [False, True])
def test_a_second_name_beside_the_catalog(end: str, writable: bool, folder: Path, outside: Path) -> None:
    """SQLite would have filled or removed the file."""
    (folder / f"index.db{end}").unlink(missing_ok=True)
    os.link(outside, folder / f"index.db{end}")
    with pytest.raises(IndexFault, match=f"index.db{end}"):
        EmbeddedIndex.open(folder, writable=writable)


def test_a_second_name_of_a_segment(folder: Path, outside: Path) -> None:
    """What is behind the committed rows was cut off, and new rows were written there."""
    (segment,) = folder.glob("vectors-*-image.f32")
    content = segment.read_bytes() + OUTSIDE
    segment.unlink()
    other = folder / "thesis.txt"
    other.write_bytes(content)
    os.link(other, segment)
    with pytest.raises(IndexFault, match="vectors"), EmbeddedIndex.open(folder, writable=True) as index:
        index.add([Item("new")], VECTORS[:1])
    assert other.read_bytes() == content


def test_a_second_name_of_the_catalog_is_read_and_not_written(folder: Path) -> None:
    os.link(folder / "index.db", folder / "backup")
    with EmbeddedIndex.open(folder) as index:
        assert index.search(VECTORS[0], 3).hits
    with pytest.raises(IndexFault, match=r"index\.db"):
        EmbeddedIndex.open(folder, writable=True)
