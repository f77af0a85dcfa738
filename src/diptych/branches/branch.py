"""What a branch is: a second view of both sides, in the score or beside it."""

from __future__ import annotations

from torch import Tensor, nn

from diptych.types import Batch, Embeddings, Features


class Branch(nn.Module):
    """A second view of both sides, mixed into the score: S = (1 − weight)·S + weight·S_branch.

    Each method maps the tower's vector (B, D) and local features to the branch's unit vector (B, ``dim``). A branch
    of weight 0 is a view beside the score: it is seen in training and by ``encode_image(…, view=name)``, and changes
    neither the vectors nor the score of the model.
    """

    weight: float = 0.0
    dim: int

    @property
    def text_dim(self) -> int:
        """Length of a text's vector, where a view beside the score gives its sides different ones."""
        return self.dim

    def image(self, vector: Tensor, features: Features) -> Tensor:
        """The image side of the branch."""
        raise NotImplementedError

    def text(self, vector: Tensor, features: Features) -> Tensor:
        """The text side of the branch."""
        raise NotImplementedError

    def forward(self, seen: Embeddings, batch: Batch) -> Embeddings:
        """Both sides of a training step; a branch that shares work between them, or looks at more, overrides it."""
        assert seen.image_features is not None
        assert seen.text_features is not None
        return Embeddings(
            self.image(seen.image, seen.image_features), self.text(seen.text, seen.text_features)
        )
