"""What CODER's bank, concept branch and prototypes add to a training step and to encoding, at batch 128.

Run: ``python benchmarks/coder_step.py``. 36 × 2048 regions, BiGRU, GPO on both sides, 1024 dimensions, AdamW;
inputs are random. The steps of all rows take turns, so that a busy machine slows all of them alike; the table
shows medians. It fails when bank and concepts together add more than 35 %. ``--tiny`` only checks that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.aggregators import GPO
from diptych.branches.concept import ConceptBranch
from diptych.data.concepts import Concepts
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.regions import Regions
from diptych.model.retriever import Retriever, Tower
from diptych.model.twin import Twin
from diptych.objectives.combine import On, Sum
from diptych.objectives.contrast import CoupledQueue
from diptych.objectives.diversity import DiversityContrast, MomentumContrast
from diptych.objectives.objective import Objective, after_step
from diptych.objectives.prototypes import PrototypeClassification
from diptych.training.method import Method
from diptych.training.step import Step
from diptych.types import Batch, Features

LIMIT = 35  # percent that the bank and the concept branch may add to a step
WORDS = [f"word{i}" for i in range(8000)]
ROWS = {
    "DCL": (),
    "DCL + bank": ("bank",),
    "DCL + bank, keys in float32": ("bank", "float32"),
    "DCL + concepts": ("concepts",),
    "DCL + bank + concepts": ("bank", "concepts"),
    "CODER (with prototypes)": ("bank", "concepts", "prototypes"),
}


class Run:
    """One row: a model, its objective, and its step."""

    def __init__(self, parts: tuple[str, ...], options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        dim = options.dim
        self.model = make_model(dim, "concepts" in parts)
        members: dict[str, tuple[Objective, float]] = {"dcl": (DiversityContrast(), 3.0)}
        momentum = None
        if "bank" in parts:
            queue = CoupledQueue(options.queue, dim)
            members = {
                "dcl": (DiversityContrast(bank=queue), 3.0),
                "m_dcl": (MomentumContrast(queue), 1.0),
            }
            momentum = partial(Twin, precision="same" if "float32" in parts else "auto")
            queue.count.fill_(options.queue)  # full from the start: only the time is looked at
        if "concepts" in parts:
            members["concept"] = (On(DiversityContrast(), "concept"), 1.0)
        if "prototypes" in parts:
            prototypes = PrototypeClassification(options.clusters, dim, options.clusters)
            prototypes.started = True
            members["prototypes"] = (prototypes, 1.0)
        self.method = Method(self.model, Sum(members), momentum=momentum)
        parameters = [*self.model.parameters(), *self.method.objective.parameters()]
        self.one = Step(
            self.method, self.model, torch.optim.AdamW(parameters, 1e-5), Accelerator(cpu=True), clip_norm=2.0
        )

    def step(self, batch: Batch) -> None:
        """One step of training, as the loop takes it."""
        self.model.train()
        embeddings, batch, _ = self.one(batch)
        with torch.no_grad():
            after_step(self.method.objective, embeddings, batch)

    def encode(self, batch: Batch) -> None:
        """The vectors of both sides, as for an index."""
        self.model.eval()
        with torch.inference_mode():
            self.model.image_vectors(batch.images)
            self.model.text_vectors(batch.texts)


def make_model(dim: int, concepts: bool) -> Retriever:
    """VSE∞ with regions and BiGRU, with a branch over 400 concepts or without."""
    branches = {}
    if concepts:
        rng = np.random.default_rng(0)
        pairs = np.triu(rng.integers(0, 40, (400, 400)), 1)
        found = Concepts(WORDS[:400], np.full(400, 200), pairs + pairs.T)
        branches["concept"] = ConceptBranch.from_concepts(found, dim, text_aggregator=GPO())
    vocabulary = build_vocabulary(WORDS, min_count=1)
    return Retriever(
        Tower(Regions(2048, dim), GPO()),
        Tower(BiGRU(len(vocabulary), 300, dim), GPO()),
        RegionInput(2048),
        WordInput(vocabulary),
        branches=branches,
    )


def make_batch(size: int, number: int) -> Batch:
    """Random regions, and texts of about 12 tokens."""
    g = torch.Generator().manual_seed(number)
    sizes = torch.randint(8, 18, (size, 1), generator=g)
    mask = torch.arange(17) < sizes
    ids = torch.randint(4, 8000, (size, 17), generator=g) * mask
    images = Features.whole(torch.randn(size, 36, 2048, generator=g))
    return Batch(images, Features(ids, mask), torch.arange(size), torch.arange(size))


def timed(work: Callable[[Batch], None], batch: Batch, clock: Callable[[], float]) -> float:
    """Seconds of one call."""
    began = clock()
    work(batch)
    return clock() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--queue", type=int, default=4096)
    parser.add_argument("--clusters", type=int, default=10_000)
    parser.add_argument(
        "--processor-time", action="store_true", help="processor time instead of the clock on the wall"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.batch, options.dim, options.queue, options.clusters = 2, 8, 16, 32, 20
    clock = time.process_time if options.processor_time else time.perf_counter
    runs = {name: Run(parts, options) for name, parts in ROWS.items()}
    steps: dict[str, list[float]] = {name: [] for name in runs}
    encodes: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.steps + 2):
        batch = make_batch(options.batch, number)
        for name, run in runs.items():
            step, encode = timed(run.step, batch, clock), timed(run.encode, batch, clock)
            if number > 1:  # the first two warm up
                steps[name].append(step)
                encodes[name].append(encode)
    print(f"batch {options.batch}, {options.dim} dimensions, {torch.get_num_threads()} threads\n")
    print("| row | step ms | against DCL | encode ms | against DCL |\n|---|---|---|---|---|")
    plain_step, plain_encode = (statistics.median(times["DCL"]) for times in (steps, encodes))
    for name in runs:
        step, encode = statistics.median(steps[name]), statistics.median(encodes[name])
        print(
            f"| {name} | {1000 * step:.0f} | {100 * (step / plain_step - 1):+.0f} % "
            f"| {1000 * encode:.0f} | {100 * (encode / plain_encode - 1):+.0f} % |"
        )
    added = 100 * (statistics.median(steps["DCL + bank + concepts"]) / plain_step - 1)
    if added > LIMIT and not options.tiny:
        sys.exit(f"broken limit: bank and concepts add {added:.0f} % to a step, the limit is {LIMIT} %.")


if __name__ == "__main__":
    main()
