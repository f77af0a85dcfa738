"""What a pair scorer is: a score for every image and text, from the local features of both."""

from __future__ import annotations

from torch import Tensor, nn

from diptych.types import Batch, Embeddings, Features, Matches


class PairScorer(nn.Module):
    """Scores every image against every text by looking at their local features together.

    ``kind`` names the scorer in the card of a report. Tiles, buckets of lengths and chunks of memory are the
    scorer's own business: a caller hands over as many images and texts as it has in memory.
    """

    kind: str
    candidates: int | None = None
    """None: every pair is scored. A number: the towers propose that many items for each query, and the scorer judges
    them; in training it compares chosen pairs of a batch (``compare``) instead of scoring all of them."""

    refines = False
    """Whether ``pairs`` scores single pairs in float32, so that the best of a matrix in half precision are refined."""

    def pairs(self, images: Features, texts: Features) -> Tensor:
        """Scores (P,) of image p with text p, in float32, without gradients."""
        raise NotImplementedError

    def compare(self, seen: Embeddings, batch: Batch) -> Matches:
        """What a scorer of candidates makes of a batch in training."""
        raise NotImplementedError

    def forward(self, images: Features, texts: Features) -> Tensor:
        """Local features (N, R, D) and (M, W, D), as the towers' encoders give them → scores (N, M), float32."""
        raise NotImplementedError
