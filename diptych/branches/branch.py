"""What a branch is: a second view of both sides, mixed into the score."""

from __future__ import annotations

from torch import Tensor, nn

from diptych.types import Embeddings, Features


class Branch(nn.Module):
    """A second view of both sides, mixed into the score: S = (1 − weight)·S + weight·S_branch.

    Each method maps the tower's vector (B, D) and local features to the branch's unit vector (B, D').
    """

    weight: float
    dim: int

    def image(self, vector: Tensor, features: Features) -> Tensor:
        """The image side of the branch."""
        raise NotImplementedError

    def text(self, vector: Tensor, features: Features) -> Tensor:
        """The text side of the branch."""
        raise NotImplementedError

    def forward(
        self, image: Tensor, image_features: Features, text: Tensor, text_features: Features
    ) -> Embeddings:
        """Both sides of a training step; a branch that shares work between them overrides it."""
        return Embeddings(self.image(image, image_features), self.text(text, text_features))
