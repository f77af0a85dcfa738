"""A catalog from a stranger: other tables, values of other types and sizes, statements that never end."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import zlib
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bombs import npy
from circles import lead_in_circles
from commands import refused
from resealed import VECTORS, D, make, reseal

from diptych import databases
from diptych.errors import DiptychError, IndexFault, Unavailable
from diptych.index import deadline
from diptych.index.engines.embedded import checksums, connections
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("catalog") / "index")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "index")
    return tmp_path / "index"


def rewrite(folder: Path, script: str) -> None:
    """Change the schema of a catalog."""
    with closing(sqlite3.connect(folder / "index.db", isolation_level=None)) as db:
        db.executescript(script)


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"
USE = """
import sys
from diptych.errors import DiptychError
from diptych.index.engines.embedded.index import EmbeddedIndex
for writable in (False, True):
    try:
        EmbeddedIndex.open(sys.argv[1], writable=writable).close()
    except DiptychError as error:
        print(error)
"""


LITTLE_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
"""


@pytest.mark.parametrize(
    "script",
    [
        f"DROP TABLE columns; CREATE VIEW columns AS {ENDLESS} 'a' AS name, '[]' AS kinds FROM n WHERE x < 0",
        f"DROP TABLE meta; CREATE VIEW meta AS {ENDLESS} 'format' AS key, '2' AS value FROM n WHERE x < 0",
        f"CREATE TRIGGER t AFTER UPDATE ON meta BEGIN INSERT INTO dead(slot) {ENDLESS} x FROM n WHERE x < 0; END",
        "CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM items; END",
        "CREATE TABLE more(x)",
        "CREATE INDEX more ON items(text)",
        "CREATE VIEW more AS SELECT 1",
        "ALTER TABLE items ADD COLUMN more TEXT",
        "DROP TABLE collections; CREATE TABLE collections(number INTEGER PRIMARY KEY, name TEXT NOT NULL, root TEXT "
        "NOT NULL, more TEXT GENERATED ALWAYS AS (zeroblob(1000000000)) VIRTUAL)",
        "DROP INDEX texts_of_image; CREATE INDEX texts_of_image ON items(image_id, zeroblob(9)) WHERE image_id != ''",
        "DROP VIEW image_texts; CREATE VIEW image_texts AS SELECT slot, text FROM items",
        "DROP TABLE dead",
    ],
)  # fmt: skip
def test_a_catalog_of_other_tables_is_refused(script: str, folder: Path) -> None:
    """In a process of its own: SQLite does not hear an interrupt while it waits for a view without end."""
    rewrite(folder, script)
    done = subprocess.run(
        [sys.executable, "-c", USE, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stdout
    assert all("index.db" in line for line in said)
    assert "index.db" in refused("index", "info", folder)


def test_an_older_format_is_told_by_its_number(folder: Path) -> None:
    rewrite(folder, "UPDATE meta SET value = '1' WHERE key = 'format'; DROP TABLE graphs")
    with pytest.raises(IndexFault, match=r"format '1'.* 2:"):
        EmbeddedIndex.open(folder)


def test_the_schema_is_not_trusted(folder: Path) -> None:
    with closing(connections.connect_reader(folder / "index.db")) as db:
        assert db.execute("PRAGMA trusted_schema").fetchone() == (0,)
        if hasattr(db, "getconfig"):
            assert db.getconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE)  # type: ignore[attr-defined]


@pytest.mark.parametrize("writable", [False, True])
def test_a_statement_has_an_end(folder: Path, writable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "STEPS_ALLOWED", 20_000_000)
    with EmbeddedIndex.open(folder, writable=writable) as index:
        store = index._store
        with (
            pytest.raises(IndexFault, match="index"),
            store.writing() if writable else store.reading() as db,
        ):
            db.execute(f"{ENDLESS} x FROM n WHERE x < 0").fetchone()
        assert index.search(VECTORS[0], 1).ids == ["image 0"]


def test_a_trigger_behind_a_hundred_indexes(folder: Path) -> None:
    """SQLite lets an index of a key stand there any number of times, and the look at all of them ended."""
    with closing(sqlite3.connect(folder / "index.db", isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        key = "SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master WHERE name LIKE 'sqlite_autoindex_items%'"
        for _ in range(100):
            db.execute(f"INSERT INTO sqlite_master {key} LIMIT 1")
        trigger = "CREATE TRIGGER t AFTER INSERT ON dead BEGIN DELETE FROM items; END"
        db.execute("INSERT INTO sqlite_master VALUES ('trigger', 't', 'dead', 0, ?)", (trigger,))
    for writable in (False, True):
        with pytest.raises(IndexFault, match="sqlite_autoindex_items"):
            EmbeddedIndex.open(folder, writable=writable)


@pytest.mark.parametrize(
    ("table", "rows", "use"),
    [
        ("thumbnails", "INSERT INTO thumbnails VALUES (:n, zeroblob(400), 0)", "compact"),
        ("thumbnails", "INSERT INTO thumbnails VALUES (:n, zeroblob(400), 0)", "verify"),
        ("dead", "INSERT INTO dead VALUES (:n, :n)", "verify"),
        ("collections", "INSERT INTO collections VALUES (:n, 'name', hex(zeroblob(15)))", "collections"),
    ],
)
def test_pages_that_lead_in_circles(table: str, rows: str, use: str, folder: Path) -> None:
    """A table of two hundred million rows in a file of a megabyte: in a process with little memory."""
    rewrite(folder, "PRAGMA journal_mode = DELETE; PRAGMA page_size = 512; VACUUM")
    with closing(sqlite3.connect(folder / "index.db")) as db:
        db.executemany(rows, ({"n": n} for n in range(100, 30_000)))
        checksums.seal(db)
        db.commit()
    lead_in_circles(folder / "index.db", table, depth=5)
    script = LITTLE_MEMORY + USE.replace(".close()", f".{use}()")
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "more memory" not in done.stdout


def test_a_file_is_as_large_as_what_was_written(folder: Path) -> None:
    """One of a terabyte took as many steps as its size."""
    os.truncate(folder / "index.db", 1 << 40)
    assert databases.size_on_disk(folder / "index.db") < 1 << 27


def test_a_file_system_may_count_late_or_compress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZFS counts a block of a new file for seconds: a sound index was called damaged."""
    with EmbeddedIndex.open(folder, writable=True) as index:
        items = [Item(f"more {n}", "image") for n in range(300)]
        index.add(items, np.repeat(VECTORS[:1], len(items), axis=0))
    of_file = Path.stat

    def one_block(path: Path, **how: Any) -> Any:
        status = of_file(path, **how)
        names = [name for name in dir(status) if name.startswith("st_")]
        values = {name: getattr(status, name) for name in names}
        return SimpleNamespace(**{**values, "st_blocks": 1})

    monkeypatch.setattr(Path, "stat", one_block)
    with EmbeddedIndex.open(folder) as index:
        assert len(list(index.contents(0, "image"))) > 300


def test_many_queries_read_an_item_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million hits took more steps than a small catalog explains: it was called damaged."""
    monkeypatch.setattr(databases, "STEPS_ALLOWED", 0)
    monkeypatch.setattr(databases, "STEPS_PER_BYTE", 1)
    monkeypatch.setattr(connections, "STEPS", 1000)
    with EmbeddedIndex.open(folder) as index:
        found = index.search_many(np.repeat(VECTORS[:1], 10_000, axis=0), 3)
        assert found == [index.search(VECTORS[0], 3)] * 10_000


def test_a_catalog_of_holes_is_not_copied(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terabyte was copied where the catalog cannot be written, to compare the full text."""
    monkeypatch.setattr(databases, "UNCOUNTED", 0)
    rewrite(folder, "PRAGMA journal_mode = DELETE")
    catalog = folder / "index.db"
    data = bytearray(catalog.read_bytes())
    size, pages = int.from_bytes(data[16:18], "big"), len(data) // 4096
    assert size == 4096
    leaves = size // 4 - 2  # free pages that one page of the list names
    data += (0).to_bytes(4, "big") + leaves.to_bytes(4, "big")
    data += b"".join((pages + 2 + n).to_bytes(4, "big") for n in range(leaves))
    data[28:40] = b"".join(n.to_bytes(4, "big") for n in (pages + 1 + leaves, pages + 1, leaves + 1))
    catalog.write_bytes(data)
    os.truncate(catalog, (pages + 1 + leaves) * size)
    os.link(catalog, tmp_path / "own.db")
    with EmbeddedIndex.open(folder) as index:
        (fault,) = index.verify()
    assert "never written" in fault


def test_a_segment_of_holes_hears_the_deadline(folder: Path) -> None:
    """The checksum of its one block took minutes without a look at the clock."""
    (segment,) = folder.glob("vectors-*-image.f32")
    rows = (1 << 33) // (4 * D)
    os.truncate(segment, 1 << 33)
    reseal(folder, "UPDATE segments SET rows = ? WHERE kind = 'image'", rows)
    reseal(folder, "UPDATE blocks SET rows = ? WHERE segment = 1", rows)
    with EmbeddedIndex.open(folder) as index:
        begin = time.monotonic()
        with pytest.raises(Unavailable), deadline.within(0.2):
            index.search(VECTORS[0], 1, kind="image", exact=True)
        assert time.monotonic() - begin < 5


# ---------------------------------------------------------------------- values

BAD: list[Any] = [
    None, -1, 0, 1, 2**31, 2**40, 2**62, 2**63 - 1, 1.5, float("inf"), "", "x", "-1", "1e3", "1" * 30, "٣", "null",
    "[]", "{}", '{"1": -5}', '{"1": "x"}', '{"x": 1}', '{"1": 1e300}', "[" * 5000, '{"99": 4294967295}', '["list", 3]',
    b"x", "image", "text", "\x1b[2J", "a\x00b", "../x", "/etc/passwd", "vectors-000001-image.f32", "binary",
]  # fmt: skip
CELLS = {
    "segments": ("number", "kind", "rows", "file"),
    "blocks": ("segment", "start", "rows", "checksum"),
    "graphs": ("kind", "file", "rows", "size", "checksum", "covers"),
    "collections": ("number", "name", "root"),
    "columns": ("name", "kinds"),
    "dead": ("serial", "slot"),
    "items": ("slot", "id", "kind", "path", "text", "image_id", "metadata", "content", "collection"),
    "thumbnails": ("slot", "jpeg"),
}
FACTS = (
    "dimension",
    "precision",
    "generation",
    "epoch",
    "next_segment",
    "dead_sum",
    "id",
    "model",
    "created",
)


def use(folder: Path) -> None:
    """Everything that one does with an index; each of it works or is refused in one sentence."""
    with suppress(DiptychError), EmbeddedIndex.open(folder, writable=True) as index:
        for work in (
            lambda: index.info,
            lambda: index.search(VECTORS[0], 5),
            lambda: index.search(VECTORS[0], 5, filter="price < 9"),
            lambda: index.search(VECTORS[0], 5, filter='text contains "number"'),
            lambda: index.search_words("number", 5),
            lambda: [index.thumbnail(f"image {n}") for n in range(5)],
            lambda: [index.file(item) for item in index.get([f"image {n}" for n in range(32)]) if item],
            lambda: index.vectors(["image 1"]),
            lambda: index.values("price"),
            lambda: list(index.contents(0)),
            lambda: index.near_duplicates(limit=3),
            lambda: index.verify(),
            lambda: index.add([Item("new", metadata={"price": 1})], VECTORS[:1]),
            lambda: index.delete(["image 5"]),
            lambda: index.compact(),
            lambda: index.build_graph("image", codes=True),
            lambda: index.search(VECTORS[0], 5),
        ):
            with suppress(DiptychError):
                work()


def reseal_all(db: sqlite3.Connection) -> None:
    """Give the big tables the checksums of what they hold, too."""
    for row in db.execute(f"SELECT rowid, {', '.join(CELLS['items'])} FROM items").fetchall():
        rowid, slot, *rest = row
        with suppress(TypeError, ValueError, AttributeError):
            sums = checksums.sum_of(slot, *rest[:5], *rest[6:]), checksums.sum_of(slot, rest[5])
            db.execute("UPDATE items SET checksum = ?, metadata_checksum = ? WHERE rowid = ?", (*sums, rowid))
    with suppress(TypeError, ValueError, OverflowError):
        checksums.recount_dead(db)


@pytest.mark.parametrize(
    ("table", "column"), [(table, column) for table, columns in CELLS.items() for column in columns]
)
def test_a_value_of_another_type_or_size(table: str, column: str, sound: Path, tmp_path: Path) -> None:
    original = tmp_path / "original"
    shutil.copytree(sound, original)
    with EmbeddedIndex.open(original, writable=True) as index:
        index.collection("photos", str(tmp_path / "photos"))
        index.update([Item("image 4", metadata={"price": 4}, thumbnail=b"jpeg", path="a.png")], VECTORS[4:5])
    for number, value in enumerate(BAD):
        folder = tmp_path / f"index{number}"
        shutil.copytree(original, folder)
        with closing(sqlite3.connect(folder / "index.db", isolation_level=None)) as db:
            db.execute("BEGIN")
            try:
                db.execute(
                    f"UPDATE {table} SET {column} = ? WHERE {column} IN (SELECT {column} FROM {table} LIMIT 1)",
                    (value,),
                )
            except sqlite3.IntegrityError:
                continue
            reseal_all(db)
            checksums.seal(db)
            db.execute("COMMIT")
        use(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_of_another_type_or_size(fact: str, sound: Path, tmp_path: Path) -> None:
    for number, value in enumerate(BAD):
        folder = tmp_path / f"index{number}"
        shutil.copytree(sound, folder)
        with suppress(sqlite3.IntegrityError):
            reseal(folder, f"UPDATE meta SET value = ? WHERE key = '{fact}'", value)
            use(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("fact", [*FACTS, "digest", "format", "version", "fingerprint"])
def test_a_fact_that_is_missing(fact: str, folder: Path) -> None:
    reseal(folder, f"DELETE FROM meta WHERE key = '{fact}'")
    if fact == "digest":
        with closing(sqlite3.connect(folder / "index.db", isolation_level=None)) as db:
            db.execute("DELETE FROM meta WHERE key = 'digest'")
    with pytest.raises(IndexFault):
        EmbeddedIndex.open(folder)


@pytest.mark.parametrize("start", [-(2**62), -5])
def test_rows_that_begin_before_their_file(start: int, folder: Path) -> None:
    """They were read from a place that no file has."""
    reseal(folder, "UPDATE blocks SET start = ? WHERE segment = 1", start)
    with EmbeddedIndex.open(folder) as index:
        assert "vectors-000001-image.f32 has checksums for 0 of its 32 rows." in index.verify()


@pytest.mark.parametrize("column", ["id", "content"])
def test_the_contents_of_a_collection_are_texts(column: str, folder: Path) -> None:
    reseal(folder, f"UPDATE items SET {column} = ? WHERE id = 'image 5'", b"x")
    with EmbeddedIndex.open(folder) as index, pytest.raises(IndexFault, match="items"):
        list(index.contents(0))


@pytest.mark.parametrize("head", ["{'descr': (", "{1: 1, 'a': 2}", "{[]: 1}", "'" * 3, "(" * 5000])
def test_codes_whose_head_is_no_array_are_left_alone(head: str, folder: Path) -> None:
    """numpy reads the head of an array with Python's own tokenizer and ``sorted``, which raise errors of their own."""
    (file,) = folder.glob("graph-*")
    data = npy(head)
    file.write_bytes(data)
    reseal(folder, "UPDATE graphs SET size = ?, checksum = ?", len(data), zlib.crc32(data))
    with EmbeddedIndex.open(folder) as index:
        assert index.search(VECTORS[0], 1, kind="image").exact


@pytest.mark.parametrize("signature", ["é", "\x00", "x" * 10_000])
def test_a_graph_signed_with_any_text_is_left_alone(signature: str, tmp_path: Path) -> None:
    pytest.importorskip("usearch")
    folder = tmp_path / "index"
    with EmbeddedIndex.create(folder, D) as index:
        index.add([Item(f"image {n}") for n in range(32)], VECTORS[:32])
        index.build_graph("image")
    reseal(folder, "UPDATE meta SET value = ? WHERE key = 'signature-image'", signature)
    with EmbeddedIndex.open(folder) as index:
        assert index.search(VECTORS[0], 1, kind="image").exact


def test_two_segments_that_name_one_file(folder: Path) -> None:
    reseal(folder, "INSERT INTO segments VALUES (2147483, 'image', 32, 'vectors-000001-image.f32')")
    assert "vectors-000001-image.f32" in refused("index", "info", folder)


def test_a_thumbnail_that_is_a_number_allocates_nothing(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "index.db", isolation_level=None)) as db:
        slot = db.execute("SELECT slot FROM items WHERE id = 'image 4'").fetchone()[0]
        db.execute("INSERT INTO thumbnails VALUES (?, ?, 0)", (slot, 2**40))
    with EmbeddedIndex.open(folder) as index, pytest.raises(IndexFault, match="thumbnail"):
        index.thumbnail("image 4")


def test_the_tables_are_those_of_the_format() -> None:
    assert {name for kind, name, _ in connections._expected() if kind == "view"} == {
        "image_texts",
        "text_texts",
    }
    assert not [name for kind, name, _ in connections._expected() if kind == "trigger"]


@pytest.mark.parametrize(
    ("number", "block"),
    [(10, "000000000102 0000 ffffffffffffffff"), (1, "1d3e"), (1, "ffffffffffffffffff01")],
)
def test_a_forged_full_text_is_one_sentence(number: int, block: str, folder: Path) -> None:
    """A length that is not there was a MemoryError of SQLite, other counts were scores that are no numbers."""
    reseal(folder, "UPDATE image_words_data SET block = ? WHERE id = ?", bytes.fromhex(block), number)
    with EmbeddedIndex.open(folder) as index:
        try:
            hits = index.search_words("number 5", 5)
            assert all(math.isfinite(hit.score) for hit in hits)
        except DiptychError as error:
            assert str(folder) in str(error) or "full text" in str(error)  # noqa: PT017
