"""GPO forward and backward against the plain form: the packed BiGRU on every row, and a strided sort.

Run: ``python benchmarks/gpo.py``. Both sides share their weights; outputs and gradients must agree before
anything is timed. Sizes follow Size Augmentation, N ~ Binomial(36, 0.8).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from sys import path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.aggregators import GPO, CosSinBiGRU
from diptych.types import Features


class PlainGPO(nn.Module):
    """The same operator, sample by sample: position codes, packed BiGRU, softmax, sort along the set."""

    def __init__(self, gpo: GPO) -> None:
        super().__init__()
        generator = gpo.generator
        assert isinstance(generator, CosSinBiGRU)
        self.temperature = gpo.temperature
        self.gru = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(32, 1, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(generator.head.weight)
            for name, weight in generator.gru.ahead.named_parameters():
                self.gru.get_parameter(name).copy_(weight)
            for name, weight in generator.gru.back.named_parameters():
                self.gru.get_parameter(f"{name}_reverse").copy_(weight)

    def forward(self, features: Features) -> Tensor:
        """(B, L, D) → (B, D)."""
        values, sizes = features.values, features.sizes
        batch, length, _ = values.shape
        valid = torch.arange(length) < sizes[:, None]  # sets are left-aligned here
        angle = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, 32, 2) / 32)
        codes = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        codes = codes.expand(batch, -1, -1).masked_fill(~valid[..., None], 0)
        packed = pack_padded_sequence(codes, sizes.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=length)
        scores = self.linear((states[..., :32] + states[..., 32:]) / 2)
        theta = torch.softmax(scores.masked_fill(~valid[..., None], -10000) / self.temperature, dim=1)
        ranked = values.masked_fill(~valid[..., None], -10000).sort(dim=1, descending=True).values
        return (ranked.masked_fill(~valid[..., None], 0) * theta).sum(dim=1)


def sets(batch: int, regions: int, dim: int) -> Features:
    """Random sets, left-aligned, with sizes ~ Binomial(regions, 0.8)."""
    sizes = (torch.rand(batch, regions) < 0.8).sum(1).clamp_min(1)
    mask = torch.arange(regions) < sizes[:, None]
    return Features(torch.randn(batch, regions, dim), mask)


def step(module: nn.Module, features: Features, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, D) and the gradient of the values."""
    values = features.values.detach().requires_grad_()
    out = module(Features(values, features.mask))
    (out * weights).sum().backward()
    assert values.grad is not None
    return out.detach(), values.grad


def best_of(work: Callable[[], object], repeats: int) -> float:
    """Shortest of several runs, in milliseconds."""
    shortest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest * 1000


def check(ours: GPO, plain: PlainGPO, features: Features, weights: Tensor) -> None:
    """Outputs, gradients of the values and of the head must agree."""
    (a, da), (b, db) = step(ours, features, weights), step(plain, features, weights)
    head = ours.generator.head
    assert isinstance(head, nn.Linear)
    assert head.weight.grad is not None
    assert plain.linear.weight.grad is not None
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(da, db, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.weight.grad, plain.linear.weight.grad, rtol=1e-3, atol=1e-2)


def main() -> None:
    """Check, time, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    repeats = args.repeats

    torch.manual_seed(0)
    ours = GPO()
    plain = PlainGPO(ours)
    varied = sets(args.batch, args.regions, args.dim)
    full = Features.whole(varied.values)
    weights = torch.randn(args.batch, args.dim)
    check(ours, plain, varied, weights)
    check(ours, plain, full, weights)

    print(f"GPO, B={args.batch}, {args.regions} regions, {args.dim}-d, {torch.get_num_threads()} threads")
    print("outputs and gradients agree\n")
    print(f"{'work':<34}{'plain ms':>10}{'ours ms':>10}{'ratio':>8}")
    both = (("varied sizes", varied), ("equal sizes", full))
    for name, features in both:
        train = partial(step, features=features, weights=weights)
        row(f"forward + backward, {name}", ours, plain, train, repeats)
    for name, features in both:
        row(f"evaluation, {name}", ours.eval(), plain.eval(), partial(encode, features=features), repeats)


@torch.inference_mode()
def encode(module: nn.Module, features: Features) -> Tensor:
    """Output alone."""
    out: Tensor = module(features)
    return out


def row(
    name: str, ours: nn.Module, plain: nn.Module, work: Callable[[nn.Module], object], repeats: int
) -> None:
    """One line of the table; the first run of each side is not timed."""
    work(plain), work(ours)
    slow, fast = best_of(partial(work, plain), repeats), best_of(partial(work, ours), repeats)
    print(f"{name:<34}{slow:>10.1f}{fast:>10.1f}{slow / fast:>7.1f}×")


if __name__ == "__main__":
    main()
