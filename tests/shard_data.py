"""Tars of small pictures with texts, and what a folder of vectors holds, for the tests of embedding."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from colour_model import ColourModel
from small import WORDS
from written import add_member, encoded

from diptych.index.engines.opening import open_index
from diptych.vectors.embed import embed
from diptych.vectors.files import open_vectors
from diptych.vectors.load import open_sources

BROKEN = 3  # the picture of this number, in its tar, is not a picture


def write_tars(folder: Path, tars: int = 4, images: int = 6, broken: int | None = BROKEN) -> Path:
    """Tars that count their keys from 0; two texts a picture, and some labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(tars):
        with tarfile.open(folder / f"part-{shard:03d}.tar", "w") as tar:
            for number in range(images):
                rng = np.random.default_rng([shard, number])
                data = encoded(1000 * shard + number)
                add_member(tar, f"{number:04d}.png", data[:40] if (shard, number) == (1, broken) else data)
                captions = [" ".join(rng.choice(WORDS, size=4)) for _ in range(2)]
                values = {"captions": captions, "price": number, "color": str(rng.choice(["red", "blue"]))}
                add_member(tar, f"{number:04d}.json", json.dumps(values).encode())
    return folder


def checksums(folder: Path) -> dict[str, str]:
    """Every file below a folder, with the hash of its bytes."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def contents(folder: Path) -> tuple[list[str], np.ndarray]:
    """The ids and vectors of a folder of vectors, images and texts of each shard, in the order of the shards."""
    ids: list[str] = []
    rows = []
    for shard in open_vectors(folder).shards:
        for items, vectors in shard.batches():
            ids += [item.id for item in items]
            rows.append(vectors)
    return ids, np.concatenate(rows)


def embedded_tars(folder: Path) -> Path:
    """Several tars, embedded; the folder of their vectors."""
    embed(ColourModel(), open_sources(write_tars(folder / "tars")), folder / "out", model_name="colours")
    return folder / "out"


def held(place: object) -> list[tuple[Any, ...]]:
    """Everything that an index holds: items in the order of their ids, with vectors and thumbnails."""
    with open_index(place) as index:  # type: ignore[arg-type]
        assert index.verify() == []
        ids = sorted(id for one in index.info.collections for id, _ in index.contents(one.number))
        assert len(ids) == len(index)
        return list(zip(index.get(ids), index.vectors(ids).tolist(), map(index.thumbnail, ids), strict=True))
