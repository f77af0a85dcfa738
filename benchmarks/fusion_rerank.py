"""Re-ranking by a fusion encoder against the published loop: one query at a time, both directions, nothing shared.

Run: ``python benchmarks/fusion_rerank.py`` (half a minute on two cores). Both judge the candidates of the same
model, in one process; the scores must agree before a ratio is printed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from sys import path

import torch
from torch import Tensor

path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.interaction.fusion import Fusion
from diptych.model.reranking import OUTSIDE, RerankedScores
from diptych.model.scores import EmbeddingScores, PairScores
from diptych.types import Features, Ragged


def published_loop(model: Fusion, quick: EmbeddingScores, images: Ragged, texts: Ragged, k: int) -> Tensor:
    """Per query k pairs, keys and values of the image computed for each of them, texts padded to the longest."""
    n, m = quick.shape
    scores, out = quick.tile(slice(None), slice(None)), torch.full(quick.shape, OUTSIDE)
    longest = int((texts.bounds[1:] - texts.bounds[:-1]).max())
    words = texts.take(torch.arange(m))
    assert words.mask.shape[1] == longest
    queries = [(torch.full((k,), i), scores[i].topk(k).indices) for i in range(n)]
    queries += [(scores[:, j].topk(k).indices, torch.full((k,), j)) for j in range(m)]
    for rows, columns in queries:
        seen = images.take(rows)
        beside = Features(words.values[columns][:, None], words.mask[columns][:, None])
        out[rows, columns] = model.logits(model.look(seen), seen.mask, beside)[:, 0, 1]
    return out


def collection(count: int, dim: int, sizes: Tensor) -> Ragged:
    """Random tokens, as float16."""
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    return Ragged.join([Features(torch.randn(count, mask.shape[1], dim), mask)])


def main() -> None:
    """Print pairs per second of both, and the ratio of the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=197, help="of an image")
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("-k", type=int, default=8)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Fusion(given.dim, given.dim, layers=given.layers, heads=8).eval()
    images = collection(given.images, given.dim, torch.full((given.images,), given.tokens))
    texts = collection(given.texts, given.dim, torch.randint(8, 30, (given.texts,)))
    quick = EmbeddingScores(torch.randn(given.images, 64), torch.randn(given.texts, 64))
    with torch.inference_mode():
        start = time.perf_counter()
        expected = published_loop(model, quick, images, texts, given.k)
        loop = time.perf_counter() - start
    start = time.perf_counter()
    reranked = RerankedScores(quick, PairScores(model, images, texts, torch.device("cpu")), given.k)
    found = reranked.tile(slice(None), slice(None))
    ours = time.perf_counter() - start
    assert torch.equal(found > OUTSIDE, expected > OUTSIDE), "other candidates"
    assert torch.allclose(found, expected, atol=1e-4), "other scores"
    judged, asked = int((found > OUTSIDE).sum()), (given.images + given.texts) * given.k
    print(f"published loop   {loop:7.2f} s   {asked} pairs judged")
    print(f"here             {ours:7.2f} s   {judged} pairs judged, image keys and values once each")
    print(f"ratio            {loop / ours:7.1f}")


if __name__ == "__main__":
    main()
