"""Images per second of COOKIE's picture augmentation, beside decoding alone, with one thread and with two.

    python benchmarks/augmentation.py                       # 200 made-up photographs of 640 × 480
    python benchmarks/augmentation.py --folder ./photos     # your own

Each row does what the row above does and one thing more. "cores" is processor time over wall time: how many cores the
threads kept busy; "ms" the processor time of an image with one thread, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sys import path

import numpy as np
from PIL import Image, ImageFilter

path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.data.augmentation import PictureAugmentation
from diptych.data.decode.opening import open_image
from diptych.data.images import PixelInput

THREADS = (1, 2)
SIZE = 256  # pixels of COOKIE's pre-training
Work = Callable[[tuple[int, bytes]], object]


def photographs(count: int) -> list[bytes]:
    """JPEG files of blurred noise: as many details as a photograph has."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(count):
        noise = Image.fromarray(rng.integers(0, 255, (120, 160, 3), dtype=np.uint8)).resize((640, 480))
        buffer = io.BytesIO()
        noise.filter(ImageFilter.GaussianBlur(2)).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def decode(job: tuple[int, bytes]) -> Image.Image:
    """Pillow alone."""
    image = Image.open(io.BytesIO(job[1]))
    image.load()
    return image


def resized(job: tuple[int, bytes]) -> object:
    """The clean view: opened safely, resized, normalised."""
    return PixelInput(SIZE)([open_image(job[1])])


def augmented(job: tuple[int, bytes]) -> object:
    """The augmented view: the five steps before resizing."""
    picture = PictureAugmentation()(open_image(job[1]), np.random.default_rng(job[0]))
    return PixelInput(SIZE)([picture])


def both(job: tuple[int, bytes]) -> object:
    """A pre-training sample: decoded once, seen clean and augmented."""
    picture, pixels = open_image(job[1]), PixelInput(SIZE)
    return pixels([picture]), pixels([PictureAugmentation()(picture, np.random.default_rng(job[0]))])


ROWS: dict[str, Work] = {
    "decode (Pillow alone)": decode,
    "decode, resize, normalise": resized,
    "decode, augment, resize, normalise": augmented,
    "decode once, both views": both,
}


def measure(work: Work, files: Sequence[bytes], threads: int) -> tuple[float, float, float]:
    """Images per second, cores kept busy, and milliseconds of processor time per image."""
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(work, enumerate(files[:8])))
        wall, processor = time.perf_counter(), time.process_time()
        list(executor.map(work, enumerate(files)))
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return len(files) / wall, processor / wall, 1e3 * processor / len(files)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="JPEG files to use")
    parser.add_argument("--images", type=int, default=200, help="how many")
    arguments = parser.parse_args()
    if arguments.folder is None:
        files = photographs(arguments.images)
    else:
        files = [file.read_bytes() for file in sorted(arguments.folder.glob("*.jpg"))[: arguments.images]]
    print(f"{len(files)} images\n")
    print("| | 1 thread, images/s | 2 threads, images/s | cores | ms |")
    print("|---|---|---|---|---|")
    for name, work in ROWS.items():
        (one, _, each), (two, cores, _) = (measure(work, files, threads) for threads in THREADS)
        print(f"| {name} | {one:.0f} | {two:.0f} | {cores:.2f} | {each:.1f} |", flush=True)


if __name__ == "__main__":
    main()
