"""Engines against each other: the same changes and questions, and one that answers otherwise is a finding."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from engine_contract import DIM, FILTERS, LARGE_NUMBERS, WORDS
from hostile import TEXTS
from register import CLOSING, Attack, target

from diptych.errors import DiptychError
from diptych.index.base import Index
from diptych.index.protocol import Hits, Item
from diptych.index.query.filters import Filter, parse_filter

SERVER = "DIPTYCH_ATTACK_POSTGRES"  # the address of a server that several processes share
NAMES = [f"item{n}" for n in range(60)]


def rivals(folder: Path) -> list[Index]:
    """An embedded index, one in a file, and one in PostgreSQL where there is a server."""
    from diptych.index.engines.embedded.index import EmbeddedIndex
    from diptych.index.engines.postgres.index import PostgresIndex

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
    from one_file_engine import OneFileIndex

    made: list[Index] = [EmbeddedIndex.create(folder / "index", DIM)]
    made.append(OneFileIndex.create(f"onefile://{folder}/index.db", DIM))
    address = os.environ.get(SERVER)
    if address is None:
        from servers import postgres

        try:
            address = CLOSING.enter_context(postgres()).url
        except pytest.skip.Exception:
            address = ""
    if address:
        made.append(PostgresIndex.create(f"{address}&index=attack{os.getpid()}", DIM))
    for index in made:
        CLOSING.enter_context(index)
    return made


def item(id: str, draw: Random) -> Item:
    """An item with values of every kind, some of which cannot be stored."""
    columns: dict[str, Any] = {"price": draw.randrange(100), "color": draw.choice(WORDS)}
    for name, some in (
        ("n", (*LARGE_NUMBERS, None, 5, "5", True)),
        ("tags", ([], ["red", 1], [True, None], [1.5, "ß"])),
        ("note", ("ÀB%c_D", "\\x İstanbul", "", "日本語 ", "'", "true")),
        ("sale", (True, False, None)),
        ("odd", (float("nan"), {"a": 1}, [[1]], "\ud800", "x" * 3000)),
    ):
        if draw.random() < (0.02 if name == "odd" else 0.4):
            columns[name] = draw.choice(some)
    if draw.random() < 0.02:
        columns[draw.choice([name for name in TEXTS if "\x00" not in name])] = 1  # PostgreSQL has no NUL
    kind = "text" if draw.random() < 0.3 else "image"
    words = " ".join(draw.choice(WORDS) for _ in range(draw.randrange(6)))
    return Item(id, kind, f"a/{id}.jpg", words, draw.choice(("", *NAMES)) if kind == "text" else "", columns)  # type: ignore[arg-type]


def limit(draw: Random) -> Filter | None:
    """A filter, or none; as a tree, for engines differ in how long they remember the kinds of a column's values."""
    if draw.random() < 0.3:
        return None
    parts = [draw.choice((*FILTERS, "n >= 1e23", "n = 5", "n = '5'", "n = true", "tags contains null"))]
    while draw.random() < 0.3:
        parts.append(draw.choice(FILTERS))
    joined = parts[0]
    for part in parts[1:]:
        joined = f"({joined}) {draw.choice(('and', 'or', 'and not'))} ({part})"
    return parse_filter(joined)


def change(draw: Random, rows: np.ndarray) -> Callable[[Index], object]:
    """Some change of an index."""
    ids = draw.sample(NAMES, draw.randrange(1, 12))
    kind = draw.random()
    if kind < 0.7:
        items = [item(id, draw) for id in ids]
        some = rows[[draw.randrange(len(rows)) for _ in ids]]
        return lambda index: index.update(items, some) if kind < 0.5 else index.add(items, some)
    if kind < 0.95:
        return lambda index: index.delete(ids)
    return lambda index: index.compact() * 0  # its bytes differ


def question(draw: Random, rows: np.ndarray) -> Callable[[Index], object]:
    """Something to ask of an index."""
    query, k = rows[draw.randrange(len(rows))], draw.choice((1, 3, 100))
    kind, passing = draw.choice(("image", "text", None)), limit(draw)
    words = " ".join(draw.choice((*WORDS, "x", '"')) for _ in range(draw.randrange(1, 4)))
    column = draw.choice(("color", "n", "sale", "note", "absent"))
    asked: tuple[Callable[[Index], object], ...] = (
        lambda index: index.search(query, k, kind=kind, filter=passing),  # type: ignore[arg-type]
        lambda index: index.search_words(words, k, kind=kind, filter=passing),  # type: ignore[arg-type]
        lambda index: (len(index), index.count(kind, passing), index.info.counts),  # type: ignore[arg-type]
        lambda index: index.get(NAMES),
        lambda index: index.sample_items(kind or "image", passing, k),  # type: ignore[arg-type]
        lambda index: index.values(column),
        lambda index: [(pair.first.id, pair.second.id) for pair in index.near_duplicates(threshold=0.99)],
    )
    return draw.choice(asked)


def answer(index: Index, ask: Callable[[Index], object]) -> object:
    """What an index says, in a form that can be compared."""
    try:
        found = ask(index)
    except DiptychError as error:
        return "refused" if str(error).strip() else "without a sentence"
    if isinstance(found, Hits):
        return [(hit.item, round(hit.score, 9)) for hit in found]
    return found


@target
def engines(folder: Path) -> Attack:
    made = rivals(folder)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(12, DIM)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)

    def once(draw: Random) -> None:
        for ask in (change(draw, rows), question(draw, rows), question(draw, rows)):
            said = [answer(index, ask) for index in made]
            for index, other in zip(made[1:], said[1:], strict=True):
                assert other == said[0], (index.engine, other, said[0])
        if draw.random() < 0.02:
            for index in made:
                assert index.verify() == []

    return once
