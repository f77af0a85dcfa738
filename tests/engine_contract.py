"""What every engine must answer like the embedded one: a small collection with every kind of value, and filters."""

from __future__ import annotations

from typing import Any

import numpy as np

from diptych.index.protocol import Item

DIM = 24
WORDS = [
    "red", "green", "blue", "shoe", "shoes", "sneaker", "running", "runner", "café", "dog", "dogs", "foo_bar",
    "日本語", "straße",
]  # fmt: skip


def collection(count: int = 300, seed: int = 0) -> tuple[list[Item], np.ndarray]:
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
