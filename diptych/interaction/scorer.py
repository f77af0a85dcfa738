"""What a pair scorer is: a score for every image and text, from the local features of both."""

from __future__ import annotations

from torch import Tensor, nn

from diptych.types import Features


class PairScorer(nn.Module):
    """Scores every image against every text by looking at their local features together.

    ``kind`` names the scorer in the card of a report. Tiles, buckets of lengths and chunks of memory are the
    scorer's own business: a caller hands over as many images and texts as it has in memory.
    """

    kind: str

    def forward(self, images: Features, texts: Features) -> Tensor:
        """Local features (N, R, D) and (M, W, D), as the towers' encoders give them → scores (N, M), float32."""
        raise NotImplementedError
