"""What CUSA costs: time per step, peak memory and disk, with cached teacher vectors and with live teachers.

    python benchmarks/cusa_step.py                                                    # the host is vse-infinity
    python benchmarks/cusa_step.py --host sgr --precision bf16 --graphs --workers 4  # on a GPU

The host reads cached EfficientNet-Lite0 cells and a BiGRU, batch 128, 1024 dimensions; teachers are Lite0 and
all-MiniLM-L6-v2; pictures and texts are random. A step includes waiting for its batch, which ``--workers`` threads
read ahead. The rows take turns of one step, on a GPU of fifty, timed together since training does not wait for the GPU
after each; a busy machine slows all rows alike, and the table shows medians over the turns. Rows with a live teacher
take three turns, on a GPU of five steps. Peak memory is that of the steps, in a process of its own per row (the GPU's
where there is one; else Linux only). It fails when CUSA with a warm cache adds more than 3 % to the host's step.
``diptych reproduce cusa`` times each module (``--table 12``) and each row by itself (``--table 13``).
``--tiny`` only checks that it runs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.data.captions import Captions, StoredImage
from diptych.objectives.objective import start_epoch
from diptych.recipes import RECIPES
from diptych.targets.columns import divide, fill_targets
from diptych.training.loading import PairLoader
from diptych.training.optim import build_optimizer
from diptych.training.prepare import prepare
from diptych.training.step import WARM_STEPS, GraphedStep, Step
from diptych.types import Batch

LIMIT = 3  # percent that CUSA may add to a step of its host when its cache is warm
OFF: dict[str, Any] = {"csa": 0.0, "usa": 0.0}
ROWS: dict[str, dict[str, Any]] = {
    "host": OFF,
    "+ CSA, cached": {"usa": 0.0},
    "+ USA, cached": {"csa": 0.0},
    "+ CUSA, cached": {},
    "+ CUSA, live text teacher": {"teacher_mode": "live_text"},
    "+ CUSA, live image teacher": {"teacher_mode": "live_image"},
    "+ CUSA, live teachers": {"teacher_mode": "live"},
}
WARM = 2  # turns before the first that is timed
ON_GPU = 50  # steps of a turn there
WORDS = [f"word{i}" for i in range(2000)]


class Pictures:
    """Random pictures."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> StoredImage:
        rng = np.random.default_rng(index)
        return Image.fromarray(rng.integers(0, 255, (self.size, self.size, 3)).astype(np.uint8))

    def content_key(self, index: int) -> str:
        return f"{index} {self.size}"


def make_captions(count: int, size: int) -> Captions:
    """Random pictures with two texts of about twelve words each."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(8, 16))) for _ in range(2 * count)]
    return Captions(
        Pictures(count, size),
        texts,
        np.arange(2 * count) // 2,
        [str(i) for i in range(count)],
        ["train"] * count,
    )


class Run:
    """One row: its method, its batches, and its step."""

    def __init__(self, changes: dict[str, Any], captions: Captions, options: argparse.Namespace) -> None:
        recipe = RECIPES[f"cusa-{options.host}"]
        settings = recipe.settings(
            **{
                "dim": options.dim,
                "batch_size": options.batch,
                "min_count": 1,
                "image_size": options.size,
                "precision": options.precision,
                **changes,
            }
        )
        torch.manual_seed(0)
        method = recipe.build(settings, captions)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ready = prepare(method.retriever, captions, device=str(device), show_progress=False)
        targets = fill_targets(method.targets, captions, device=device, show_progress=False)
        method.retriever.to(device).train()
        method.objective.to(device)
        start_epoch(method.objective, 1)
        resident, read = divide(targets, ready.captions, device)
        loader = PairLoader(
            ready.captions, method.retriever.image_input, ready.texts, settings.batch_size, 0, targets=read,
            workers=options.workers, pack_texts=method.retriever.text.encoder.packs(device),
        )  # fmt: skip
        self.device, self.batches = device, self._forever(loader)
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=options.precision)
        model = accelerator.prepare_model(method.retriever)
        optimizer = build_optimizer(method, settings, graphs=options.graphs)
        one = Step(method, model, optimizer, accelerator, settings.clip_norm, resident)
        self.one: Callable[[Batch], object] = GraphedStep(one) if options.graphs else one

    def turn(self, share: int = 1) -> float:
        """Seconds of a step, its batch included, over the steps of a turn or one ``share``-th of them."""
        on_gpu = self.device.type == "cuda"
        count = ON_GPU // share if on_gpu else 1
        began = time.perf_counter()
        for _ in range(count):
            self.one(next(self.batches))
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    @staticmethod
    def _forever(loader: PairLoader) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from loader.epoch(epoch)


def peak_memory(name: str, options: argparse.Namespace) -> float:
    """Peak MB of a process that runs this row alone."""
    command = [sys.executable, __file__, "--only", name]
    command += [
        f"--{key}={getattr(options, key)}"
        for key in ("batch", "dim", "size", "images", "host", "precision", "workers")
    ]
    command += ["--graphs"] if options.graphs else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def only(name: str, options: argparse.Namespace) -> None:
    """Run one row for three steps and print their peak memory in MB, what came before left out."""
    run = Run(ROWS[name], make_captions(options.images, options.size), options)
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's own peak starts anew
    for _ in range(3 + WARM_STEPS * options.graphs):
        run.one(next(run.batches))
    if run.device.type == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20)
    else:
        status = Path("/proc/self/status").read_text()
        print(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", choices=["vse-infinity", "sgr", "saf"], default="vse-infinity")
    parser.add_argument("--graphs", action="store_true", help="replay each step as a CUDA graph")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--workers", type=int, default=0, help="threads that read ahead")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--size", type=int, default=224, help="pixels of a picture")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument(
        "--no_memory", action="store_true", help="leave out the peak memory, which takes longest"
    )
    parser.add_argument("--only", choices=list(ROWS), help="print the peak memory of one row")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.turns, options.batch, options.dim, options.size, options.images = 2, 8, 16, 64, 12
    if options.only:
        only(options.only, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        os.environ["DIPTYCH_CACHE"] = folder
        captions = make_captions(options.images, options.size)
        runs = {name: Run(changes, captions, options) for name, changes in ROWS.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(options.turns + WARM):
            for name, run in runs.items():
                live = "live" in name  # such steps are long, and far from the limit
                if not live or turn < WARM + 3:
                    taken = run.turn(10 if live else 1)
                    if turn >= WARM:
                        times[name].append(1000 * taken)
        del runs
        middle = {name: statistics.median(taken) for name, taken in times.items()}
        # of steps in the same turn, so that what slows the machine for a while slows both
        added = {
            name: statistics.median(a / b for a, b in zip(taken, times["host"], strict=False)) - 1
            for name, taken in times.items()
        }
        print(f"{'step':28} {'ms':>8} {'beside the host':>16} {'peak MB':>9}")
        for name, value in middle.items():
            memory = "" if options.no_memory else f"{peak_memory(name, options):9.0f}"
            print(f"{name:28} {value:8.1f} {100 * added[name]:+15.1f}% {memory}", flush=True)
        per_image, per_text = (
            sum(path.stat().st_size for path in cache.glob(f"teacher-{side}-*.npy")) / count
            for side, count in (("images", options.images), ("texts", 2 * options.images))
        )
        print(f"\ndisk: {per_image / 1024:.1f} kB per image, {per_text / 1024:.1f} kB per text")
    warmed = 100 * added["+ CUSA, cached"]
    if not options.tiny and warmed > LIMIT:
        sys.exit(f"CUSA with a warm cache adds {warmed:.1f} %, more than {LIMIT} %")


if __name__ == "__main__":
    main()
