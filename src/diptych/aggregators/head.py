"""A head on the pooled vector of an encoder: the cross-modal head of CUSA, the contrastive projection of X2-VLM."""

from __future__ import annotations

from torch import Tensor, nn

from diptych.aggregators.aggregator import Aggregator
from diptych.aggregators.pooling import First
from diptych.parts import part
from diptych.types import Features

STD = 0.02  # standard deviation of a head's weights


def make_head(input_dim: int, dim: int, norm: bool) -> nn.Sequential:
    """Linear(input_dim → dim), with ``norm`` a LayerNorm before it; weights ~ N(0, 0.02²), no activation."""
    linear = nn.Linear(input_dim, dim)
    nn.init.normal_(linear.weight, std=STD)
    return nn.Sequential(*([nn.LayerNorm(input_dim)] if norm else []), linear)


@part
class Head(Aggregator):
    """The first element of a set → LayerNorm (with ``norm``) → Linear: (B, L, input_dim) → (B, dim).

    The first element is the pooled vector f of a dual encoder (CUSA on CLIP: ``norm``, dim = input_dim), or the class
    token of a transformer (X2-VLM: no norm, 768 → 256).
    """

    def __init__(self, input_dim: int, dim: int, norm: bool = True) -> None:
        super().__init__()
        self.dim, self.first = dim, First()
        self.head = make_head(input_dim, dim, norm)

    def dim_of(self, encoder_dim: int) -> int:
        """The head's own width."""
        return self.dim

    def forward(self, features: Features) -> Tensor:
        """(B, L, input_dim) → (B, dim)."""
        weight = self.head[-1].weight
        out: Tensor = self.head(self.first(features).to(weight.dtype))
        return out
