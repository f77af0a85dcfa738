"""Gradient caching: a batch of 4,096 pairs in the memory of 256, at most 1.6 times the time per pair.

    python benchmarks/gradient_cache.py            # on a GPU or a CPU; exits with status 1 where a limit is broken

Two towers of COOKIE's form (an EfficientNet-Lite0 that is trained, a BiGRU, one shared transformer layer) and its
InfoNCE on made-up pictures and words. The large batch is encoded in pieces of 192 pairs: what they save beside 256
pays for the 4,096 × 4,096 scores. Each row runs in a process of its own. "memory" is the peak over what the process
held once model, optimiser and batch were there: of the GPU's memory on a GPU (the batch stays on the host), else of
the resident memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.aggregators import Max
from diptych.data.images import PixelInput
from diptych.data.text import WordInput
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import Grid
from diptych.encoders.lite0 import Lite0
from diptych.encoders.shared import Contextual, TokenTransformer
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.contrastive import InfoNCE
from diptych.training.gradient_cache import CachedStep
from diptych.training.method import Method
from diptych.training.step import Step
from diptych.types import Batch, Features

SMALL, LARGE, PIECE = 256, 4096, 192
WORDS, VOCABULARY = 12, 1000
MEMORY, TIME = 1.0, 1.6  # limits beside the small batch
ROWS = {"256, plain": (SMALL, 0), "4,096, cached in pieces of 192": (LARGE, PIECE)}


def method_of(dim: int, size: int) -> Method:
    """The method under test."""
    torch.manual_seed(0)
    shared = TokenTransformer(dim, heads=8, feedforward=4 * dim)
    words = ["<pad>", "<start>", "<end>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 5)), "<mask>"]
    retriever = Retriever(
        Tower(Contextual(Grid(Lite0(size=size), dim, trainable=True), shared), Max()),
        Tower(Contextual(BiGRU(VOCABULARY, 64, dim), shared), Max()),
        PixelInput(size),
        WordInput(words, augment=0),
    )
    return Method(retriever, InfoNCE())


def made(pairs: int, size: int) -> Batch:
    """Random pixels and words."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(pairs, 3, size, size, generator=generator)
    words = torch.randint(4, VOCABULARY, (pairs, WORDS), generator=generator)
    rows = torch.arange(pairs)
    return Batch(pixels, Features.whole(words), rows, rows)


def run(pairs: int, micro: int, steps: int, dim: int, size: int) -> dict[str, float]:
    """Seconds per pair, and bytes at the peak over what was there before the first step."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    method = method_of(dim, size)
    method.retriever.to(accelerator.device).train()
    optimizer = torch.optim.AdamW(method.retriever.parameters(), lr=1e-4)
    step = Step(method, method.retriever, accelerator.prepare_optimizer(optimizer), accelerator, 2.0)
    work = CachedStep(step, micro) if micro else step
    step(made(16, size).to(accelerator.device))  # the optimiser's state is there before anything is measured
    batch = made(pairs, size)
    if not micro:
        batch = batch.to(accelerator.device)
    held = memory(reset=True)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        work(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds_per_pair": min(seconds) / pairs, "bytes": memory() - held}


def memory(*, reset: bool = False) -> float:
    """Peak bytes so far; with ``reset`` the bytes held now, where the peak starts anew."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of the resident memory starts anew
    status = Path("/proc/self/status").read_text("utf-8")
    return 1024.0 * int(status.split("VmRSS:" if reset else "VmHWM:")[1].split()[0])


def main() -> None:
    """Run both rows and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2, help="steps of the large batch")
    parser.add_argument("--dim", type=int, default=256, help="joint dimension")
    parser.add_argument("--size", type=int, default=96, help="pixels of a picture's side")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        pairs, micro = ROWS[arguments.row]
        steps = arguments.steps if micro else 4 * arguments.steps
        print(json.dumps(run(pairs, micro, steps, arguments.dim, arguments.size)))
        return
    found = {}
    for row in ROWS:
        sizes = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "dim", "size")]
        command = [sys.executable, __file__, "--row", row, *sizes]
        found[row] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    print("| batch | ms per pair | memory, MB |\n|---|---|---|")
    for row, numbers in found.items():
        print(f"| {row} | {1e3 * numbers['seconds_per_pair']:.2f} | {numbers['bytes'] / 1e6:.0f} |")
    plain, cached = found.values()
    times = cached["seconds_per_pair"] / plain["seconds_per_pair"]
    more = cached["bytes"] / plain["bytes"]
    print(
        f"\n{times:.2f} times the time per pair (limit {TIME}), {more:.2f} times the memory (limit {MEMORY})"
    )
    sys.exit(int(times > TIME or more > MEMORY))


if __name__ == "__main__":
    main()
