"""Hubness: items that are near to many queries are scored down, by queries of another split.

Inverted softmax [1] with a bank B of queries, as QB-Norm [2] uses it, for a query q and an item g of the gallery:

    s'(q, g) = exp(β s(q, g)) / Σ_{b ∈ B} exp(β s(b, g))

Ranks depend on s' through its logarithm only, so that the item's part is computed once, as ``shift`` h:

    log s'(q, g) / β = s(q, g) − h(g),   h(g) = log(Σ_b exp(β s(b, g))) / β

The bank of text → image are texts, that of image → text are images, so each direction has scores of its own.

[1] Smith et al., Offline bilingual word vectors, 2017. [2] Bogolin et al., Cross Modal Retrieval with Querybank
Normalisation, 2022; β = 20.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.evaluation.prepared import PreparedScores
from diptych.model.scores import EmbeddingScores, MeanScores, Scores, Where, checked_tile

BETA = 20.0
IMAGES = 5000  # of the bank, with their texts
CHUNK = 1024  # queries of the bank scored at a time


class Shifted:
    """Scores from which a number is taken: one for each image or one for each text, in float64."""

    def __init__(self, scores: Scores, shift: Tensor, kind: str) -> None:
        self.scores, self.shift, self.kind = scores, shift, kind  # (N, 1) or (1, M)
        self.shape, self.device = scores.shape, scores.device

    def tile(self, images: Where, texts: Where) -> Tensor:
        """The tile less the numbers of its images or texts."""
        shift = self.shift[images] if self.shift.shape[1] == 1 else self.shift[:, texts]
        return self.scores.tile(images, texts).double() - shift


def inverted_softmax(
    scored: PreparedScores, bank: Scores, name: str, *, beta: float = BETA
) -> PreparedScores:
    """A model's scores, re-scored with its scores of a bank of images and texts, whose ``name`` is put on the card."""
    if beta <= 0:
        raise SettingsError(f"β={beta:g} is no weight of a softmax: give more than 0, {BETA:g} is usual.")
    gallery = _vectors(scored.scores)
    queries = _vectors(bank)
    images, texts = bank.shape
    kind = f"{scored.scores.kind}, inverted softmax (β {beta:g}, bank {name}: {images:,} images, {texts:,} texts)"
    by_texts = MeanScores([EmbeddingScores(g.image, q.text) for g, q in zip(gallery, queries, strict=True)])
    by_images = MeanScores([EmbeddingScores(q.image, g.text) for g, q in zip(gallery, queries, strict=True)])
    image_to_text = Shifted(scored.scores, _shift(by_images, 0, beta)[None, :], kind)
    text_to_image = Shifted(scored.scores, _shift(by_texts, 1, beta)[:, None], kind)
    return replace(scored, directions=(image_to_text, text_to_image))


def bank_of(captions: Captions) -> Captions:
    """The captions; of a large collection, the number that a bank needs, drawn with a fixed seed."""
    if len(captions.images) <= IMAGES:
        return captions
    drawn = torch.randperm(len(captions.images), generator=torch.Generator().manual_seed(0))[:IMAGES]
    return captions.subset(sorted(drawn.tolist()))


def _shift(scores: Scores, dim: int, beta: float) -> Tensor:
    """h of each item: the queries of the bank lie along ``dim``."""
    found: Tensor | None = None
    for start in range(0, scores.shape[dim], CHUNK):
        part = slice(start, start + CHUNK)
        where = (part, slice(None)) if dim == 0 else (slice(None), part)
        more = torch.logsumexp(beta * checked_tile(scores, *where).double(), dim)
        found = more if found is None else torch.logaddexp(found, more)
    assert found is not None
    return found / beta


def _vectors(scores: Scores) -> list[EmbeddingScores]:
    parts = scores.parts if isinstance(scores, MeanScores) else [scores]
    found = [part for part in parts if isinstance(part, EmbeddingScores)]
    if len(found) < len(parts):
        raise SettingsError(
            f"the score {scores.kind} is no dot product of vectors, which --hubness needs: leave --hubness out."
        )
    return found
