"""SAF: similarity attention filtration (Diao et al., AAAI 2021). Words that say nothing are filtered out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.encoders.regions import RunningNorm
from diptych.interaction.similarity import EPS, Weights, cast, full_type, unit
from diptych.interaction.similarity_scorer import SimilarityScorer
from diptych.ops import xavier_linear
from diptych.parts import part


class TextNorm(RunningNorm):
    """One-channel BatchNorm with the statistics of each text, as if texts were scored one at a time.

    The published code scores a text against all images in one call, so its BatchNorm sees images × nodes of that
    text, and its running statistics move once per text. Here all texts go through together: the statistics keep
    the text axis, and M updates r ← (1 − momentum) r + momentum · x are folded into one, exactly:
    r ← (1 − momentum)^M r + Σ_i momentum (1 − momentum)^(M−1−i) x_i. Names are those of ``nn.BatchNorm1d(1)``.
    """

    def __init__(self, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(1, eps, momentum)

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
        self.norm = TextNorm()
        self.score = xavier_linear(nodes, 1)

    def weights(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        """The layers of the gate and of the score."""
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
        """Fold the statistics of all texts into the running ones."""
        mean, var = statistics
        self.norm.fold(mean, var)
