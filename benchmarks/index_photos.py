"""Indexing JPEGs: pictures per CPU second of the whole command, torch and ONNX Runtime in turns, beside a bare loop.

    python benchmarks/index_photos.py MODEL [--tars 'flickr8k/*.tar']

MODEL is a model folder with a runtime. ``--small`` JPEGs of 400 × 300 and ``--large`` ones of 1,600 × 1,200 are made
from the pictures of the tars, or drawn where none are given. Start-up is the CPU time of indexing two pictures, and is
taken off. The bare loop hashes the file, decodes it at reduced size, makes a thumbnail and runs the image encoder;
``index`` makes a thumbnail only of a picture that has no file of its own, so the loop is also given without it. The
last column is the least cosine between the vectors of the index and those of the first 150 photos as they are.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from diptych.data.decode.opening import make_thumbnail
from diptych.index.engines.opening import open_index
from diptych.runtime.model import PICTURES, RuntimeModel

WHOLE = 150  # photos that are also encoded as they are
SIZES = {"small": (400, 300), "large": (1600, 1200)}


def sources(pattern: str | None) -> Iterator[Image.Image]:
    """Pictures without end."""
    while pattern:
        for file in sorted(glob.glob(pattern)):
            with tarfile.open(file) as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    if content is not None and member.name.endswith((".jpg", ".webp", ".png")):
                        yield Image.open(io.BytesIO(content.read())).convert("RGB")
    rng = np.random.default_rng(0)
    while True:
        yield Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8))


def make(folder: Path, count: int, size: tuple[int, int], pictures: Iterator[Image.Image]) -> None:
    """Write JPEGs of one size."""
    folder.mkdir()
    for number in range(count):
        next(pictures).resize(size).save(folder / f"{number:05}.jpg", quality=88)


def command(model: str, folder: Path, place: Path, backend: str) -> float:
    """CPU seconds of ``diptych index``."""
    words = [
        "index",
        model,
        str(folder),
        "--index",
        str(place),
        "--backend",
        backend,
        "--device",
        "cpu",
        "--no_cache",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "diptych", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"diptych {' '.join(words)} ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime


def bare(model: str, folder: Path) -> tuple[float, float]:
    """CPU seconds of the least that indexing does, with a thumbnail of each photo and without."""
    runtime = RuntimeModel.open(model)
    runtime.check()
    start, thumbnails = time.process_time(), 0.0
    files = sorted(folder.iterdir())
    for first in range(0, len(files), PICTURES):
        batch = []
        for file in files[first : first + PICTURES]:
            content = file.read_bytes()
            hashlib.sha256(content).hexdigest()
            picture = Image.open(io.BytesIO(content))
            picture.draft("RGB", (256, 256))
            picture.load()
            before = time.process_time()
            make_thumbnail(picture)
            thumbnails += time.process_time() - before
            batch.append(picture)
        runtime.encode_image(batch)
    whole = time.process_time() - start
    return whole, whole - thumbnails


def least_cosine(model: str, folder: Path, place: Path) -> float:
    """Between the vectors of an index and those of the first whole photos."""
    files = sorted(folder.iterdir())[:WHOLE]
    whole = RuntimeModel.open(model).encode_image(files)
    with open_index(place) as index:
        rows = index.vectors([file.name for file in files])
    return float((rows * whole).sum(axis=1).min())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tars")
    parser.add_argument("--small", type=int, default=2000)
    parser.add_argument("--large", type=int, default=300)
    given = parser.parse_args()
    pictures = sources(given.tars)
    print("pictures per CPU second, start-up taken off")
    names = (
        "pictures", "torch", "onnx", "onnx / torch", "bare loop", "onnx / bare", "no thumbnail", "onnx / that",
        "least cosine",
    )  # fmt: skip
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make(place / "two", 2, SIZES["small"], pictures)
        start = {
            kind: command(given.model, place / "two", place / f"two-{kind}", kind)
            for kind in ("torch", "onnx")
        }
        for which, count in (("small", given.small), ("large", given.large)):
            make(place / which, count, SIZES[which], pictures)
            speed = {
                kind: count
                / (command(given.model, place / which, place / f"{which}-{kind}", kind) - start[kind])
                for kind in ("torch", "onnx")
            }
            limits = [count / seconds for seconds in bare(given.model, place / which)]
            bares = " | ".join(f"{limit:.0f} | {speed['onnx'] / limit:.2f}" for limit in limits)
            width, height = SIZES[which]
            print(
                f"| {count:,} of {width:,} × {height:,} | {speed['torch']:.0f} | {speed['onnx']:.0f} | "
                f"{speed['onnx'] / speed['torch']:.2f} | {bares} | "
                f"{least_cosine(given.model, place / which, place / f'{which}-onnx'):.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
