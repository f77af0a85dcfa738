"""One assignment pass of prototypes over a memory-mapped file: time and peak memory.

Run: ``python benchmarks/prototypes.py`` for CODER's COCO size, 566,000 × 1,024 vectors in float16 and 20,000
centroids (about 1.2 GB of file and 23 TFLOP), or with ``--fraction 0.05`` for a twentieth of the vectors.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.objectives.clustering import ROWS, cluster, nearest
from diptych.ops import unit

LIMIT = 4.0  # GB


def write_vectors(
    path: Path, rows: int, dim: int, groups: int
) -> np.memmap[tuple[int, ...], np.dtype[np.float16]]:
    """Unit vectors around ``groups`` centres, written block by block and mapped for reading."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(groups, dim, generator=draw)
    file = np.memmap(path, dtype=np.float16, mode="w+", shape=(rows, dim))
    for start in range(0, rows, ROWS):
        count = min(ROWS, rows - start)
        which = torch.randint(groups, (count,), generator=draw)
        block = unit(centres[which] + torch.randn(count, dim, generator=draw))
        file[start : start + count] = block.half().numpy()
    file.flush()
    return np.memmap(path, dtype=np.float16, mode="r", shape=(rows, dim))


def peak() -> float:
    """The most memory this process has held, in GB, the mapped file's pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Print a table of one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=566_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--clusters", type=int, default=20_000)
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the rows to use")
    parser.add_argument("--iterations", type=int, default=0, help="also time so many k-means iterations")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write the vectors (default: a temporary one)"
    )
    options = parser.parse_args()
    rows = int(options.rows * options.fraction)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        vectors = write_vectors(Path(folder) / "vectors.f16", rows, options.dim, groups=5000)
        start = np.sort(np.random.default_rng(0).choice(rows, options.clusters, replace=False))
        centroids = torch.from_numpy(vectors[start]).float()
        began = time.perf_counter()
        blocks = (torch.from_numpy(np.array(vectors[at : at + ROWS])).float() for at in range(0, rows, ROWS))
        labels = torch.cat([nearest(block, centroids)[1] for block in blocks])
        seconds = time.perf_counter() - began
        used = len(labels.unique())
        print("| vectors | clusters | threads | one pass s | TFLOP/s | peak GB | clusters hit |")
        print("|---|---|---|---|---|---|---|")
        rate = 2 * rows * options.clusters * options.dim / seconds / 1e12
        print(
            f"| {rows:,} × {options.dim} | {options.clusters:,} | {torch.get_num_threads()} | {seconds:.1f} "
            f"| {rate:.3f} | {peak():.2f} | {used:,} |"
        )
        if options.iterations:
            began = time.perf_counter()
            cluster(vectors, options.clusters, iterations=options.iterations, show_progress=True)
            each = (time.perf_counter() - began) / options.iterations
            print(f"\nk-means: {each:.1f} s per iteration, peak {peak():.2f} GB")
    if peak() >= LIMIT:
        sys.exit(f"the peak of {peak():.2f} GB is over the limit of {LIMIT:g} GB.")


if __name__ == "__main__":
    main()
