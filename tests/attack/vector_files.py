"""Attacks on Parquet tables of image paths, and on folders of vectors."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
from hostile import as_json, mutated, mutated_json
from PIL import Image
from register import Attack, target


@target
def parquet_tables(folder: Path) -> Attack:
    import pyarrow
    import pyarrow.parquet

    from diptych.data.formats import open_captions

    Image.new("RGB", (8, 8)).save(folder / "a.png")
    rows = {"image": ["a.png"] * 40, "text": [f"text {n}" for n in range(40)], "price": list(range(40))}
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(rows), file, row_group_size=16, compression="zstd")
    whole = file.read_bytes()

    def once(draw: Random) -> None:
        file.write_bytes(mutated(whole, draw))
        open_captions(folder)

    return once


@target
def vector_folders(folder: Path) -> Attack:
    from diptych.evaluation.shards import evaluate_vectors
    from diptych.index.protocol import Item
    from diptych.vectors.files import open_vectors, shard_writer
    from diptych.vectors.manifest import (
        Manifest,
        Receipt,
        complete_manifest,
        join_manifest,
        shard_file,
        write_receipt,
    )

    manifest = join_manifest(folder, Manifest("model", "f" * 16, 4, "data", "", ("a", "b")))
    for name in manifest.shards:
        with shard_writer(shard_file(folder, name), 4) as writer:
            vectors = np.eye(4, dtype=np.float32)
            writer.write(
                [Item(id=f"{name}{n}", metadata={"split": "test", "n": n}) for n in range(4)], vectors
            )
            texts = [
                Item(id=f"{name}{n}#text0", kind="text", image_id=f"{name}{n}", text="a text")
                for n in range(4)
            ]
            writer.write(texts, vectors)
        write_receipt(folder, Receipt(name, 4, 4, writer.bytes, writer.sha256))
    complete_manifest(folder, manifest)
    files = [(file, file.read_bytes()) for file in sorted(folder.rglob("*")) if file.is_file()]

    def once(draw: Random) -> None:
        file, whole = draw.choice(files)
        data = mutated(whole, draw)
        if file.suffix == ".json" and draw.random() < 0.7:
            data = as_json(mutated_json(json.loads(whole), draw), draw)
        if file.suffix == ".parquet":  # of the size that the receipt says, or nothing would read it
            data = (data + bytes(len(whole)))[: len(whole)]
        file.write_bytes(data)
        try:
            opened = open_vectors(folder)
            for shard in opened.shards:
                for items, vectors in shard.batches():
                    assert len(items) == len(vectors)
            evaluate_vectors(folder, bootstrap=0, device="cpu")
        finally:
            file.write_bytes(whole)

    return once
