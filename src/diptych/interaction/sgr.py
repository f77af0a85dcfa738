"""SGR: similarity graph reasoning (Diao et al., AAAI 2021). Words and the whole pair reason about each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.errors import SettingsError
from diptych.interaction.fused import MOST_NODES, answer, reason_all
from diptych.interaction.similarity import Weights, cast, full_type
from diptych.interaction.similarity_scorer import SimilarityScorer
from diptych.ops import xavier_linear
from diptych.parts import part

Step = tuple[Weights, Weights]
"""The folded query and key, and the mixing layer, of one step of reasoning."""


class Reasoning(nn.Module):
    """One step over the nodes of a pair: N ← ReLU(W_r (softmax(W_q N (W_k N)ᵀ) N)), with weights of its own.

    The bias of W_k would add the same number to all edges of a row, which a softmax takes away: there is none.
    Since q_i · k_j = n_j · (W_kᵀ (W_q n_i + b_q)), one product with W_kᵀ W_q takes the place of two.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.query = xavier_linear(nodes, nodes)
        self.key = xavier_linear(nodes, nodes, bias=False)
        self.mix = xavier_linear(nodes, nodes)

    def weights(self, dtype: torch.dtype) -> Step:
        """W_kᵀ W_q (K, K) and W_kᵀ b_q (K,), multiplied in the type of the weights; W_r and its bias."""
        folded = self.key.weight.T @ self.query.weight, self.key.weight.T @ self.query.bias
        return (folded[0].to(dtype), folded[1].to(dtype)), cast(self.mix, dtype)


def reason(asking: Tensor, nodes: Tensor, mask: Tensor, step: Step) -> Tensor:
    """The nodes ``asking`` (…, Q, K) after one step over all ``nodes`` (…, P, K) with ``mask`` (…, P)."""
    folded, mix = step
    edges = F.linear(asking, *folded) @ nodes.transpose(-1, -2)  # (…, Q, P)
    if edges.is_cpu and not torch.is_grad_enabled():  # fewer passes: its softmax sums in float32 in any case
        if not bool(mask.all()):
            edges.masked_fill_(~mask[..., None, :], torch.finfo(edges.dtype).min)
        return F.linear(torch.softmax(edges, dim=-1) @ nodes, *mix).relu_()
    edges = edges.to(full_type(edges)).masked_fill(~mask[..., None, :], torch.finfo(edges.dtype).min)
    return F.relu(F.linear(torch.softmax(edges, dim=-1).to(nodes.dtype) @ nodes, *mix))


@part
class SGR(SimilarityScorer):
    """Similarity graph reasoning: three steps over the graph of a pair's similarity vectors.

    ::

        N ← ReLU(W_r (softmax(W_q N (W_k N)ᵀ) N))       three times, each with its own weights
        score = sigmoid(w · n_0 + b)

    ===================  ==================================================================================
    paper                argument
    ===================  ==================================================================================
    N (1 + W, K)         ``SimilarityVectors``: node 0 is the whole pair, the others are words
    steps                ``steps``, 3
    K                    ``nodes``, 256
    λ of the attention   ``sharpness``, 9
    ===================  ==================================================================================

    Shapes: images (N, 1 + R, D), texts (M, 1 + W, D), the global vector first → (N, M). The last step computes
    node 0 alone, which is all the score reads.
    """

    kind = "sgr"

    def __init__(self, dim: int = 1024, nodes: int = 256, steps: int = 3, sharpness: float = 9.0) -> None:
        super().__init__(dim, nodes, sharpness)
        if steps < 1:
            raise SettingsError(f"SGR reasons in {steps} steps: give 1 or more (the paper uses 3).")
        self.steps = nn.ModuleList(Reasoning(nodes) for _ in range(steps))
        self.score = xavier_linear(nodes, 1)

    def weights(self, dtype: torch.dtype) -> tuple[list[Step], Weights]:
        """The steps, and the layer of the score."""
        steps = [step.weights(dtype) for step in self.steps if isinstance(step, Reasoning)]
        return steps, cast(self.score, dtype)

    def read(self, nodes: Tensor, mask: Tensor, weights: tuple[list[Step], Weights]) -> tuple[Tensor, ...]:
        """(n, m)."""
        (*steps, last), score = weights
        for step in steps:
            nodes = reason(nodes, nodes, mask, step)
        first = reason(nodes[:, :, :1].contiguous(), nodes, mask, last)[:, :, 0]  # (n, m, K)
        raw = F.linear(first, *score).squeeze(-1)
        return (torch.sigmoid(raw.to(full_type(raw))),)

    def read_fused(
        self, nodes: Tensor, mask: Tensor, weights: tuple[list[Step], Weights]
    ) -> tuple[Tensor, ...]:
        """``read``, a kernel per step."""
        if mask.shape[1] > MOST_NODES:
            return self.read(nodes, mask, weights)
        (*steps, last), score = weights
        for step in steps:
            nodes = reason_all(nodes, mask, step)
        return (answer(nodes, mask, last, score),)
