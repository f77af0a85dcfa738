"""A fixed part of Flickr8k for tables that a CPU can run: 2,000 training, 500 validation and 1,000 test images.

    python benchmarks/flickr8k_subset.py flickr8k subset
    python benchmarks/flickr8k_subset.py flickr8k whole --all

``flickr8k`` is a folder of webdataset tars (``train-*.tar``: KEY.webp or KEY.jpg, and KEY.json with ``captions``). The
images are drawn from the training tars by ``SEED``; test images choose nothing. ``subset`` gets a tar for each split.
With ``--all``, every training image stays one, and the images of ``val-*.tar`` are halved into validation and test.
With ``--exchange 0.2`` a share of the training images have the five texts of another of them.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
from pathlib import Path

import numpy as np

SEED = 23
SIZES = {"train": 2_000, "val": 500, "test": 1_000}


def read(folder: Path, split: str) -> dict[str, dict[str, bytes]]:
    """Key → name of a file → content, of all tars of a split."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None:
                    found.setdefault(member.name.split(".")[0], {})[member.name] = file.read()
    return found


def drawn(source: Path, whole: bool) -> dict[str, list[str]]:
    """The keys of each split."""
    rng = np.random.default_rng(SEED)
    train = rng.permutation(sorted(read(source, "train"))).tolist()
    if whole:
        held = rng.permutation(sorted(read(source, "val"))).tolist()
        return {"train": train, "val": held[: len(held) // 2], "test": held[len(held) // 2 :]}
    if len(train) < sum(SIZES.values()):
        sys.exit(f"{source} has {len(train)} images, {sum(SIZES.values())} are needed.")
    ends = np.cumsum(list(SIZES.values())).tolist()
    return {split: train[end - SIZES[split] : end] for split, end in zip(SIZES, ends, strict=True)}


def exchange(samples: dict[str, dict[str, bytes]], keys: list[str], share: float) -> None:
    """Give the texts of some images to others of them."""
    moved = np.random.default_rng(SEED).permutation(keys)[: round(share * len(keys))].tolist()
    texts = [samples[key][f"{key}.json"] for key in moved]
    for key, text in zip(moved, texts[1:] + texts[:1], strict=True):
        samples[key][f"{key}.json"] = text


def main(source: Path, output: Path, whole: bool, share: float) -> None:
    """Write the tars."""
    samples = {**read(source, "train"), **read(source, "val")}
    output.mkdir(parents=True, exist_ok=True)
    for split, keys in drawn(source, whole).items():
        if split == "train":
            exchange(samples, sorted(keys), share)
        with tarfile.open(output / f"{split}-000000.tar", "w") as tar:
            for key in sorted(keys):
                for name, content in sorted(samples[key].items()):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        print(f"{output}/{split}-000000.tar: {len(keys)} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of webdataset tars")
    parser.add_argument("output", type=Path, help="folder for a tar of each split")
    parser.add_argument("--all", action="store_true", dest="whole", help="all images, not the subset")
    parser.add_argument("--exchange", dest="share", type=float, default=0.0, help="share of training images")
    main(**vars(parser.parse_args()))
