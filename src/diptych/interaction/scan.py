"""SCAN: stacked cross attention (Lee et al., ECCV 2018). Each element is compared with what it attends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.errors import one_of, positive
from diptych.interaction.similarity import EPS, LEAST_SQUARE, SLOPE, Locals, full_type, product, unit
from diptych.interaction.similarity_scorer import TiledScorer
from diptych.parts import part
from diptych.types import Features

Direction = Literal["text", "image"]
Pooling = Literal["mean", "lse"]
CPU_ELEMENTS, CUDA_ELEMENTS = 1 << 20, 1 << 26  # affinities of a tile
KEPT = 8  # tensors of affinities that a training step keeps, in numbers per affinity


@part
class SCAN(TiledScorer):
    """Words that attend to regions (``text``), or regions that attend to words (``image``).

    ::

        s_rl = leaky(V_r · E_l)
        text:   ŝ_r = s_r / (‖s_r‖ over words + 1e-8),    w_l = softmax over regions of λ₁ ŝ_·l,  c_l = Σ_r w_lr V_r
        image:  ŝ_l = s_l / (‖s_l‖ over regions + 1e-8),  w_r = softmax over words of λ₁ ŝ_r·,    c_r = Σ_l w_rl E_l
        R = cos(element, its context);  score = mean R,  or  log(Σ exp(λ₂ R)) / λ₂

    ===================  ==================================================================================
    paper                argument
    ===================  ==================================================================================
    V (R, D), E (W, D)   local features of both sides, made unit rows here
    t-i, i-t             ``direction``: who attends, "text" or "image"
    λ₁                   ``sharpness``: 9 for text, 4 for image
    AVG, LSE             ``pooling``: "mean" or "lse"
    λ₂                   ``lse_sharpness``: 6 for text, 5 for image (COCO: 20)
    ===================  ==================================================================================

    Shapes: images (N, R, D), texts (M, W, D) → (N, M). It has no weights. A context is never made: its product with the
    element is Σ w s, its squared length wᵀ G w, with G the products of the attended elements with each other.
    """

    kind = "scan"

    def __init__(
        self,
        dim: int = 1024,
        direction: Direction = "text",
        sharpness: float = 9.0,
        pooling: Pooling = "mean",
        lse_sharpness: float = 6.0,
    ) -> None:
        super().__init__()
        self.dim, self.sharpness = dim, sharpness
        self.direction = one_of(direction, "the side that attends", Direction)
        self.pooling = one_of(pooling, "SCAN's pooling", Pooling)
        self.lse_sharpness = positive(lse_sharpness, "lse_sharpness")

    def locals_of(self, features: Features, dtype: torch.dtype) -> Locals:
        valid = features.values.masked_fill(~features.mask[..., None], 0)
        rows = unit(valid.to(full_type(valid)))
        return Locals.of(Features(rows, features.mask), dtype, ahead=0)

    def ready(self, images: Locals, dtype: torch.dtype) -> tuple[Locals, None, int]:
        """Images, with the products of their regions where words attend to them."""
        elements = CUDA_ELEMENTS if images.parts.is_cuda else CPU_ELEMENTS
        found = images.with_gram() if self.direction == "text" else images
        return found, None, max(1, elements // images.parts.shape[1])

    def element_bytes(self, images: Locals, dtype: torch.dtype) -> int:
        """Affinities are float32 or better, whatever the products are."""
        return KEPT * images.parts.shape[1] * max(4, dtype.itemsize)

    def tile(self, images: Locals, texts: Locals, weights: None) -> tuple[Tensor, ...]:
        n, regions, dim = images.parts.shape
        m, words, _ = texts.parts.shape
        flat = product(texts.parts.reshape(m * words, dim), images.parts.reshape(n * regions, dim))
        raw = flat.view(m, words, n, regions).permute(2, 0, 1, 3)  # (n, m, W, R)
        rows, columns = (images.mask[:, None], _lengths(images)[:, None]), (texts.mask[None], _lengths(texts))
        if self.direction == "text":
            gram = images.gram
            assert gram is not None

            def squares(w: Tensor) -> Tensor:  # (n, m, W, R)
                return _quadratic(w.flatten(1, 2), gram).view(n, m, words)

            return (self._score(raw, columns, rows[0], squares),)
        own = texts.with_gram().gram
        assert own is not None

        def squares_of_words(w: Tensor) -> Tensor:  # (n, m, R, W)
            of_texts = w.transpose(0, 1).reshape(m, n * regions, words)
            return _quadratic(of_texts, own).view(m, n, regions).transpose(0, 1)

        return (self._score(raw.transpose(2, 3), rows, columns[0], squares_of_words),)

    def matched(self, images: Locals, texts: Locals) -> Tensor:
        """Scores (P,) of image p with text p; the contexts are made, since an image occurs once."""
        asking, attended = (texts, images) if self.direction == "text" else (images, texts)
        raw = torch.bmm(asking.parts, attended.parts.transpose(1, 2))[:, None]  # (P, 1, A, B)

        def squares(w: Tensor) -> Tensor:
            return torch.bmm(w[:, 0], attended.parts).square().sum(-1)[:, None]

        elements = asking.mask[:, None], _lengths(asking)[:, None]
        return self._score(raw, elements, attended.mask[:, None], squares)[:, 0]

    def _score(
        self,
        raw: Tensor,
        asking: tuple[Tensor, Tensor],
        attended: Tensor,
        squares: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """(n, m) from products (n, m, A, B) of asking and attended elements.

        ``asking`` are the mask and the lengths (n or 1, m or 1, A) of the elements that ask, ``attended`` the mask of
        those they attend to, ``squares`` gives the squared lengths (n, m, A) of the contexts of weights (n, m, A, B).
        """
        mask, length = asking
        s = F.leaky_relu(raw, SLOPE)
        s = s * (self.sharpness / (torch.linalg.vector_norm(s, dim=2, keepdim=True) + EPS))
        w = torch.softmax(s.masked_fill(~attended[:, :, None], torch.finfo(s.dtype).min), dim=-1)
        size = squares(w).clamp_min(LEAST_SQUARE).sqrt()
        relevance = (w * raw).sum(-1) / (length.to(size.dtype) * size).clamp_min(EPS)  # (n, m, A)
        if self.pooling == "mean":
            return (relevance * mask).sum(-1) / mask.sum(-1).clamp_min(1)
        least = torch.finfo(relevance.dtype).min
        present = (self.lse_sharpness * relevance).masked_fill(~mask, least)
        return torch.logsumexp(present, dim=-1) / self.lse_sharpness


def _quadratic(w: Tensor, gram: Tensor) -> Tensor:
    """wᵀ G w of weights (b, a, L) and products (b, L, L) → (b, a)."""
    return (torch.bmm(w, gram.to(w.dtype)) * w).sum(-1)


def _lengths(side: Locals) -> Tensor:
    """Lengths (n, L) of the elements: 1 but for what ``unit`` adds, 0 at padding."""
    found: Tensor = torch.linalg.vector_norm(side.parts, dim=-1, dtype=full_type(side.parts))
    return found
