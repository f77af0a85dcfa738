"""Objectives of label-wise retrieval: label loss, consistency, DSCMR, masked prediction, and the alternating schedule.

All read ``batch.targets["labels"]`` Y (B, C), zeros and ones: row i holds the labels of image i and of text i.

CSQ's loss: each image's code drawn to the hash centre of its labels, each bit drawn to −1 or +1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from diptych import ops
from diptych.data.labels import checked_centres
from diptych.errors import DataError, SettingsError, at_least, one_of
from diptych.objectives.combine import On
from diptych.objectives.objective import Combined, Objective
from diptych.types import Batch, Embeddings, Terms

TARGET = "labels"
Side = Literal["image", "text"]
SIDES: tuple[Side, ...] = get_args(Side)
Relation = Literal["shared", "counts"]
Kind = Literal["logistic", "bce"]


class OfView(Objective):
    """An objective over the rows of a view and the labels of each image."""

    view: str

    @property
    def needs(self) -> tuple[str, ...]:
        return self.view, TARGET


class LabelLoss(OfView):
    """ℓ_label = (1/2B) Σ_n log(1 + exp(−y_nᵀ p_n)), n over the images and the texts of a batch.

    =========  ==================================================================================================
    p_n        rows (B, C) of the view ``view``: ``LabelHead``'s prediction, not normalised
    y_n        ``batch.targets["labels"]``
    =========  ==================================================================================================

    Only positives appear; the unit norm of each token's prediction pushes the others down. ``kind="bce"`` is the mean
    binary cross-entropy over all cells instead, on the mean of the sigmoids (``unit_tokens=False``). The terms
    ``image`` and ``text`` add up to the loss; ``sides`` leaves one of them out.
    """

    def __init__(
        self,
        kind: Kind = "logistic",
        view: str = "labels",
        sides: Sequence[Side] = SIDES,
    ) -> None:
        super().__init__()
        self.kind, self.view, self.sides = one_of(kind, "the label loss", Kind), view, tuple(sides)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        seen = embeddings.view(self.view)
        return {side: self._loss(getattr(seen, side), batch) / len(SIDES) for side in self.sides}

    def _loss(self, p: Tensor, batch: Batch) -> Tensor:
        p = ops.at_least_float32(p)
        y = labels_of(batch, p)
        if self.kind == "logistic":
            return F.softplus(-(y * p).sum(dim=1)).mean()
        tiny = torch.finfo(p.dtype).eps  # a sigmoid may round to 0 or 1
        p = p.clamp(tiny, 1 - tiny)
        return -(y * p.log() + (1 - y) * torch.log1p(-p)).mean()


class Consistency(OfView):
    """ℓ_con = NLL(f_I, f_I) + NLL(f_I, f_T) + NLL(f_T, f_T), the consistency loss of Eq. 2.

    ::

        NLL(F, G) = mean_ij [log(1 + exp(Θ_ij)) − S_ij Θ_ij],   Θ_ij = ½ cos(F_i, G_j)

    =========  ==================================================================================================
    f_I, f_T   rows (B, D) of the view ``view``: the token means before the shared encoder
    S          1 where two items share a label (``relation="shared"``), or their number (``"counts"``, as in the
               authors' code and DSCMR)
    η          the weight of this objective in a ``Sum``, 0.1
    =========  ==================================================================================================
    """

    def __init__(self, view: str = "front", relation: Relation = "shared") -> None:
        super().__init__()
        self.view, self.relation = view, one_of(relation, "relation", Relation)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        seen = embeddings.view(self.view)
        return {
            "consistency": consistency(seen.image, seen.text, relations(batch, seen.image, self.relation))
        }


class DSCMR(Objective):
    """Deep supervised cross-modal retrieval (Zhen et al., CVPR 2019).

    ::

        L = mean_i ‖p^I_i − y_i‖ + mean_i ‖p^T_i − y_i‖ + α ℓ_con(u, v) + β mean_i ‖u_i − v_i‖

    =============  ==============================================================================================
    p^I, p^T       rows (B, C) of the view ``labels``: linear scores
    u, v           rows (B, D) of the view ``common``: the common space, not normalised
    α = 1e-3       ``discrimination``, weight of the three NLL terms of ``Consistency``
    β = 1e-1       ``invariance``
    S              the number of shared labels (``relation="counts"``)
    =============  ==============================================================================================

    Norms are not squared.
    """

    def __init__(
        self, discrimination: float = 1e-3, invariance: float = 1e-1, relation: Relation = "counts"
    ) -> None:
        super().__init__()
        self.discrimination = at_least(discrimination, "the weight of DSCMR's discrimination loss", 0)
        self.invariance = at_least(invariance, "the weight of DSCMR's invariance loss", 0)
        self.relation = one_of(relation, "relation", Relation)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        predicted, common = embeddings.view("labels"), embeddings.view("common")
        y = labels_of(batch, predicted.image)
        s = relations(batch, common.image, self.relation)
        return {
            "image": _lengths(predicted.image - y).mean(),
            "text": _lengths(predicted.text - y).mean(),
            "discrimination": self.discrimination * consistency(common.image, common.text, s),
            "invariance": self.invariance * _lengths(common.image - common.text).mean(),
        }


class MaskedPrediction(OfView):
    """λ (ℓ_word + ℓ_object) of Eq. 6: the mean cross-entropy of the masked words, and of the masked regions.

    =========  ==================================================================================================
    λ          ``weight``; the supplement: 0.01 on COCO, 0.1 on FLICKR25K and NUS-WIDE
    ℓ_word     from the view ``context``, rows (B, 2) of ``ContextPrediction``: summed loss and number of masked
    ℓ_object   tokens of each item
    =========  ==================================================================================================

    A batch without a masked token of one side has 0 there.
    """

    def __init__(self, weight: float = 0.1, view: str = "context", sides: Sequence[Side] = SIDES) -> None:
        super().__init__()
        self.weight = at_least(weight, "λ, the weight of masked prediction,", 0)
        self.view, self.sides = view, tuple(sides)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        seen = embeddings.view(self.view)
        named = {"image": ("object", seen.image), "text": ("word", seen.text)}
        terms = {}
        for side in self.sides:
            name, rows = named[side]
            loss, count = rows.sum(dim=0)
            terms[name] = self.weight * loss / count.clamp_min(1)
        return terms


class Alternate(Combined):
    """One objective in even steps, another in odd ones (``schedule=alternate``: an image step, then a text step).

    Parameters that only the other modality uses get no gradient in a step, and Adam leaves them alone. Whose turn it
    is belongs to the checkpoint.
    """

    takes_turns = True
    steps: Tensor

    def __init__(self, even: Objective, odd: Objective) -> None:
        super().__init__()
        self.even, self.odd = even, odd
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.odd_turn = False  # the parity of ``steps``, without asking the device

    @property
    def current(self) -> Objective:
        return self.odd if self.odd_turn else self.even

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        return self.current(embeddings, batch)

    def participants(self, embeddings: Embeddings) -> Iterable[tuple[Objective, Embeddings]]:
        return [(self.current, embeddings)]

    def start_epoch(self, epoch: int) -> None:
        """A resumed run reads its turn from the checkpoint."""
        self.odd_turn = bool(self.steps % 2)

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        self.odd_turn = not self.odd_turn
        self.steps += 1


def consistency(f: Tensor, g: Tensor, s: Tensor) -> Tensor:
    """NLL(f, f) + NLL(f, g) + NLL(g, g) of rows (B, D) with relations (B, B)."""
    f, g = (ops.unit(ops.at_least_float32(rows)) for rows in (f, g))

    def nll(a: Tensor, b: Tensor) -> Tensor:
        theta = ops.cosine_scores(a, b) / 2  # (B, B)
        return (F.softplus(theta) - s * theta).mean()

    return nll(f, f) + nll(f, g) + nll(g, g)


def relations(batch: Batch, like: Tensor, relation: Relation) -> Tensor:
    """S (B, B): the number of shared labels of each two items, or 1 where they share any."""
    y = batch.targets[TARGET] if TARGET in batch.targets else labels_of(batch, like)
    y = y.to(torch.float32 if like.dtype.itemsize < 4 else like.dtype)
    shared = y @ y.T
    return shared if relation == "counts" else (shared > 0).to(shared.dtype)


def labels_of(batch: Batch, p: Tensor) -> Tensor:
    """Y (B, C), for predictions of the same shape."""
    if TARGET not in batch.targets:
        raise DataError(
            f"label-wise training needs the labels of each image, and the batch has no '{TARGET}': give data with a "
            "column of labels."
        )
    y = batch.targets[TARGET]
    if y.shape != p.shape:
        raise DataError(f"labels {tuple(y.shape)} for predictions {tuple(p.shape)}: use one vocabulary.")
    return y.to(p.dtype)


def _lengths(rows: Tensor) -> Tensor:
    """‖row‖ (B,), with a zero gradient at a zero row, where the norm has none."""
    squares = rows.square().sum(dim=1)
    zero = squares == 0
    return torch.where(zero, 0.0, squares.masked_fill(zero, 1.0).sqrt())


VIEW = "hash"  # the view that a hash head makes


class CentralSimilarity(Objective):
    """Central similarity quantisation of ``embeddings.image``, codes h (B, K) within (−1, 1).

    ::

        L = mean_{b,k} BCE((h_bk + 1)/2, (c_bk + 1)/2) + λ · mean_{b,k} (|h_bk| − 1)²
        c_b = sign(Σ of the centres of the labels of b), with 0 → ties

    ============  =========================================================================================
    paper         argument
    ============  =========================================================================================
    centres       ``centres`` (C, K) of −1 and +1 (``data.labels``); kept with the run
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
        signs = checked_centres(centres, "centres")
        tied = checked_centres(np.asarray(ties)[None], "ties")[0]
        if len(tied) != signs.shape[1]:
            raise SettingsError(f"ties has {len(tied)} bits, the centres {signs.shape[1]}: they must agree.")
        self.quantisation = at_least(quantisation, "quantisation", 0)
        self.register_buffer("centres", torch.from_numpy(signs.astype(np.float32)))
        self.register_buffer("ties", torch.from_numpy(tied.astype(np.float32)))

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        h = ops.at_least_float32(embeddings.image)  # (B, K)
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
