"""What a learned hash head adds: MAP of codes that were not learned, and how often a code lies nearest its own centre.

Run: ``python benchmarks/hash_baselines.py`` for random codes and for the signs of random projections of the backbone's
mean cells on the emoji set's categories, at 16, 32 and 64 bits; with the folders of ``cookie-hash`` runs behind it,
also the share of test images whose code lies nearest the centre of their own class.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from sys import path

import numpy as np
from numpy.typing import NDArray

path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.branches.branch import HashHead
from diptych.cache.features import cache_image_features
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.images import PixelInput
from diptych.data.labels import class_names, class_rows, class_sets
from diptych.evaluation.hashing import VIEW, hashing_map
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.training.prepare import prepare

COLUMN, BITS, SEEDS, PIXELS = "category", (16, 32, 64), 3, 96


def compare_codes(captions: Captions) -> None:
    """Random codes and signs of random projections: queries of the test split against all other images."""
    backbone = named.backbone("lite0", PIXELS)
    store = cache_image_features(
        backbone, PixelInput(**backbone.pixel_format), captions.images, None, show_progress=False
    )
    vectors = np.stack([np.asarray(store[n], np.float32).mean(0) for n in range(len(store))])
    sets = class_sets(captions, COLUMN)
    labels = class_rows(sets, class_names(sets))
    asked = np.array([split == "test" for split in captions.splits])
    vectors -= vectors[~asked].mean(0)
    print(f"{asked.sum()} queries, {(~asked).sum()} images in the database, {labels.shape[1]} classes")
    for bits in BITS:
        found: dict[str, list[float]] = {"random": [], "projections": []}
        for seed in range(SEEDS):
            rng = np.random.default_rng(seed)
            codes: dict[str, NDArray[np.float64]] = {
                "projections": vectors @ rng.normal(size=(vectors.shape[1], bits)),
                "random": rng.normal(size=(len(vectors), bits)),
            }
            for name, rows in codes.items():
                found[name].append(hashing_map(rows[asked], rows[~asked], labels[asked], labels[~asked]).map)
        means = {
            name: f"{np.mean(values):.1f} ({np.min(values):.1f} to {np.max(values):.1f})"
            for name, values in found.items()
        }
        print(
            f"{bits} bits: random codes {means['random']}, signs of random projections {means['projections']}"
        )


def own_centre(run: Path, captions: Captions) -> float:
    """The share of test images whose code lies nearest the centre of their class."""
    model = Retriever.from_pretrained(run)
    head = model.branches[VIEW]
    assert isinstance(head, HashHead)
    names = class_names(class_sets(captions.split("train"), COLUMN))
    test = prepare(model, captions.split("test"), show_progress=False).captions
    codes = np.sign(model.encode_image(test.images, view=VIEW).numpy())
    classes = class_rows(class_sets(test, COLUMN), names).argmax(1)
    return float(np.mean((codes @ head.centres.numpy().T).argmax(1) == classes))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    args = parser.parse_args(arguments)
    captions = open_captions("emoji")
    compare_codes(captions)
    for run in args.runs:
        print(
            f"{run}: {100 * own_centre(run, captions):.1f} % of the test images lie nearest their own centre"
        )


if __name__ == "__main__":
    main()
