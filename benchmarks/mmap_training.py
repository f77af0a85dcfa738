"""Training from a feature file larger than the memory it may take: resident growth over one full pass.

Run: ``python benchmarks/mmap_training.py``. It makes a sparse ``.npy`` of 36×2048 float32 regions (4 GB
unless told otherwise; a sparse file is read like any other), trains a small region + BiGRU model on every row
through the product's own loader, and prints how far the process grew: the pages of mapped files count
(RssAnon + RssFile). Beside it the same pass through ``numpy.load(mmap_mode="r")``, which keeps what it has
touched.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from sys import path

import numpy as np
import torch

path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.aggregators import Mean
from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.regions import Regions
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.triplet import Triplet
from diptych.training.loading import PairLoader
from diptych.types import Batch, Features, as_inputs

REGIONS, DIM, BATCH, JOINT = 36, 2048, 128, 64


def resident() -> float:
    """Megabytes of this process in memory, file pages included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) / 1024


def write_features(file_path: Path, images: int) -> None:
    """A sparse array (images, 36, 2048) whose first region of each row holds numbers."""
    rng = np.random.default_rng(0)
    with open(file_path, "wb") as file:
        header = {"shape": (images, REGIONS, DIM), "fortran_order": False, "descr": "<f4"}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        for row in range(images):
            file.seek(start + row * REGIONS * DIM * 4)
            file.write(rng.random(DIM, dtype=np.float32).tobytes())
        file.truncate(start + images * REGIONS * DIM * 4)


def train(retriever: Retriever, batches: Iterable[Batch]) -> tuple[int, float]:
    """One pass: pairs seen, and the largest growth of the process in megabytes."""
    objective = Triplet()
    optimizer = torch.optim.AdamW(retriever.parameters(), lr=1e-4)
    retriever.train()
    pairs, most, before = 0, 0.0, None
    for batch in batches:
        optimizer.zero_grad()
        torch.stack(list(objective(retriever(batch), batch).values())).sum().backward()
        optimizer.step()
        pairs += len(batch)
        # the first step allocates what a model needs on any data
        before = resident() if before is None else before
        most = max(most, resident() - before)
    return pairs, most


def mapped(file_path: Path, loader: PairLoader) -> Iterable[Batch]:
    """The batches of an epoch with their images read through a plain memory map."""
    array = np.load(file_path, mmap_mode="r")
    order, text_store, image_of = loader.order(0), loader.text_store, loader.captions.image_of
    for step in range(len(loader)):
        texts = order[step * BATCH : (step + 1) * BATCH]
        images = Features.whole(torch.from_numpy(array[image_of[texts]]))
        ids = torch.from_numpy(image_of[texts])
        yield Batch(images, as_inputs(text_store.collate(texts.tolist())), ids, torch.from_numpy(texts))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    images = int(arguments.gigabytes * 1e9) // (REGIONS * DIM * 4) // BATCH * BATCH + BATCH
    with tempfile.TemporaryDirectory() as folder:
        file_path = Path(folder) / "train_ims.npy"
        write_features(file_path, images)
        texts = [f"picture number {row % 1000} of a series" for row in range(images)]
        names = [str(row) for row in range(images)]
        data = Captions(ArrayStore(file_path), texts, np.arange(images), names, ["train"] * images)
        text_input, image_input = WordInput(build_vocabulary(texts)), RegionInput(DIM)
        loader = PairLoader(
            data, image_input, text_input.prepare(texts), BATCH, seed=0, workers=arguments.workers
        )
        print(f"{file_path.stat().st_size / 1e9:.2f} GB of features, {images} images, batches of {BATCH}")
        print(f"{'reading':<24}{'pairs':>8}{'seconds':>9}{'growth MB':>11}")
        for label, batches in (
            ("diptych (pread)", loader.epoch(0)),
            ("numpy memory map", mapped(file_path, loader)),
        ):
            torch.manual_seed(0)
            words = text_input.vocabulary_size
            retriever = Retriever(
                Tower(Regions(DIM, JOINT, hidden=JOINT), Mean()),
                Tower(BiGRU(words, 32, JOINT), Mean()),
                image_input,
                text_input,
            )
            start = time.perf_counter()
            pairs, growth = train(retriever, batches)
            print(f"{label:<24}{pairs:>8}{time.perf_counter() - start:>9.1f}{growth:>11.0f}")


if __name__ == "__main__":
    main()
