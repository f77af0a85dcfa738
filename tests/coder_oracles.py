"""CODER's diversity and positive term as loops over Python floats, shared by the tests of its losses."""

from __future__ import annotations

import math

import torch

from diptych.ops import unit
from diptych.types import Embeddings


def made(b: int, d: int = 6, seed: int = 0, shift: float = 0.0) -> Embeddings:
    g = torch.Generator().manual_seed(seed)
    image = unit(torch.randn(b, d, generator=g, dtype=torch.float64) + shift)
    text = unit(image + 0.8 * torch.randn(b, d, generator=g, dtype=torch.float64))
    return Embeddings(image, text)


def diversity_loop(scores: list[list[float]], kind: str, epsilon: float) -> list[float]:
    """Eq. 3 and supp. Eq. 7 and 8, anchor by anchor, from lists of negative similarities."""
    div = []
    for row in scores:
        if kind == "none":
            div.append(1.0)
            continue
        mean = sum(row) / len(row) if row else 0.0
        if kind == "entropy":
            total = sum(math.exp(s) for s in row)
            width = -sum(math.exp(s) / total * math.log2(math.exp(s) / total) for s in row)
        elif kind == "std_supplement":
            width = math.sqrt(max(0.0, mean - mean**2))
        else:
            squares = sum(s**2 for s in row) / len(row) if row else 0.0
            width = math.sqrt(max(0.0, squares - mean**2))
        # 1 / (1 + e^-x) with x = ε / (SD + 1e-6)
        sigma = 1.0 / (1.0 + math.exp(-epsilon / (width + 1e-6)))
        div.append(sigma if kind == "std_reversed" else 1.0 / sigma)
    return [d / max(div) for d in div]


def positive_loop(s: float, how: str) -> float:
    return math.log(1.0 + {"clamp": max(s, -0.999), "relu": max(s, 0.0), "raw": s}[how])
