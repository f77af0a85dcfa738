"""CSQ's loss: each image's code drawn to the hash centre of its labels, each bit drawn to −1 or +1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from diptych.data.labels import checked_centres
from diptych.errors import DataError, SettingsError
from diptych.objectives.combine import On
from diptych.objectives.labels import TARGET
from diptych.objectives.objective import Objective
from diptych.types import Batch, Embeddings, Terms

VIEW = "hash"  # the view that a hash head makes


class CentralSimilarity(Objective):
    """Central similarity quantisation of ``embeddings.image``, codes h (B, K) within (−1, 1).

    ::

        L = mean_{b,k} BCE((h_bk + 1)/2, (c_bk + 1)/2) + λ · mean_{b,k} (|h_bk| − 1)²
        c_b = sign(Σ of the centres of the labels of b), with 0 → ties

    ============  =========================================================================================
    paper         argument
    ============  =========================================================================================
    centres       ``centres`` (C, K) of −1 and +1 (``data.hash_centres``); kept with the run
    fixed random  ``ties`` (K,) of −1 and +1
    λ = 0.05      ``quantisation``
    labels        ``batch.targets["labels"]`` (B, C) of zeros and ones
    ============  =========================================================================================

    An image without any label has no centre and no part in either term. Point it at the rows of a hash head with
    ``On``.
    """

    centres: Tensor
    ties: Tensor

    def __init__(self, centres: ArrayLike, ties: ArrayLike, quantisation: float = 0.05) -> None:
        super().__init__()
        if quantisation < 0:
            raise SettingsError(f"quantisation={quantisation} is negative: give 0 or more (0.05 in CSQ).")
        signs = checked_centres(centres, "centres")
        tied = checked_centres(np.asarray(ties)[None], "ties")[0]
        if len(tied) != signs.shape[1]:
            raise SettingsError(
                f"ties has {len(tied)} bits and the centres {signs.shape[1]}: they must agree."
            )
        self.quantisation = quantisation
        self.register_buffer("centres", torch.from_numpy(signs.astype(np.float32)))
        self.register_buffer("ties", torch.from_numpy(tied.astype(np.float32)))

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """The terms ``centre`` and ``quantisation``."""
        h = embeddings.image.float() if embeddings.image.dtype.itemsize < 4 else embeddings.image  # (B, K)
        labels = self._labels(batch, h)
        sums = labels @ self.centres.to(h.dtype)  # (B, K)
        centre = torch.where(sums == 0, self.ties.to(h.dtype), sums.sign())
        # BCE of a probability (h + 1)/2 with a target of 0 or 1, in one logarithm
        right = ((1 + centre * h) / 2).clamp_min(torch.finfo(h.dtype).tiny)
        labelled = labels.any(dim=1)[:, None].to(h.dtype)  # (B, 1)
        bits = (labelled.sum() * h.shape[1]).clamp_min(1)
        terms = {"centre": -(labelled * right.log()).sum() / bits}
        if self.quantisation:
            terms["quantisation"] = self.quantisation * (labelled * (h.abs() - 1) ** 2).sum() / bits
        return terms

    def _labels(self, batch: Batch, h: Tensor) -> Tensor:
        if TARGET not in batch.targets:
            raise DataError(
                f"hashing needs the labels of each image, and the batch has no '{TARGET}': give data with a label "
                "column, such as the lists train.txt, test.txt and database.txt."
            )
        labels = batch.targets[TARGET].to(h.dtype)
        if labels.shape != (len(h), len(self.centres)) or h.shape[1] != self.centres.shape[1]:
            raise DataError(
                f"labels {tuple(labels.shape)} and codes {tuple(h.shape)} do not fit {len(self.centres)} centres "
                f"of {self.centres.shape[1]} bits: train on the data the centres were made for."
            )
        return labels


def csq(branches: Mapping[str, Any], quantisation: float = 0.05) -> Objective:
    """CSQ's loss of the images' codes, at the centres of the model's hash head."""
    if VIEW not in branches:
        raise SettingsError("CSQ draws the codes of a hash head to centres: use the recipe cookie-hash.")
    head = branches[VIEW]
    return On(CentralSimilarity(head.centres, head.ties, quantisation), f"{VIEW}.image", f"{VIEW}.text")
