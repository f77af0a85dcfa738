"""Indexing large photos: time and peak memory of ``diptych index`` over JPEGs of 24 to 33 megapixels.

    python benchmarks/large_photos.py                               # this checkout
    python benchmarks/large_photos.py --before ../older/src         # and another one in turn, in the same run
    python benchmarks/large_photos.py --photos 8 --repeat 1         # a quick look

The photos are drawn on the spot: soft shapes with grain, saved as cameras do. Each run is a process of its own, whose
peak memory is what the operating system reports. A run of one small picture comes first, alone: it writes the model's
runtime, once on a machine. The others find that in their cache, and no features of the photos. The last line compares
the vectors of both indexes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = ((6000, 4000), (4240, 6000), (7008, 4672), (5464, 5464))  # 24 to 33 megapixels
OWN = Path(__file__).parent.parent / "src"


def draw(folder: Path, count: int) -> None:
    """Write photos that differ."""
    rng = np.random.default_rng(0)
    for number in range(count):
        width, height = SIZES[number % len(SIZES)]
        soft = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        fine = Image.fromarray(rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8))
        shapes = soft.resize((width, height), Image.Resampling.BICUBIC)
        picture = Image.blend(shapes, fine.resize((width, height), Image.Resampling.BILINEAR), 0.15)
        exif = Image.Exif()
        exif[0x0110] = f"Camera {number % 3}"
        picture.save(folder / f"{number:03}.jpg", quality=90, exif=exif)


def index(source: Path, photos: Path, place: Path, model: str, cache: Path) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak megabytes of one run of the command."""
    environment = {**os.environ, "PYTHONPATH": str(source), "DIPTYCH_CACHE": str(cache)}
    command = [sys.executable, "-m", "diptych", "index", model, str(photos), "--index", str(place)]
    begin = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}.")
    return time.monotonic() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def vectors(place: Path) -> np.ndarray:
    """The rows of an index in the order of their ids."""
    from diptych.index.engines.opening import open_index

    with open_index(place) as opened:
        return np.asarray(opened.vectors(sorted(id for id, _ in opened.contents(0, "image"))))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the src folder of another checkout")
    parser.add_argument("--photos", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", default="lite0+minilm")
    given = parser.parse_args()
    sources = {"before": given.before.resolve()} if given.before else {}
    sources["now"] = OWN.resolve()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        photos, small = root / "photos", root / "small"
        photos.mkdir()
        small.mkdir()
        Image.new("RGB", (64, 64), "teal").save(small / "teal.png")
        # in a process of its own: a child's peak is never below what its parent held when it was started
        drawing = multiprocessing.get_context("spawn").Process(target=draw, args=(photos, given.photos))
        drawing.start()
        drawing.join()
        print(f"{given.photos} photos of 24 to 33 megapixels, median of {given.repeat}")
        print(f"{'version':18} {'wall s':>8} {'CPU s':>8} {'peak MB':>8}")
        found: dict[str, list[tuple[float, float, float]]] = {}
        for name, source in sources.items():
            (root / f"{name}-cache").mkdir()
            first = index(source, small, root / f"{name}-first", given.model, root / f"{name}-cache")
            found[f"{name}, one picture"] = [first]
        for turn in range(given.repeat):
            for name, source in sources.items():
                cache = root / f"{name}-cache{turn}"
                shutil.copytree(root / f"{name}-cache", cache)
                run = index(source, photos, root / f"{name}{turn}", given.model, cache)
                found.setdefault(name, []).append(run)
        for name, runs in found.items():
            wall, cpu, peak = (statistics.median(values) for values in zip(*runs, strict=True))
            print(f"{name:18} {wall:8.1f} {cpu:8.1f} {peak:8.0f}")
        if len(sources) == 2:
            before, now = (vectors(root / f"{name}0") for name in sources)
            print(f"lowest cosine of a photo's vectors: {(before * now).sum(axis=1).min():.5f}")


if __name__ == "__main__":
    main()
