"""Folders from a stranger who knows how checksums are computed, opened for everything one does with an index or model.

A fence stands round each of them: files beside the folder must stay as they are, and nothing may be added.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
from hostile import NUMBERS, TEXTS, as_json, mutated, mutated_json, value
from register import CLOSING, Attack, target

from diptych.errors import DiptychError

SECRET = b"the only copy of a thesis\n" * 40
SCRIPT = b"#!/bin/sh\n"
NAMES = (
    "thesis.tex",
    "../thesis.tex",
    "{fence}/thesis.tex",
    "index/../thesis.tex",
    "vectors-000099-image.f32",
    ".",
)


SEEN = {
    "read": 0x1, "written": 0x2, "given other attributes": 0x4, "opened": 0x20, "moved away": 0x40, "moved in": 0x80,
    "made": 0x100, "removed": 0x200,
}  # fmt: skip
"""What Linux's ``inotify`` tells of the entries of a folder."""
INSIDE = ("index", "sound")


@contextmanager
def fence(folder: Path) -> Iterator[None]:
    """Raise when anything beside ``index`` in a folder was opened, read, changed, removed or made.

    Where there is no ``inotify``, a file that was only read is not noticed.
    """
    (folder / "thesis.tex").write_bytes(SECRET)

    def state() -> dict[str, tuple[int, int]]:
        found = [path for path in folder.iterdir() if path.name not in INSIDE]
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = state()
    with watched(folder) as noticed:
        yield
    assert not noticed, noticed
    assert state() == before, "something outside the folder has changed"
    assert (folder / "thesis.tex").read_bytes() == SECRET


@contextmanager
def watched(folder: Path) -> Iterator[set[str]]:
    """What happens to the entries of a folder, filled at the end: whoever does it, Python, SQLite or usearch."""
    system, noticed = ctypes.CDLL(None, use_errno=True), set[str]()
    if not hasattr(system, "inotify_init1"):
        yield noticed
        return
    handle = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert handle >= 0, os.strerror(ctypes.get_errno())
    with os.fdopen(handle, "rb", buffering=0) as events:
        number = system.inotify_add_watch(handle, os.fsencode(folder), sum(SEEN.values()))
        assert number >= 0, os.strerror(ctypes.get_errno())
        try:
            yield noticed
        finally:
            while data := events.read(1 << 20):
                while data:
                    _, mask, _, length = struct.unpack_from("iIII", data)
                    name = os.fsdecode(data[16 : 16 + length].rstrip(b"\0"))
                    data = data[16 + length :]
                    if name and name not in INSIDE:
                        noticed |= {f"{name} was {what}" for what, bit in SEEN.items() if mask & bit}


def use(place: Path, rows: Any) -> None:
    """Everything that one does with an index; each of it works or is refused in one sentence."""
    from diptych.index.engines.embedded.index import EmbeddedIndex
    from diptych.index.protocol import Item

    for writable in (False, True):
        with suppress(DiptychError), EmbeddedIndex.open(place, writable=writable) as index:
            work: list[Callable[[EmbeddedIndex], object]] = [
                lambda index: index.search(rows[0], 5),
                lambda index: index.search(rows[0], 5, kind="image"),
                lambda index: list(index.contents(0)),
                lambda index: index.near_duplicates(limit=3),
                lambda index: index.search(rows[0], 5, kind="image", filter="price < 9"),
                lambda index: index.search_words("number", 5),
                lambda index: [index.thumbnail(f"image {n}") for n in range(5)],
                lambda index: [
                    index.file(item) for item in index.get([f"image {n}" for n in range(32)]) if item
                ],
                lambda index: index.verify(),
            ]
            if writable:
                work += [
                    lambda index: index.add([Item("new", metadata={"price": 1})], rows[:1]),
                    lambda index: index.delete(["image 5"]),
                    lambda index: index.compact(),
                    lambda index: index.build_graph("image", codes=True),
                ]
            for one in work:
                with suppress(DiptychError):
                    one(index)


def _serve(place: Path) -> None:
    from colours import ColourModel
    from fastapi.testclient import TestClient

    from diptych.index.engines.embedded.index import EmbeddedIndex
    from diptych.web.app import create_app

    class Model(ColourModel):
        dim = 16

        def fingerprint(self) -> str:
            return ""

        def _text(self, text: str) -> Any:
            return np.ones(16, np.float32) / 4

    with suppress(DiptychError), EmbeddedIndex.open(place) as index:
        app = create_app(index, Model())
        with TestClient(app, raise_server_exceptions=False) as client:
            for path in ("health", "about", "search?text=red", "image?id=image 1", "thumbnail?id=image 1"):
                answer = client.get(f"/api/{path}")
                assert answer.status_code in (200, 404, 409, 422, 503), (path, answer.text[:300])
                assert SECRET[:20] not in answer.content


@target
def hostile_folders(folder: Path) -> Attack:
    """Catalogs, names, links and pipes, opened for reading and writing, and served."""
    from resealed import VECTORS, make, name_in_journal, reseal

    sound, place = make(folder / "sound"), folder / "index"
    with closing(sqlite3.connect(sound / "index.db")) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        columns = {
            table: [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            for table in tables
            if not table.startswith(("sqlite_", "words"))
        }
    values = [*NUMBERS[:7], *TEXTS, None, b"\x00" * 9, "[]", "{}", 2**62]

    def is_plain(path: Path) -> bool:
        """Whether it can be read: a pipe, from an earlier change, would be waited for."""
        return path.is_file() and not path.is_symlink()

    def change(draw: Random) -> bool:
        """One change; whether another can follow, which would undo a journal with all that this does."""
        kind = draw.random()
        if kind < 0.35:
            name = draw.choice(NAMES).format(fence=folder)
            size = len(SECRET)
            if draw.random() < 0.5:
                statement = "INSERT INTO segments VALUES (99, 'image', ?, ?)"
                reseal(place, statement, draw.choice((0, 3, 10**6)), name)
            else:
                reseal(place, "INSERT INTO graphs VALUES ('text', ?, 8, ?, 0, '{}')", name, size)
        elif kind < 0.6:
            entry = draw.choice(sorted(place.iterdir()))
            entry.unlink()
            made = draw.random()
            if made < 0.4:
                entry.symlink_to(folder / "thesis.tex")
            elif made < 0.6:
                entry.symlink_to(folder)
            elif made < 0.8:
                os.mkfifo(entry)
            elif made < 0.9:
                entry.mkdir()
            else:
                os.link(folder / "script.sh", entry)  # a plain file, that somebody else names too
        elif kind < 0.65:  # an approximate index, with the checksum of what it says now
            graph = next(place.glob("graph-*"))
            if not is_plain(graph):
                return True
            data = mutated(graph.read_bytes(), draw)
            if draw.random() < 0.5:
                head = mutated(repr(value(draw)).encode("utf-8", "replace"), draw)[:60_000]
                data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data[:100]
            graph.write_bytes(data)
            reseal(place, "UPDATE graphs SET size = ?, checksum = ?", len(data), zlib.crc32(data))
        elif kind < 0.7:
            root = draw.choice(("/", str(folder), "..", "\x00", "~"))
            reseal(place, "UPDATE collections SET root = ?", root)
            with suppress(sqlite3.Error):
                reseal(place, "UPDATE items SET path = ?", draw.choice(("thesis.tex", "../thesis.tex")))
        elif kind < 0.73:  # a journal of another's, which may name a file that SQLite removes
            database = place / "index.db"
            if not is_plain(database):
                return False
            name_in_journal(database, draw.choice((folder / "thesis.tex", folder / "script.sh", database)))
            journal = place / "index.db-journal"
            data = journal.read_bytes()
            journal.write_bytes(draw.choice((data, data[:512], mutated(data, draw))))
            if draw.random() < 0.3:
                os.link(database, folder / "own.db")
            return False
        else:
            table = draw.choice(sorted(columns))
            chosen = draw.choice(values)
            with suppress(sqlite3.Error, UnicodeError, OverflowError):
                reseal(place, f"UPDATE {table} SET {draw.choice(columns[table])} = ?", chosen)
        return True

    def once(draw: Random) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sound, place)
        (folder / "script.sh").write_bytes(SCRIPT)
        (folder / "own.db").unlink(missing_ok=True)
        try:
            for _ in range(draw.choice((1, 1, 2))):
                if not change(draw):
                    break
        except (sqlite3.Error, OSError, TypeError, ValueError, AttributeError):
            return  # two changes that cannot be made together
        with fence(folder):
            use(place, VECTORS)
            _serve(place)
        assert (folder / "script.sh").read_bytes() == SCRIPT

    return once


@target
def full_texts(folder: Path) -> Attack:
    """The tables in which SQLite keeps the words of an index: they have no checksums of ours."""
    from resealed import VECTORS, make

    sound, place = make(folder / "sound"), folder / "index"
    with closing(sqlite3.connect(sound / "index.db")) as db:
        names = db.execute(
            "SELECT name FROM sqlite_schema WHERE name LIKE '%words\\__%' ESCAPE '\\'"
        ).fetchall()
        rows = {
            name: db.execute(f"SELECT rowid, block FROM {name}").fetchall()
            for (name,) in names
            if "data" in name
        }
        rows |= {
            name: db.execute(f"SELECT id, sz FROM {name}").fetchall()
            for (name,) in names
            if "docsize" in name
        }

    def once(draw: Random) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sound, place)
        table = draw.choice(sorted(rows))
        number, block = draw.choice(rows[table])
        column = "block" if "data" in table else "sz"
        with closing(sqlite3.connect(place / "index.db")) as db:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", (mutated(block, draw), number))
            db.commit()
        use(place, VECTORS)

    return once


@target
def runtimes(folder: Path) -> Attack:
    """ONNX files and facts of the light runtime, on a machine of 0.7 GB, of which half is theirs."""
    import test_runtime_faults as bombs
    from test_runtime import picture_model, written

    from diptych.runtime import session
    from diptych.runtime.folder import REFUSED, worst_cosine
    from diptych.runtime.model import RuntimeModel

    session.SECONDS = 0.2
    system = os.sysconf
    CLOSING.enter_context(
        mock.patch.object(os, "sysconf", lambda name: 180_000 if name == "SC_PHYS_PAGES" else system(name))
    )
    made: tuple[Callable[[Random], Any], ...] = (
        lambda draw: bombs.endless(),
        lambda draw: bombs.functions(),
        lambda draw: bombs.outside(draw.choice((*NAMES, "text.onnx", "/dev/zero", "runtime.json"))),
        lambda draw: bombs.doubled(*(draw.choice((1, 9, 2_000, 2**31)) for _ in range(2))),
        lambda draw: bombs.multiplied(draw.choice((1, 50, 2_000))),
        lambda draw: bombs.texts_of(draw.choice((1, 10**4, 2**40))),
    )
    home = folder / "model"
    written(picture_model(), home)
    expected = RuntimeModel.open(home, threads=1).encode_text(["a red dog"])
    files = [(path, path.read_bytes()) for path in sorted(home.rglob("*")) if path.is_file()]
    facts = (home / "runtime" / "runtime.json").read_bytes()
    files = [one for one in files if "runtime" in str(one[0]) or one[0].name.startswith("probes")]

    def once(draw: Random) -> None:
        file, whole = draw.choice(files)
        data = mutated(whole, draw)
        if file.suffix == ".json" and draw.random() < 0.8:
            data = as_json(mutated_json(json.loads(whole), draw), draw)
        if file.suffix == ".onnx" and draw.random() < 0.3:
            data = draw.choice(made)(draw).SerializeToString()
            data = mutated(data, draw) if draw.random() < 0.3 else data
        elif draw.random() < 0.5:  # of the same size, so that it is opened
            data = data[: len(whole)].ljust(len(whole), b"\x00")
        file.write_bytes(data)
        if file.suffix == ".onnx":  # as whoever made the folder would
            bombs.settle(home)
        try:
            model = RuntimeModel.open(home, threads=1)
            found = model.encode_text(["a red dog"])
            # what the probes of a model let pass is not called damage anywhere
            assert worst_cosine(found, expected) >= REFUSED, f"{file.name} gives other vectors"
        finally:
            file.write_bytes(whole)
            (home / "runtime" / "runtime.json").write_bytes(facts)

    return once


@target
def tokenizers(folder: Path) -> Attack:
    """What a ``tokenizer.json`` may ask for, and what it does to texts of all kinds."""
    import test_runtime_faults as bombs
    from tokenizers import Tokenizer

    from diptych.runtime.folder import FOLDER
    from diptych.runtime.texts import text_reader

    home = folder / FOLDER
    home.mkdir()
    pieces = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##a": 2, "b": 3}, "unk_token": "[UNK]",
              "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}  # fmt: skip
    split = {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": r"\s+|\p{P}"}}
    sound = json.loads(Tokenizer.from_str(json.dumps({"version": "1.0", "model": pieces})).to_str()) | {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "Whitespace"}]},
    }
    patterns = (
        "(a+)+$",
        "(a|aa)+$",
        "",
        "a*a*a*a*b",
        "(?<x>a\\g<x>*)+$",
        "(a{1000}){1000}",
        "\\p{L}",
        "[",
        "(?=a)",
    )
    further = [
        bombs.GROWS, bombs.PANICS, bombs.CALLED, bombs.NO_UNKNOWN, [bombs.GROWS] * 9, {"type": "ByteLevel"},
        {"type": "FixedLength", "length": 0}, {"type": "Prepend", "prepend": "x" * 9_000}, {"type": "NFKD"},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}, {"type": "Unigram", "vocab": [["a", 0.0]]},
        *({"type": "Replace", "pattern": {"Regex": one}, "content": "aa"} for one in patterns),
        *({**split, "pattern": {"Regex": one}} for one in patterns),
    ]  # fmt: skip

    def once(draw: Random) -> None:
        state = mutated_json(sound, draw, further)
        for key in ("normalizer", "pre_tokenizer", "post_processor", "model"):
            if isinstance(state, dict) and draw.random() < 0.2:
                state[key] = draw.choice(further)
        (home / "tokenizer.json").write_bytes(as_json(state, draw))
        told = {"kind": "pieces", "max_length": 16}
        told |= (
            {draw.choice(("length", "pad", "max_length")): draw.choice(NUMBERS)}
            if draw.random() < 0.1
            else {}
        )
        texts = ["a" * 40 + "b", "a red dog", draw.choice(TEXTS).encode("utf-8", "replace").decode()]
        text_reader(home, told).read(texts).collate([0, 1])

    return once


@target
def beside_writers(folder: Path) -> Attack:
    """Searches while a writer whose clock goes back is at work: each sees the items before its change, or after it."""
    from diptych.index.engines.embedded.index import EmbeddedIndex
    from diptych.index.protocol import Item

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    writer = CLOSING.enter_context(EmbeddedIndex.create(folder / "index", 16))
    reader = CLOSING.enter_context(EmbeddedIndex.open(folder / "index"))
    pool = CLOSING.enter_context(ThreadPoolExecutor(1))
    held = {"i0": 0}  # which stays: a column without values is unknown
    writer.add([Item("i0", metadata={"price": 0})], rows[:1])

    def once(draw: Random) -> None:
        moment = time.time() - draw.choice((0.0, 3600.0, 10.0**8))
        some = draw.sample(range(64), draw.randrange(1, 9))
        kind, before = draw.random(), dict(held)
        if kind < 0.6:
            ids = {f"i{n % 40}": n for n in some}
            held.update(ids)
            items = [Item(id, metadata={"price": n}) for id, n in ids.items()]
            work: Callable[[], object] = lambda: writer.update(items, rows[list(ids.values())])  # noqa: E731
        elif kind < 0.9:
            gone = draw.sample(sorted(held), min(len(held), 3))
            gone = [id for id in gone if id != "i0"]
            for id in gone:
                del held[id]
            work = lambda: writer.delete(gone)  # noqa: E731
        else:
            work = writer.compact
        query = rows[draw.randrange(64)]
        limit = draw.choice((None, "price < 30"))

        def agree(items: dict[str, int]) -> bool:
            scores = {id: float(rows[n] @ query) for id, n in items.items() if limit is None or n < 30}
            wanted = sorted(scores.values(), reverse=True)[:5]
            own = [scores.get(hit.item.id, 9.0) for hit in hits]
            return len(hits) == len(wanted) and all(
                abs(hit.score - score) < 1e-5 and abs(hit.score - best) < 1e-5
                for hit, score, best in zip(hits, own, wanted, strict=True)
            )

        with mock.patch("time.time", return_value=moment):
            change = pool.submit(work)
            while True:
                over = change.done()
                hits = reader.search(query, 5, kind="image", filter=limit, exact=True)
                assert agree(held) or (not over and agree(before)), (over, hits, held, before)
                if over:
                    break
            change.result()

    return once


@target
def outputs(folder: Path) -> Attack:
    """Names of every kind of character, in what commands print and refuse."""
    from resealed import VECTORS, make

    from diptych.index.engines.embedded.index import EmbeddedIndex
    from diptych.index.protocol import Item
    from diptych.progress import printable

    make(folder / "index")
    pieces = (
        "\x1b[2J",
        "\x9b31m",
        "\x07",
        "\u202e",
        "\u2028",
        "\n",
        "\r",
        "a",
        "é",
        "日",
        "\x7f",
        "]0;x",
        "\x08",
    )

    def once(draw: Random) -> None:
        name = "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 12)))
        with EmbeddedIndex.open(folder / "index", writable=True) as index:
            index.add([Item(f"id {name}", text=name, metadata={"c": name})], VECTORS[:1])
        command = draw.choice(
            (
                ("index", "info", folder / "index"),
                ("index", "remove", folder / "index", f"id {name}"),
                ("index", "info", f"none{name}"),
                ("search", folder / "index", "--like", f"id {name}"),
                ("search", folder / "index", "--like", f"id {name}", "--paths"),
                ("search", folder / "index", "--like", f"none {name}"),
                ("search", folder / "index", "--like", "image 1", "--filter", f"c = '{name}'"),
                ("data", "check", f"none{name}"),
            )
        )
        from click.testing import CliRunner

        from diptych.cli import main

        result = CliRunner().invoke(main, [str(one) for one in command])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        said = result.stdout + result.stderr
        assert printable(said, keep="\n\t") == said, said

    return once
