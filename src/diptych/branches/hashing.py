"""The hash head: a further view of each side whose signs are binary codes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from diptych import ops
from diptych.aggregators.sorting import at_least_float32
from diptych.branches.branch import Branch
from diptych.data.labels import Signs, checked_bits, checked_centres, hash_centres, tie_vector
from diptych.errors import SettingsError
from diptych.parts import part
from diptych.types import Features


@part
class HashHead(Branch):
    """Codes h = tanh(W₃ ReLU(W₂ drop(ReLU(W₁ z)))) within (−1, 1)^K; the bits are h ≥ 0.

    ==================  ====================================================================================
    z (B, D)            the mean of a side's local features (MEAN pooling), not normalised
    W₁, W₂ (D, D)       ``layers``
    W₃ (K, D)           ``layers``, K = ``bits``
    dropout 0.5         ``dropout``, after the first ReLU
    centres (C, K)      ``centres``, made for ``classes`` with ``seed``; they travel with the model
    ==================  ====================================================================================

    One head serves both sides: with a shared encoder their features lie in one space, and a text gets a code as well.
    Its weight in the score is 0: it changes neither the vectors nor the score of the model.
    """

    weight = 0.0
    centres: Tensor
    ties: Tensor

    def __init__(
        self, dim: int = 1024, bits: int = 64, classes: int = 1, dropout: float = 0.5, seed: int = 0
    ) -> None:
        super().__init__()
        if dim < 1 or not 0 <= dropout < 1:
            raise SettingsError(
                f"a hash head needs dim ≥ 1 and 0 ≤ dropout < 1, not dim={dim} and dropout={dropout}."
            )
        self.dim = self.bits = checked_bits(bits)
        self.layers = nn.Sequential(
            nn.Linear(dim, dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(dim, dim),
            nn.ReLU(),
            nn.Linear(dim, bits),
            nn.Tanh(),
        )
        self.register_buffer("centres", torch.from_numpy(hash_centres(classes, bits, seed)))
        self.register_buffer("ties", torch.from_numpy(tie_vector(bits, seed)))

    def use_centres(self, centres: Signs) -> None:
        """Take centres from elsewhere (CSQ's files) in the place of the made ones; a file may hold more classes."""
        signs = checked_centres(centres, "the file of hash centres")
        classes, bits = self.centres.shape
        if len(signs) < classes or signs.shape[1] != bits:
            raise SettingsError(
                f"the hash centres are of {signs.shape[0]} classes and {signs.shape[1]} bits, but "
                f"{self.centres.shape[0]} classes and {self.centres.shape[1]} bits are needed: choose the file for "
                "these, or leave it out."
            )
        self.centres.copy_(torch.from_numpy(np.ascontiguousarray(signs[:classes])))

    def image(self, vector: Tensor, features: Features) -> Tensor:
        """h (B, K) of images."""
        return self._codes(features)

    def text(self, vector: Tensor, features: Features) -> Tensor:
        """h (B, K) of texts."""
        return self._codes(features)

    def _codes(self, features: Features) -> Tensor:
        pooled = ops.masked_mean(at_least_float32(features.values), features.mask)
        codes: Tensor = self.layers(pooled)
        return codes
