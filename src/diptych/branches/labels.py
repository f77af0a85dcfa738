"""Further views of label-wise retrieval: label predictions, the rows of the losses, and masked prediction.

None of them is in the score of the model (weight 0). Their rows are not of unit length: the losses read them as the
paper writes them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.aggregators.pooling import Aggregator
from diptych.branches.branch import Branch
from diptych.data.labels import Labels
from diptych.encoders.shared import TokenStates
from diptych.errors import DataError, SettingsError
from diptych.parts import part
from diptych.types import Batch, Embeddings, Features

REGION_TARGET = "region_classes"  # the column of a batch that holds the class of every region
UNKNOWN_CLASS = -1  # class of a region without one: never predicted


@part
class LabelView(Branch):
    """Label scores p (B, C) of both sides, the vocabulary of the labels, and the thresholds they are told at.

    ``image_head`` and ``text_head`` are the heads of the towers: one object for both in the paper's model. The
    thresholds (image, text) are chosen on the validation split (micro-F1) and travel with the model. ``merge_texts``
    says that texts are tag sets: evaluation then ranks each distinct one once, and asks it once.
    """

    thresholds: Tensor

    def __init__(
        self, labels: Labels, image_head: Aggregator, text_head: Aggregator, merge_texts: bool = False
    ) -> None:
        super().__init__()
        self.merge_texts = merge_texts
        self.labels, self.image_head, self.text_head = labels, image_head, text_head
        self.dim = len(labels)
        self.register_buffer("thresholds", torch.full((2,), 0.5))

    def image(self, vector: Tensor, features: Features) -> Tensor:
        p: Tensor = self.image_head(features)
        return p

    def text(self, vector: Tensor, features: Features) -> Tensor:
        p: Tensor = self.text_head(features)
        return p


@part
class FrontView(Branch):
    """The token means before the shared blocks, f_I and f_T (B, D), which the consistency loss reads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def image(self, vector: Tensor, features: Features) -> Tensor:
        return _states(features).front


@part
class PooledView(Branch):
    """The pooled vectors of both towers before their unit norm, which DSCMR's loss reads as u and v."""

    def __init__(self, dim: int, image_space: Aggregator, text_space: Aggregator) -> None:
        super().__init__()
        self.dim, self.image_space, self.text_space = dim, image_space, text_space

    def image(self, vector: Tensor, features: Features) -> Tensor:
        u: Tensor = self.image_space(features)
        return u

    def text(self, vector: Tensor, features: Features) -> Tensor:
        v: Tensor = self.text_space(features)
        return v


@part
class ContextPrediction(Branch):
    """What stood at the masked positions: the class of a region, the id of a word.

    ::

        ℓ(token) = −log softmax(W h + b)_{what stood there}, one W for regions and one for words

    Each side is (B, 2): the summed loss of the masked tokens of an item, and their number. Rows of several processes
    can then be put together, and the mean over all masked tokens is exact. Region classes come from
    ``batch.targets["region_classes"]`` (B, R), −1 where there is none. Outside training nothing is masked and both
    numbers are 0.
    """

    def __init__(self, dim: int, words: int, classes: int) -> None:
        super().__init__()
        if words < 1 or classes < 1:
            raise SettingsError(f"masked prediction needs words and classes, not {words} and {classes}.")
        self.dim = 2
        self.region, self.word = nn.Linear(dim, classes), nn.Linear(dim, words)

    def forward(self, seen: Embeddings, batch: Batch) -> Embeddings:
        regions, words = map(_states, seen.local_features())
        image = text = None
        if regions.chosen is not None:
            if REGION_TARGET not in batch.targets:
                raise DataError(
                    f"masked regions need a class each, and the batch has no '{REGION_TARGET}': train with λ = 0, or "
                    "with data that have region classes."
                )
            # columns are as wide as the largest set
            target = batch.targets[REGION_TARGET][:, : regions.mask.shape[1]]
            known = regions.chosen & (target != UNKNOWN_CLASS)
            image = token_losses(self.region, regions, known, target, whole=target.is_cuda)
        if words.chosen is not None and words.words is not None:
            text = token_losses(self.word, words, words.chosen, words.words, whole=words.chosen.is_cuda)
        return Embeddings(_or_none(image, seen.image), _or_none(text, seen.text))

    def image(self, vector: Tensor, features: Features) -> Tensor:
        return _or_none(None, vector)


def label_view(branches: Iterable[tuple[str, nn.Module]]) -> tuple[str, LabelView]:
    """The name and the branch that predicts labels, or an error where a model has none."""
    for name, branch in branches:
        if isinstance(branch, LabelView):
            return name, branch
    raise SettingsError("this model predicts no labels: train one with labels, such as 'labelwise'.")


def token_losses(head: nn.Linear, states: TokenStates, chosen: Tensor, target: Tensor, whole: bool) -> Tensor:
    """(B, 2): summed cross-entropy and number of the chosen tokens.

    ``whole`` computes the logits of every token: shapes that do not depend on the draw, which a CUDA graph needs.
    """
    if whole:
        logits = head(states.values.masked_fill(~states.mask[..., None], 0)).float()  # (B, L, classes)
        loss = F.cross_entropy(logits.transpose(1, 2), target.clamp_min(0), reduction="none")  # (B, L)
        sums = (loss * chosen).sum(dim=1)
    else:
        rows, places = chosen.nonzero(as_tuple=True)
        loss = F.cross_entropy(
            head(states.values[rows, places]).float(), target[rows, places], reduction="none"
        )
        sums = loss.new_zeros(len(chosen)).index_add(0, rows, loss)
    return torch.stack([sums, chosen.sum(dim=1).to(sums.dtype)], dim=1)


def _or_none(rows: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros((len(like), 2)) if rows is None else rows


def _states(features: Features) -> TokenStates:
    if not isinstance(features, TokenStates):
        raise SettingsError("this view reads the tokens of a SharingEncoder: build both towers with one.")
    return features
