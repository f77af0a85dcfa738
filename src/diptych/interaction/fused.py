"""The similarity scorers on a GPU in half precision and without gradients: the plain operations as kernels.

``similarity_vectors`` stands for ``SimilarityVectors.forward``, ``reason_all`` for a step of SGR, ``answer`` for its
last step and the score. ``similarity.py`` and ``sgr.py`` are the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.interaction.similarity import EPS, Locals, SimilarityVectors, Weights, unit
from diptych.kernels import on_gpu

MOST_REGIONS, MOST_NODES = 64, 64  # of a kernel's tile
BLOCK = 64  # columns of D and of K that a kernel reads at a time


def fits(device: torch.device, regions: int, dim: int, nodes: int) -> bool:
    """Whether the kernels run on a device and tile these sizes."""
    return on_gpu(device) and regions <= MOST_REGIONS and dim % BLOCK == 0 and nodes in (64, 128, 256)


def similarity_vectors(
    vectors: SimilarityVectors, images: Locals, texts: Locals, weights: tuple[Weights, Weights]
) -> Tensor:
    """The nodes (n, m, 1 + W, K) of a tile, as ``SimilarityVectors`` computes them."""
    from diptych.kernels import pair_nodes

    (local, local_bias), overall = weights
    n, r, d = images.parts.shape
    m, words, _ = texts.parts.shape
    k = len(local)
    s, scale = vectors.affinities(images, texts)  # (m, W, n, R), (m, 1, n, R)
    assert images.gram is not None
    out = torch.empty(n, m, 1 + words, k, device=s.device, dtype=images.parts.dtype)
    out[:, :, 0] = unit(F.linear((images.whole[:, None] - texts.whole).square_(), *overall))
    pair_nodes.local_nodes(
        (
            s,
            scale,
            images.mask.contiguous(),
            images.parts.contiguous(),
            texts.parts,
            images.gram.contiguous(),
        ),
        (local.T.contiguous(), local_bias),
        out,
        (n, m, words, r, d, k),
        EPS,
    )
    return out


def reason_all(nodes: Tensor, mask: Tensor, step: Any) -> Tensor:
    """One step of reasoning over the nodes (n, m, P, K), with ``mask`` (m, P)."""
    from diptych.kernels import pair_nodes

    (folded, folded_bias), (mix, mix_bias) = step
    out = torch.empty_like(nodes)
    pair_nodes.reasoned(
        nodes, mask.contiguous(), (folded.T.contiguous(), folded_bias), (mix.T.contiguous(), mix_bias), out
    )
    return out


def answer(nodes: Tensor, mask: Tensor, step: Any, score: Weights) -> Tensor:
    """The last step for node 0 alone, and sigmoid(w · n_0 + b), (n, m) in float32."""
    from diptych.kernels import pair_nodes

    (folded, folded_bias), mix = step
    n, m, _, k = nodes.shape
    asked = F.linear(nodes[:, :, 0].reshape(n * m, k), folded, folded_bias)
    mixed = torch.empty_like(asked)
    pair_nodes.mixed_first(nodes, asked, mask.contiguous(), mixed)
    first = F.relu(F.linear(mixed, *mix))
    return torch.sigmoid(F.linear(first, *score).float()).view(n, m)
