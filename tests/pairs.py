"""Pairs for the tests of objectives: random unit rows, and a batch that holds nothing but ids."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from diptych.types import Batch, Embeddings, Features


def batch_of(ids: list[int]) -> Batch:
    """A batch whose pair i shows the image ``ids[i]``."""
    nothing = Features.whole(torch.zeros(len(ids), 1, 1))
    return Batch(nothing, nothing, torch.tensor(ids), torch.arange(len(ids)))


def embeddings(count: int, seed: int = 0, dim: int = 8) -> Embeddings:
    """Random unit rows of both sides, in float64."""
    torch.manual_seed(seed)
    image, text = torch.randn(2, count, dim, dtype=torch.float64).unbind()
    return Embeddings(normalize(image), normalize(text))
