"""Attacks on what other programs wrote: published checkpoints, and vectors with their tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import torch
from hostile import mutated
from register import Attack, target


@target
def published_checkpoints(folder: Path) -> Attack:
    from diptych.runs.published import import_vse_infinity

    words = folder / "vocabulary.json"
    words.write_text(
        json.dumps({"word2idx": {w: n for n, w in enumerate(("<pad>", "<start>", "<end>", "<unk>", "a"))}})
    )
    file = folder / "model.pth"
    states = [{"fc.weight": torch.ones(4, 6), "fc.bias": torch.ones(4)}, {"embed.weight": torch.ones(5, 3)}]
    torch.save({"model": states, "opt": argparse.Namespace(embed_size=4)}, file)
    whole = file.read_bytes()

    def once(draw: Random) -> None:
        file.write_bytes(mutated(whole, draw))
        import_vse_infinity(file, vocabulary=words)

    return once


@target
def foreign_vectors(folder: Path) -> Attack:
    from diptych.runs.embeddings import check_vectors, find_shards

    vectors, rows = folder / "vectors.npy", folder / "rows.jsonl"
    np.save(vectors, np.eye(6, 4, dtype=np.float32) + 1)
    rows.write_text("\n".join(json.dumps({"path": f"{n}.png", "caption": "a"}) for n in range(6)))
    whole = SimpleNamespace(vectors=vectors.read_bytes(), rows=rows.read_bytes())

    def once(draw: Random) -> None:
        vectors.write_bytes(mutated(whole.vectors, draw) if draw.random() < 0.7 else whole.vectors)
        rows.write_bytes(mutated(whole.rows, draw) if draw.random() < 0.5 else whole.rows)
        (shard,) = find_shards(vectors, rows)
        found, _ = shard.load()
        check_vectors(found, 4, vectors)

    return once
