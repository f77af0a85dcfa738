"""The shared vocabulary of the package, and the letters its shape comments use.

Shape letters, defined once:

=====  ==========================================================
``B``  image-text pairs in a batch
``R``  regions or grid cells of an image
``W``  tokens of a text (specials included)
``L``  either of the two: the length of a padded set
``D``  the joint dimension
``N``  images in a collection
``M``  texts in a collection
``K``  entries of a queue, clusters, or the k of top-k
=====  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """A padded batch of sets: regions, grid cells, video frames, or words.

    ``values`` is (B, L, D) for vectors and (B, L) for token ids; ``mask`` is (B, L), True where valid.
    Values at invalid positions are arbitrary and must never reach a result.
    """

    values: Tensor
    mask: Tensor

    @property
    def sizes(self) -> Tensor:
        """Valid elements of each set, (B,) int64."""
        return self.mask.sum(dim=1)

    @property
    def is_ids(self) -> bool:
        """Whether the elements are token ids rather than vectors."""
        return self.values.dim() == 2

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Features:
        """The same sets on another device."""
        return self.map(lambda t: t.to(device, non_blocking=non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> Features:
        """Apply ``change`` to both tensors (a move, a slice, a pin)."""
        return Features(change(self.values), change(self.mask))

    @staticmethod
    def whole(values: Tensor) -> Features:
        """Sets of equal size: every position is valid."""
        return Features(values, torch.ones(values.shape[:2], dtype=torch.bool, device=values.device))


Inputs = Features | Tensor
"""What an encoder reads: sets (regions, frames, token ids) or pixels (B, 3, H, W)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Row i of both sides is one matched pair; equal ``image_ids`` are texts of one image.

    ``image_ids`` and ``text_ids`` are row numbers in the ``Captions`` the batch came from. ``targets`` holds what
    an objective may need beside the pair: class labels, the vectors of a uni-modal teacher.
    """

    images: Inputs
    texts: Features
    image_ids: Tensor  # (B,) int64
    text_ids: Tensor  # (B,) int64
    targets: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.image_ids)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``change`` to every tensor (a move to a device, a pin, a slice of rows)."""
        images = self.images.map(change) if isinstance(self.images, Features) else change(self.images)
        targets = {name: change(value) for name, value in self.targets.items()}
        return Batch(images, self.texts.map(change), change(self.image_ids), change(self.text_ids), targets)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return self.map(lambda t: t.to(device, non_blocking=non_blocking))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Unit rows of both sides, (B, D) each, and what else the towers saw on the way.

    ``branches`` are further views of the same rows through other heads (a concept branch, uni-modal heads, an
    augmented pass), by name. ``teacher`` is the momentum twin's view of the same batch, without gradient.
    ``image_features`` and ``text_features`` are the projected local features a pair scorer reads.
    """

    image: Tensor
    text: Tensor
    image_features: Features | None = None
    text_features: Features | None = None
    branches: Mapping[str, Embeddings] = field(default_factory=dict)
    teacher: Embeddings | None = None

    def __len__(self) -> int:
        return len(self.image)


Terms = dict[str, Tensor]
"""Named, weighted scalars; the loss is their sum."""
