"""A fixed part of Flickr8k for tables that a CPU can run: 2,000 training, 500 validation and 1,000 test images.

    python benchmarks/flickr8k_subset.py flickr8k subset

``flickr8k`` is a folder of webdataset tars (``train-*.tar``: KEY.webp or KEY.jpg, and KEY.json with ``captions``). The
images are drawn from the training tars by ``SEED``; test images choose nothing. ``subset`` gets a tar for each split.
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


def read(folder: Path) -> dict[str, dict[str, bytes]]:
    """Key → name of a file → content, of all training tars."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None:
                    found.setdefault(member.name.split(".")[0], {})[member.name] = file.read()
    return found


def main(source: Path, output: Path) -> None:
    """Write the tars."""
    samples = read(source)
    order = np.random.default_rng(SEED).permutation(sorted(samples)).tolist()
    output.mkdir(parents=True, exist_ok=True)
    start = 0
    for split, size in SIZES.items():
        keys, start = sorted(order[start : start + size]), start + size
        if len(keys) < size:
            sys.exit(f"{source} has {len(samples)} images, {sum(SIZES.values())} are needed.")
        with tarfile.open(output / f"{split}-000000.tar", "w") as tar:
            for key in keys:
                for name, content in sorted(samples[key].items()):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        print(f"{output}/{split}-000000.tar: {len(keys)} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of webdataset tars")
    parser.add_argument("output", type=Path, help="folder for a tar of each split")
    main(**vars(parser.parse_args()))
