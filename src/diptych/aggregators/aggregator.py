"""What every aggregator offers: one vector for each set, and the width of that vector."""

from __future__ import annotations

from torch import Tensor, nn

from diptych.types import Features


class Aggregator(nn.Module):
    """A padded batch of sets, values (B, L, D) and mask (B, L) → vectors (B, ``dim_of(D)``), float32 or better."""

    def dim_of(self, encoder_dim: int) -> int:
        """Width of the pooled vector; the encoder's, unless a head of another width says its own."""
        return encoder_dim

    def forward(self, features: Features) -> Tensor:
        """(B, L, D) → (B, dim)."""
        raise NotImplementedError
