"""SGR and SAF: our tiles beside a plain loop over texts, in one process.

Run: ``python benchmarks/pair_scorers.py`` (CPU), ``python benchmarks/pair_scorers.py --device cuda``. Both sides
share their weights, and their scores must agree before anything is timed. 36 regions, 14 words on average and at
most 21, 1024-d, as in the published setting.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from sys import path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.encoders.attended import SelfAttended, TextualSelfAttention, VisualSelfAttention
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import PrecomputedGrid
from diptych.interaction.sgraf import SAF, SGR
from diptych.interaction.similarity_scorer import SimilarityScorer
from diptych.types import Features

NOISE = 3.0  # length of the noise on a word of length 1


def l2(x: Tensor, dim: int) -> Tensor:
    """x / (‖x‖ + 1e-8) in plain operations."""
    return x / (x.pow(2).sum(dim=dim, keepdim=True).sqrt() + 1e-8)


class PlainLoop(nn.Module):
    """The same scores, one text at a time against all images, as the equations are written."""

    def __init__(self, scorer: SimilarityScorer) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, images: Features, texts: Features) -> Tensor:
        """(N, M)."""
        columns = []
        for row in range(len(texts.values)):
            words = texts.values[row][texts.mask[row]]  # (1 + L, D)
            columns.append(self.column(images.values, words))
        return torch.stack(columns, dim=1)

    def column(self, images: Tensor, words: Tensor) -> Tensor:
        """Scores (N,) of one text."""
        front = self.scorer.vectors
        regions, wholes = images[:, 1:], images[:, 0]
        text = words[1:].repeat(len(images), 1, 1)  # (N, L, D)
        raw = F.leaky_relu(torch.bmm(regions, text.transpose(1, 2)), 0.1)  # (N, R, L)
        weights = torch.softmax(l2(raw, 2).transpose(1, 2) * front.sharpness, dim=-1)  # (N, L, R)
        context = l2(torch.bmm(weights, regions), -1)
        local = l2(front.local(torch.pow(context - text, 2)), -1)
        whole = l2(front.overall(torch.pow(wholes - words[0], 2)), -1)
        nodes = torch.cat([whole[:, None], local], dim=1)  # (N, 1 + L, K)
        if isinstance(self.scorer, SGR):
            for step in self.scorer.steps:
                edges = torch.softmax(torch.bmm(step.query(nodes), step.key(nodes).transpose(1, 2)), dim=-1)
                nodes = F.relu(step.mix(torch.bmm(edges, nodes)))
            return torch.sigmoid(self.scorer.score(nodes[:, 0])).squeeze(-1)
        assert isinstance(self.scorer, SAF)
        norm = self.scorer.norm
        raw = self.scorer.filter(nodes).squeeze(-1)
        if self.training:
            normal = F.batch_norm(raw[:, None], None, None, norm.weight, norm.bias, training=True)[:, 0]
        else:
            normal = F.batch_norm(raw[:, None], norm.running_mean, norm.running_var, norm.weight, norm.bias)[
                :, 0
            ]
        gate = torch.sigmoid(normal)
        share = gate / (gate.sum(-1, keepdim=True) + 1e-8)
        kept = l2((share[..., None] * nodes).sum(1), -1)
        return torch.sigmoid(self.scorer.score(kept)).squeeze(-1)


def sides(
    images: int, texts: int, dim: int, device: str, seed: int, matched: bool = False
) -> tuple[Features, Features, Tensor]:
    """Random unit features behind a global vector: 36 regions, 7 to 21 words, 14 on average; the image of each text.

    The words of a text are noisy copies of its image's regions; ``matched`` gives text i to image i.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    regions = F.normalize(normal(images, 37, dim), dim=-1)
    sizes = whole(7, 22, texts)
    owner = torch.arange(texts, device=device) % images if matched else whole(0, images, texts)
    seen = regions[owner[:, None], whole(1, 37, texts, 21)]
    words = torch.cat([regions[owner, :1], seen], 1) + NOISE * normal(texts, 22, dim) / dim**0.5
    mask = torch.arange(22, device=device) <= sizes[:, None]
    return Features.whole(regions), Features(F.normalize(words, dim=-1) * mask[..., None], mask), owner


def best_of(work: Callable[[], object], repeats: int, device: str) -> float:
    """Shortest of several runs, in seconds."""
    shortest = float("inf")
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


@torch.inference_mode()
def score(scorer: nn.Module, images: Features, texts: Features, precision: str = "no") -> Tensor:
    """(N, M)."""
    kind = images.values.device.type
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    with torch.autocast(kind, half, enabled=precision != "no"):
        scores: Tensor = scorer(images, texts)
    return scores


def agreement(found: Tensor, reference: Tensor, k: int = 10) -> float:
    """Share of queries, in both directions, whose k best are the same."""
    same = []
    for a, b in ((found, reference), (found.T, reference.T)):
        best = [x.topk(k, dim=1).indices.sort(dim=1).values for x in (a, b)]
        same.append((best[0] == best[1]).all(1).float())
    return float(torch.cat(same).mean())


def hinge(scores: Tensor, margin: float = 0.2) -> Tensor:
    """The hardest negative of each row and column, as SGRAF trains."""
    right = scores.diagonal()
    own = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    wrong = (margin + scores - right[:, None]).masked_fill(own, 0).relu().amax(1).mean()
    return wrong + (margin + scores - right[None]).masked_fill(own, 0).relu().amax(0).mean()


def learn(scorer: SimilarityScorer, steps: int, device: str) -> None:
    """Train a scorer on random matched pairs, so that its scores spread as those of a trained model do."""
    optimizer = torch.optim.Adam(scorer.parameters(), 5e-4)
    for seed in range(steps):
        images, texts, _ = sides(64, 64, scorer.dim, device, seed, matched=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = hinge(scorer.train()(images, texts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scorer.eval()


class Whole(nn.Module):
    """SGRAF with its encoders, from 36 regions of 2048 numbers and word ids, for the time of a training step."""

    def __init__(self, scorer: SimilarityScorer) -> None:
        super().__init__()
        self.image = SelfAttended(
            PrecomputedGrid(2048, scorer.dim, drop=0.0), VisualSelfAttention(scorer.dim)
        )
        self.text = SelfAttended(BiGRU(10_000, dim=scorer.dim, dropout=0.4), TextualSelfAttention(scorer.dim))
        self.scorer = scorer

    def forward(self, images: Features, texts: Features) -> Tensor:
        """(B, B)."""
        scores: Tensor = self.scorer(self.image(images), self.text(texts))
        return scores


def time_training(scorer: SimilarityScorer, batch: int, precision: str, graph: bool) -> tuple[float, float]:
    """Milliseconds of a step with encoders, loss, backward and Adam; peak memory in GB. ``graph`` replays it."""
    model = Whole(scorer).cuda().train()
    optimizer = torch.optim.Adam(model.parameters(), 2e-4, fused=True, capturable=True)
    sizes = torch.randint(7, 22, (batch,))
    mask = torch.arange(21) < sizes[:, None]
    texts = Features(torch.randint(4, 10_000, mask.shape) * mask, mask).to("cuda")
    images = Features.whole(torch.randn(batch, 36, 2048)).to("cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = hinge(model(images, texts))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.reset_peak_memory_stats()
    work: Callable[[], object] = step
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            step()
        work = captured.replay
    seconds = best_of(lambda: [work() for _ in range(10)], 3, "cuda") / 10
    return seconds * 1000, torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    """Check, time, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--steps", type=int, default=0, help="train the scorers so long on random pairs first"
    )
    args = parser.parse_args()
    device = args.device
    images, texts, _ = sides(args.images, args.texts, args.dim, device, 0)
    pairs = args.images * args.texts
    print(f"{args.images} images × {args.texts} texts, {torch.get_num_threads()} threads, {device}")
    print(
        f"{'scorer':<20}{'loop k pairs/s':>15}{'ours':>11}{'ratio':>8}{'difference':>12}{'same top 10':>13}"
    )
    few = Features(texts.values[:64], texts.mask[:64])
    for kind in (SGR, SAF):
        torch.manual_seed(0)
        ours = kind(args.dim).to(device)
        learn(ours, args.steps, device)
        ours.eval()
        plain = PlainLoop(ours).eval()
        score(plain, images, few)
        slow = (
            best_of(partial(score, plain, images, few), args.repeats, device) / len(few.values) * args.texts
        )
        reference = score(ours, images, texts)
        torch.testing.assert_close(
            reference[:, :64], score(plain, images, few), rtol=0, atol=1e-5 if device == "cpu" else 1e-4
        )
        for precision in ("no", "bf16", *(["fp16"] if device == "cuda" else [])):
            found = score(ours, images, texts, precision)
            fast = best_of(partial(score, ours, images, texts, precision), args.repeats, device)
            name = f"{ours.kind}, {'fp32' if precision == 'no' else precision}"
            print(
                f"{name:<20}{pairs / slow / 1e3:>15,.1f}{pairs / fast / 1e3:>11,.1f}{slow / fast:>7.1f}×"
                f"{(found - reference).abs().max():>12.1e}{agreement(found, reference):>12.1%}"
                f"  spread {float(reference.std()):.3f}"
            )
    if device == "cuda":
        for kind in (SGR, SAF):
            for precision, graph in (("bf16", True), ("bf16", False), ("no", False)):
                milliseconds, memory = time_training(kind(args.dim), 128, precision, graph)
                how = f"{'fp32' if precision == 'no' else precision}{', CUDA graph' * graph}"
                print(f"{kind.kind} training step, batch 128, {how}: {milliseconds:.1f} ms, {memory:.2f} GB")
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
