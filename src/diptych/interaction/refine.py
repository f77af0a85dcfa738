"""Scores in half precision, with the best of every query computed again in float32."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from diptych.types import Features

SPARE = 6  # candidates beyond k: more than rounding moves a pair in a ranking
CPU_CHUNK, GPU_CHUNK = 64, 2048  # pairs scored at once; on a CPU what its caches hold


class MatchedScorer(Protocol):
    """A pair scorer that also scores row p of one side with row p of the other."""

    def pairs(self, images: Features, texts: Features) -> Tensor:
        """(P,) in float32."""
        ...


def pairs_at_once(device: torch.device) -> int:
    """How many matched pairs a device scores at a time."""
    return CPU_CHUNK if device.type == "cpu" else GPU_CHUNK


@torch.no_grad()
def refine(scorer: MatchedScorer, images: Features, texts: Features, scores: Tensor, k: int = 10) -> Tensor:
    """``scores`` (N, M) with the k + 6 best pairs of every image and of every text computed again, in place.

    Half precision moves scores by less than 1e-3, enough to swap neighbours in a ranking; afterwards the k best
    of a query are those of float32.
    """
    n, m = scores.shape
    rows = scores.topk(min(m, k + SPARE), dim=1).indices  # (N, ≤ m)
    columns = scores.topk(min(n, k + SPARE), dim=0).indices.T  # (M, ≤ n)
    of_images = torch.arange(n, device=scores.device)[:, None] * m + rows
    of_texts = columns * m + torch.arange(m, device=scores.device)[:, None]
    chosen = torch.unique(torch.cat([of_images.flatten(), of_texts.flatten()]))
    # texts of one length side by side: little padding in a chunk
    sizes = texts.sizes[chosen % m]
    chosen, sizes = chosen[sizes.argsort(stable=True)], sizes.sort().values
    chunk = pairs_at_once(scores.device)
    longest = sizes[chunk - 1 :: chunk].tolist() + sizes[-1:].tolist()
    for part, words in zip(chosen.split(chunk), longest, strict=False):
        image, text = part // m, part % m
        several = Features(texts.values[text, :words], texts.mask[text, :words])
        found = scorer.pairs(Features(images.values[image], images.mask[image]), several)
        scores[image, text] = found.to(scores.dtype)
    return scores
