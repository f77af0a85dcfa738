"""Indexes that somebody changed who knows how checksums are computed."""

from __future__ import annotations

import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import numpy as np

from diptych.index.engines.embedded import checksums
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item, Precision

D = 16
VECTORS = np.random.default_rng(0).normal(size=(40, D)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


def make(path: Path, precision: Precision = "float32") -> Path:
    """An index of images and texts, with a removed row and an approximate index."""
    with EmbeddedIndex.create(path, D, precision=precision) as index:
        index.add([Item(f"image {n}", text=f"number {n}") for n in range(32)], VECTORS[:32])
        index.add([Item(f"text {n}", "text", text=f"text {n}") for n in range(8)], VECTORS[32:])
        index.delete(["image 3"])
        index.build_graph("image", codes=True)
    return path


def reseal(folder: Path, statement: str, *values: object) -> None:
    """Change a catalog and give it the checksums of what it says now."""
    with closing(sqlite3.connect(folder / "index.db", isolation_level=None)) as db:
        db.execute("BEGIN")
        db.execute(statement, values)
        checksums.seal(db)
        db.execute("COMMIT")


def name_in_journal(database: Path, file: Path) -> None:
    """Put a journal beside a database that asks SQLite to remove a file when the journal is undone."""
    size = database.stat().st_size
    page = int.from_bytes(database.read_bytes()[16:18], "big")
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(file)
    head = magic + struct.pack(">5I", 0, 1, size // page, 512, page)
    tail = struct.pack(">I", (1 << 30) // page + 1) + name + struct.pack(">2I", len(name), sum(name)) + magic
    database.with_name(f"{database.name}-journal").write_bytes(head.ljust(512, b"\0") + tail)
