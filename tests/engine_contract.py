"""The contract of an index engine: it answers like the embedded one, on a small collection with every kind of value.

A test of an engine fills an index of its own (``remote``) and an embedded one (``local``) with the same items, and
gives both to the checks below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diptych.errors import IndexFault
from diptych.index.base import Index
from diptych.index.protocol import Item
from diptych.index.query.filters import ITEM_COLUMNS, matches, parse_filter

DIM = 24
WORDS = [
    "red", "green", "blue", "shoe", "shoes", "sneaker", "running", "runner", "café", "dog", "dogs", "foo_bar",
    "日本語", "straße",
]  # fmt: skip


def collection(count: int = 300, seed: int = 0) -> tuple[list[Item], np.ndarray]:
    """Items with every kind of value, and their unit vectors; twenty of them are equal."""
    rng = np.random.default_rng(seed)
    items, vectors = [], rng.normal(size=(count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for n in range(count):
        metadata: dict[str, Any] = {"price": int(rng.integers(100)), "color": WORDS[rng.integers(3)]}
        if n % 3 == 0:
            metadata |= {"tags": [WORDS[rng.integers(8)], int(rng.integers(3))], "sale": bool(n % 2)}
        if n % 5 == 0:
            metadata |= {
                "rating": float(rng.integers(10)) / 2,
                "note": "ÀB%c_D" if n % 2 else "\\x İstanbul ΑΣ",
            }
        if n % 7 == 0:
            metadata["price"] = None
        text = " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=rng.integers(0, 9)))
        kind = "text" if n % 4 == 3 else "image"
        image_id = f"item{n - 1}" if kind == "text" else ""
        path = f"a/{n}.jpg" if kind == "image" else ""
        items.append(Item(f"item{n}", kind, path, text, image_id, metadata, f"v{n}", 0))
    vectors[120:140] = vectors[min(10, count - 1)]  # ties, where there are so many
    return items, vectors


def same(remote: Any, local: Any) -> None:
    """The same hits: ids, scores and items."""
    assert remote.ids == local.ids
    assert remote.scores == local.scores  # both in float64 from the same stored numbers
    assert [hit.item for hit in remote] == [hit.item for hit in local]


FILTERS = [
    "price < 50",
    "price >= 50 and color = 'red'",
    "price = 7 or price = 7.0",
    "not (price < 50)",
    "price != 10",
    "price is null",
    "price is not null and rating > 1.5",
    "color in ('red', 'blue')",
    "color not in ('red')",
    "color < 'green'",
    "color >= 'green'",
    "color > 'RED'",
    "tags contains 'red'",
    "tags contains 1",
    "tags not contains 'shoe'",
    "tags is null",
    "sale = true",
    "sale != true",
    "note contains 'àb'",
    "note contains 'ας'",
    "note contains 'i̇s'",
    "note like '%\\\\%'",
    "note like '_b%c_d'",
    "note like '%'",
    "note contains '%'",
    "text contains 'SHOE'",
    "text like '%straße%'",
    "text is null",
    "path like 'a/1_.jpg'",
    "path is null",
    "image_id = 'item2'",
    "id in ('item1', 'item2', 'nothing')",
    "id > 'item30' and id <= 'item33'",
    "price < 1e999",
    "price > -1e999 and price < -1e999",
    "price = 1e999",
    "color = 'a\x00b' or color = 'red'",
    "color = \"x' OR '1'='1\"",
]

LARGE_NUMBERS = [2**60, 2.0**60, 2**60 + 1, 1e23, 10**23, 10**40, 1e40, [1e40], [10**40], -0.0, 0.1, 1e300]
FILTERS_OF_LARGE_NUMBERS = [
    "n = 1152921504606846976", "n = 1.152921504606847e18", "n < 1152921504606846977", "n >= 1e23",
    "n in (99999999999999991611392, 0)", "n contains 1e40", "n contains 10000000000000000303786028427003666890752",
]  # fmt: skip
"""What is 1.152921504606847e18 to Python is 2⁶⁰, a little less than these digits."""


def fill(*indexes: Index) -> None:
    """Items that were added twice, removed and updated."""
    items, vectors = collection()
    for index in indexes:
        index.add(items[:200], vectors[:200])
        index.add(items[200:], vectors[200:])
        index.delete(["item8", "item17", "absent"])
        index.update([items[100], items[33]], vectors[[100, 33]])


def check_exact_search(remote: Index, local: Index) -> None:
    """Of filled indexes."""
    queries = collection(20, seed=5)[1]
    for kind in ("image", "text"):
        for k in (1, 7, 400):
            pairs = (index.search_many(queries, k, kind=kind) for index in (remote, local))
            for a, b in zip(*pairs, strict=True):
                same(a, b)
                assert a.exact
    assert remote.search(queries[0], 25).ids == local.search(queries[0], 25).ids
    assert len(remote) == len(local)
    assert remote.info.counts == local.info.counts
    assert remote.info.columns == local.info.columns


def check_images_first(remote: Index, local: Index) -> None:
    """Of empty indexes: equal scores of both kinds put images first."""
    items = [Item(f"{kind}{n}", kind, text="red") for n in range(30) for kind in ("text", "image")]  # type: ignore[arg-type]
    vectors = np.tile(np.eye(1, DIM, dtype=np.float32), (len(items), 1))
    for index in (remote, local):
        index.add(items[:1], vectors[:1])  # the texts have the first segment
        index.add(items[1:], vectors[1:])
    for k in (1, 7, 35, 100):
        same(remote.search(vectors[0], k), local.search(vectors[0], k))
    assert local.search(vectors[0], 31).ids == [*(f"image{n}" for n in range(30)), "text0"]


WIDE = 64  # dimensions of ``check_many_ties``


def check_many_ties(remote: Index, local: Index) -> None:
    """Of empty indexes of ``WIDE`` dimensions: more ties than any margin of candidates are decided alike."""
    rng = np.random.default_rng(0)
    row = rng.normal(size=WIDE) / 8
    permuted = np.stack([rng.permutation(row) for _ in range(600)])  # equal sums, but not in float32
    bags = np.stack([rng.permutation(np.repeat([7**-0.5, 0], [7, WIDE - 7])) for _ in range(600)])
    items = [Item(f"{kind}{n}", kind) for kind in ("image", "text") for n in range(600)]  # type: ignore[arg-type]
    queries = np.stack([np.full(WIDE, 1 / 8), np.repeat([40**-0.5, 0], [40, WIDE - 40])])
    for index in (remote, local):
        index.add(items, np.concatenate([permuted, bags]))
    for k in (1, 10, 50, 200, 1000):
        for kind in ("image", "text"):
            pairs = (index.search_many(queries, k, kind=kind) for index in (remote, local))
            for a, b in zip(*pairs, strict=True):
                same(a, b)


def check_order_of_addition(remote: Index) -> None:
    """Of a filled index: equal scores keep the order of addition."""
    _, vectors = collection()
    hits = remote.search(vectors[10], 12, kind="image").ids
    tied = [f"item{n}" for n in [10, *range(120, 140)] if n % 4 != 3]
    assert hits == tied[:12]


def check_filter(remote: Index, local: Index, text: str) -> None:
    """Of filled indexes: a filter means the same, whatever k is."""
    query = collection(1, seed=9)[1][0]
    for kind in ("image", "text"):
        for k in (3, 400):
            same(
                remote.search(query, k, kind=kind, filter=text),
                local.search(query, k, kind=kind, filter=text),
            )
        passing = len(local.search(query, 400, kind=kind, filter=text))
        assert remote.count(kind, text) == local.count(kind, text) == passing


def check_filters_by_definition(remote: Index) -> None:
    """Of a filled index: what passes is what ``matches`` says of each item."""
    present = [i for i in collection()[0] if not {i.id, i.image_id} & {"item8", "item17"}]
    for text in FILTERS:
        tree = parse_filter(text)
        expected = {
            i.id
            for i in present
            if matches(tree, i.metadata | {name: getattr(i, name) or None for name in ITEM_COLUMNS})
        }
        assert set(remote.search(np.ones(DIM), 1000, filter=tree).ids) == expected, text


def check_large_numbers(index: Index, items: list[Item], text: str) -> None:
    """Of an index of ``items`` with a column ``n`` and vectors of ones: numbers of any size compare by their value."""
    expected = [one.id for one in items if matches(parse_filter(text), one.metadata)]
    assert expected
    assert index.search(np.ones(DIM), 40, filter=text).ids == expected


def check_reading(remote: Index, local: Index) -> None:
    """Of filled indexes: samples, common values, near-duplicates, items and vectors."""
    for kind in ("image", "text"):
        for filter, size in ((None, 50), ("price < 50", 500), ("price < 0", 5), ("note contains 'b'", 9)):
            items = remote.sample_items(kind, filter, size)
            assert items == local.sample_items(kind, filter, size)
            sample = remote.sample(kind, filter, size)
            np.testing.assert_array_equal(sample, local.sample(kind, filter, size))
            np.testing.assert_array_equal(sample, remote.vectors([item.id for item in items]))
        assert sorted(remote.contents(0, kind)) == sorted(local.contents(0, kind))
    for column in ("color", "sale", "note", "price", "absent"):
        assert remote.values(column) == local.values(column)
    a, b = remote.near_duplicates(threshold=0.999), local.near_duplicates(threshold=0.999)
    assert [(p.first.id, p.second.id) for p in a] == [(p.first.id, p.second.id) for p in b]
    assert len(a) == 100
    assert remote.get(["item3", "absent"]) == local.get(["item3", "absent"])
    np.testing.assert_array_equal(remote.vectors(["item5", "item3"]), local.vectors(["item5", "item3"]))
    assert remote.verify() == []


def check_updates(engine: Any, url: str) -> None:
    """Of an engine, at an address without an index: updates may be repeated, and are there when it is opened again."""
    items, vectors = collection(40)
    with engine.create(url, DIM) as index:
        for _ in range(3):
            index.update(items, vectors)
        assert len(index) == 40
        assert index.verify() == []
        before = index.search(vectors[0], 40).ids
        with pytest.raises(IndexFault, match="item2"):
            index.add([Item("new"), items[2]], vectors[:2])
        assert len(index) == 40
    with engine.open(url) as again:
        assert again.search(vectors[0], 40).ids == before
        assert again.generation == 3
        with pytest.raises(IndexFault):
            again.delete(["item1"])


def check_models(engine: Any, url: str) -> None:
    """Of an engine, at an address without an index: an index refuses another model, and a second index."""
    engine.create(url, DIM, model="emoji", fingerprint="aaaa").close()
    engine.open(url, fingerprint="aaaa").close()
    with pytest.raises(IndexFault, match=r"emoji.*mine"):
        engine.open(url, fingerprint="bbbb", model="mine")
    with pytest.raises(IndexFault):
        engine.create(url, DIM)
