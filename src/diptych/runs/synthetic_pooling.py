"""The synthetic pooling experiment of VSE∞ (supplement 2.3, Table 6): can GPO learn a pooling it is shown?

Random sets and the output of a known pooling are the training pairs; the error is the root mean square of
learned minus true coefficients, per size, averaged over sizes: those trained on (20 to 100), smaller
ones (10 to 19) and larger ones (101 to 120).

The paper states neither data nor optimiser. Here: N(0, 1) features in 64 channels, 16 sets of independent
random sizes per step, mean squared error, 600 steps of Adam from 3e-3 down to 0 along a cosine, gradients
clipped at 2. Larger rates let the softmax at temperature 0.1 saturate into one rank, where its gradient
vanishes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor

from diptych.aggregators import GPO, CosSinBiGRU, CosSinMLP, Generator, IndexBiGRU, Interpolation
from diptych.errors import SettingsError
from diptych.progress import track
from diptych.types import Features

SMALLER, SEEN, LARGER = range(10, 20), range(20, 101), range(101, 121)
PROPOSED = "Cos/Sin+BiGRU"
SETS, CHANNELS = 16, 64  # of a step
LEARNING_RATE, CLIP_NORM = 3e-3, 2.0


@dataclass(frozen=True)
class Errors:
    """Root mean square errors of the coefficients over three ranges of set sizes."""

    seen: float
    smaller: float
    larger: float


@dataclass(frozen=True)
class PoolingRun:
    """One training: a design, the pattern it was shown, the seed, and its errors."""

    design: str
    pattern: str
    seed: int
    errors: Errors


DESIGNS: dict[str, Callable[[], Generator]] = {
    "Index+Interp": Interpolation,
    "Cos/Sin+MLP": CosSinMLP,
    "Index+BiGRU": lambda: IndexBiGRU(ranks=LARGER[-1]),
    PROPOSED: CosSinBiGRU,
}

# unnormalised weight of rank k (from 0) in a set of n
PATTERNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "A": lambda k, n: torch.ones_like(k + n),
    "M-1": lambda k, n: k + 0 * n < 1,
    "M-10": lambda k, n: k + 0 * n < 10,
    "T-50%": lambda k, n: k < (n + 1) // 2,  # the upper half, the middle element of an odd set included
    "L": lambda k, n: n - 1 - k,
}


def true_coefficients(pattern: str, sizes: Tensor, length: int) -> Tensor:
    """Coefficients (S, length) of a pattern for the given sizes (S,); each row sums to 1."""
    ranks = torch.arange(length)
    weights = PATTERNS[pattern](ranks, sizes[:, None]) * (ranks < sizes[:, None])
    return weights / weights.sum(dim=1, keepdim=True)


def train(generator: Generator, pattern: str, *, seed: int, steps: int) -> GPO:
    """A GPO trained on pairs (random set, output of the pattern)."""
    gpo = GPO(generator)
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(gpo.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        sizes = torch.randint(SEEN[0], SEEN[-1] + 1, (SETS,), generator=random)
        mask = torch.arange(int(sizes.max())) < sizes[:, None]
        values = torch.randn(*mask.shape, CHANNELS, generator=random)
        ranked = values.masked_fill(~mask[..., None], -math.inf).sort(dim=1, descending=True).values
        wanted = true_coefficients(pattern, sizes, mask.shape[1])[..., None]
        target = (wanted * ranked.masked_fill(~mask[..., None], 0)).sum(dim=1)
        loss = (gpo(Features(values, mask)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpo.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
    return gpo


@torch.no_grad()
def errors(gpo: GPO, pattern: str) -> Errors:
    """Per size the root mean square over its ranks, averaged over each range of sizes."""

    def over(sizes: range) -> float:
        n = torch.tensor(sizes)
        difference = gpo.coefficients(n, sizes[-1]).squeeze(2) - true_coefficients(pattern, n, sizes[-1])
        return float((difference.square().sum(dim=1) / n).sqrt().mean())

    return Errors(over(SEEN), over(SMALLER), over(LARGER))


def run_one(design: str, pattern: str, seed: int, steps: int) -> PoolingRun:
    """Train one design on one pattern and measure it; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = DESIGNS[design]()
    return PoolingRun(
        design, pattern, seed, errors(train(generator, pattern, seed=seed, steps=steps), pattern)
    )


def run(
    designs: Sequence[str] = tuple(DESIGNS),
    patterns: Sequence[str] = tuple(PATTERNS),
    seeds: int = 3,
    steps: int = 600,
    workers: int | None = None,
    show_progress: bool = True,
) -> list[PoolingRun]:
    """Every design on every pattern, ``seeds`` times, on one process per core unless ``workers`` is given."""
    for names, known, what in ((designs, DESIGNS, "design"), (patterns, PATTERNS, "pattern")):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise SettingsError(f"there is no {what} '{unknown[0]}': choose among {', '.join(known)}.")
    if seeds < 1 or steps < 1:
        raise SettingsError(f"the experiment needs at least one seed and one step, not {seeds} and {steps}.")
    # the BiGRU designs take ten times as long: first, so that no core waits for one at the end
    by_cost = sorted(designs, key=lambda design: "BiGRU" not in design)
    jobs = [(d, p, s, steps) for d in by_cost for p in patterns for s in range(seeds)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers or cores, len(jobs))
    done = starmap(run_one, jobs) if workers == 1 else _together(jobs, workers)
    runs = track(done, "synthetic pooling", len(jobs), show_progress)
    return sorted(runs, key=lambda r: (r.design, r.pattern, r.seed))


def _prepare() -> None:
    """In each process: one thread, and an interrupt is its parent's business."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _together(jobs: Iterable[tuple[str, str, int, int]], workers: int) -> Iterator[PoolingRun]:
    """Runs as they end, each process on one thread; leaving early ends a training in flight."""
    # spawned, not forked: a forked child inherits torch's locked thread pool
    with multiprocessing.get_context("spawn").Pool(workers, _prepare) as pool:
        yield from pool.imap_unordered(_run_job, jobs)


def _run_job(job: tuple[str, str, int, int]) -> PoolingRun:
    return run_one(*job)
