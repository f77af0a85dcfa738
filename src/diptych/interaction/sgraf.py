"""SGR and SAF (Diao et al., AAAI 2021): words and the whole pair reason about each other, or words are filtered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.encoders.regions import RunningNorm
from diptych.errors import at_least
from diptych.interaction.similarity import EPS, MOST_NODES, Weights, answer, cast, full_type, reason_all, unit
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
        count = at_least(steps, "the number of SGR's steps", 1)
        self.steps = nn.ModuleList(Reasoning(nodes) for _ in range(count))
        self.score = xavier_linear(nodes, 1)

    def weights(self, dtype: torch.dtype) -> tuple[list[Step], Weights]:
        steps = [step.weights(dtype) for step in self.steps if isinstance(step, Reasoning)]
        return steps, cast(self.score, dtype)

    def read(self, nodes: Tensor, mask: Tensor, weights: tuple[list[Step], Weights]) -> tuple[Tensor, ...]:
        (*steps, last), score = weights
        for step in steps:
            nodes = reason(nodes, nodes, mask, step)
        first = reason(nodes[:, :, :1].contiguous(), nodes, mask, last)[:, :, 0]  # (n, m, K)
        raw = F.linear(first, *score).squeeze(-1)
        return (torch.sigmoid(raw.to(full_type(raw))),)

    def read_fused(
        self, nodes: Tensor, mask: Tensor, weights: tuple[list[Step], Weights]
    ) -> tuple[Tensor, ...]:
        if mask.shape[1] > MOST_NODES:
            return self.read(nodes, mask, weights)
        (*steps, last), score = weights
        for step in steps:
            nodes = reason_all(nodes, mask, step)
        return (answer(nodes, mask, last, score),)


class TextNorm(RunningNorm):
    """One-channel BatchNorm with the statistics of each text, as if texts were scored one at a time.

    The published code scores a text against all images in one call, so its BatchNorm sees images × nodes of that
    text, and its running statistics move once per text. Here all texts go through together: the statistics keep
    the text axis, and M updates r ← (1 − momentum) r + momentum · x are folded into one, exactly:
    r ← (1 − momentum)^M r + Σ_i momentum (1 − momentum)^(M−1−i) x_i. Names are those of ``nn.BatchNorm1d(1)``.
    """

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, m, P) with ``mask`` (m, P) → normalised; mean and unbiased variance (m,) of each text."""
        if not self.training:
            mean, var = self.running_mean.expand(x.shape[1]), self.running_var.expand(x.shape[1])
            return self._scaled(x, mean, var), mean, var
        count = (mask.sum(1) * x.shape[0]).to(x.dtype)  # (m,)
        mean = (x * mask).sum((0, 2)) / count
        var = ((x - mean[:, None]) * mask).square().sum((0, 2)) / count
        unbiased = var * (count / (count - 1).clamp_min(1))
        return self._scaled(x, mean, var), mean.detach(), unbiased.detach()

    @torch.no_grad()
    def fold(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics by those of M texts (M,), in their order."""
        count = len(mean)
        age = torch.arange(count - 1, -1, -1, device=mean.device, dtype=torch.float64)
        share = self.momentum * (1 - self.momentum) ** age
        for running, seen in ((self.running_mean, mean), (self.running_var, var)):
            running.mul_((1 - self.momentum) ** count).add_((share * seen.double()).sum().to(running.dtype))
        self.num_batches_tracked += count

    def _scaled(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return (x - mean[:, None]) * (self.weight * torch.rsqrt(var + self.eps))[:, None] + self.bias


@part
class SAF(SimilarityScorer):
    """Similarity attention filtration: a gate weighs each similarity vector of a pair.

    ::

        γ_p   = sigmoid(BN(w_f · n_p + b_f))
        f     = unit(Σ_p γ_p / (Σ γ + 1e-8) · n_p)
        score = sigmoid(w · f + b)

    ===================  ==================================================================================
    paper                argument
    ===================  ==================================================================================
    n_p (1 + W, K)       ``SimilarityVectors``: the whole pair and its words
    K                    ``nodes``, 256
    λ of the attention   ``sharpness``, 9
    BN                   ``TextNorm``: while training, the statistics of each text over all images
    ===================  ==================================================================================

    Shapes: images (N, 1 + R, D), texts (M, 1 + W, D), the global vector first → (N, M).
    """

    kind = "saf"

    def __init__(self, dim: int = 1024, nodes: int = 256, sharpness: float = 9.0) -> None:
        super().__init__(dim, nodes, sharpness)
        self.filter = xavier_linear(nodes, 1)
        self.norm = TextNorm(1)
        self.score = xavier_linear(nodes, 1)

    def weights(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        return cast(self.filter, dtype), cast(self.score, dtype)

    def read(self, nodes: Tensor, mask: Tensor, weights: tuple[Weights, Weights]) -> tuple[Tensor, ...]:
        """(n, m), and the mean and variance (m,) that each text saw."""
        filtering, score = weights
        raw = F.linear(nodes, *filtering).squeeze(-1)  # (n, m, P)
        normal, mean, var = self.norm(raw.to(full_type(raw)), mask)
        gate = torch.sigmoid(normal) * mask
        shares = gate / (gate.sum(-1, keepdim=True) + EPS)
        kept = unit((shares.to(nodes.dtype)[:, :, None] @ nodes).squeeze(2))  # (n, m, K)
        logit = F.linear(kept, *score).squeeze(-1)
        return torch.sigmoid(logit.to(full_type(logit))), mean, var

    def keep(self, statistics: tuple[Tensor, ...]) -> None:
        mean, var = statistics
        self.norm.fold(mean, var)
