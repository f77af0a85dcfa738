"""The front that SGR and SAF share: a vector of similarity per word and image, and one for the whole pair.

Behind it, the same operations as kernels for a GPU in half precision and without gradients: ``similarity_vectors``
stands for ``SimilarityVectors.forward``, ``reason_all`` for a step of SGR, ``answer`` for its last step and the score.
The plain ones, here and in ``sgraf.py``, are the reference.

What a pair scorer is: a score for every image and text, from the local features of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diptych.kernels import on_gpu
from diptych.ops import xavier_linear
from diptych.types import Batch, Embeddings, Features, Matches

EPS = 1e-8  # added to every length that divides
SLOPE = 0.1  # slope of the leaky ReLU
LEAST_SQUARE = 1e-24  # smallest squared length of a context: keeps the gradient of the root finite at 0
# products of halves as float32 on a GPU
WIDE_RESULTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)

Weights = tuple[Tensor, Tensor]
"""Weight and bias of a linear layer, in the type of a computation."""


@dataclass(frozen=True, slots=True)
class Locals:
    """Unit vectors of one side: ``whole`` (n, D), ``parts`` (n, L, D) with zeros at padding, ``mask`` (n, L).

    ``gram`` (n, L, L) holds the products of the parts of images with each other, computed once per image.
    """

    whole: Tensor
    parts: Tensor
    mask: Tensor
    gram: Tensor | None = None

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, rows: slice | Tensor) -> Locals:
        gram = None if self.gram is None else self.gram[rows]
        return Locals(self.whole[rows], self.parts[rows], self.mask[rows], gram)

    def shortened(self, length: int) -> Locals:
        return Locals(self.whole, self.parts[:, :length].contiguous(), self.mask[:, :length])

    def with_gram(self) -> Locals:
        return replace(self, gram=torch.bmm(self.parts, self.parts.transpose(1, 2)))

    @staticmethod
    def of(features: Features, dtype: torch.dtype, ahead: int = 1) -> Locals:
        """The first element is the whole (``SelfAttended`` puts it there), the others are the parts, valid first.

        With ``ahead`` 0 every element is a part, and ``whole`` is empty.
        """
        values, mask = features.values, features.mask[:, ahead:]
        parts = values[:, ahead:]
        # a GPU is not asked, which would make the host wait for it
        if not (mask.is_cpu and bool((mask[:, 1:] <= mask[:, :-1]).all())):
            order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
            mask = mask.gather(1, order)
            parts = parts.gather(1, order[..., None].expand(-1, -1, values.shape[2]))
        parts = parts.to(dtype)
        if not (mask.is_cpu and bool(mask.all())):
            parts = parts.masked_fill(~mask[..., None], 0.0)
        whole = values[:, 0] if ahead else values[:, 0, :0]
        return Locals(whole.to(dtype), parts.contiguous(), mask)


class SimilarityVectors(nn.Module):
    """The nodes of an image and a text: one vector of similarity for the pair, one for each word.

    ::

        s_rl = leaky(V_r · E_l);  s_r ← s_r / ‖s_r‖ over words
        w_l  = softmax over regions of λ s_·l
        c_l  = unit(Σ_r w_lr V_r)
        n_l  = unit(W_loc (c_l − E_l)² + b_loc)        one per word
        n_0  = unit(W_glo (g_v − g_t)² + b_glo)        the whole pair

    ===================  ==================================================================================
    paper                argument
    ===================  ==================================================================================
    V (R, D), E (W, D)   ``parts`` of the images and of the texts
    g_v, g_t (D)         ``whole`` of both
    λ                    ``sharpness``, 9
    K                    ``nodes``, the width of a similarity vector, 256
    ===================  ==================================================================================

    Shapes: images (n, R, D), texts (m, W, D) → (n, m, 1 + W, K). Nodes of padded words are arbitrary. Padding is
    exactly neutral: a padded word is a zero vector, so it adds nothing to a norm over words.

    ‖Σ_r w_r V_r‖² = wᵀ (V Vᵀ) w, so contexts get their length before they exist, and no pass over D is needed.
    """

    def __init__(self, dim: int = 1024, nodes: int = 256, sharpness: float = 9.0) -> None:
        super().__init__()
        self.dim, self.nodes, self.sharpness = dim, nodes, sharpness
        self.local = xavier_linear(dim, nodes)
        self.overall = xavier_linear(dim, nodes)

    def weights(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        """The two layers in the type of a computation, cast once for all tiles."""
        return cast(self.local, dtype), cast(self.overall, dtype)

    def affinities(self, images: Locals, texts: Locals) -> tuple[Tensor, Tensor]:
        """s before its normalisation (m, W, n, R), and λ / ‖s_r‖ (m, 1, n, R), in float32 or better."""
        n, r, _ = images.parts.shape
        m, words, _ = texts.parts.shape
        s = product(texts.parts.flatten(0, 1), images.parts.flatten(0, 1)).view(m, words, n, r)
        s = F.leaky_relu(s, SLOPE)
        return s, self.sharpness / (_length_over_words(s) + EPS)

    def attention(self, s: Tensor, images: Locals, mask: Tensor) -> Tensor:
        """The weights w / ‖c‖ that give unit contexts, (n, words, R), from λ s of that shape before its softmax."""
        w = torch.softmax(_hidden(s, mask), dim=-1)
        gram = images.with_gram().gram if images.gram is None else images.gram
        assert gram is not None
        square = (torch.bmm(w, gram.to(w.dtype)) * w).sum(-1, keepdim=True)
        return w / (square.clamp_min(LEAST_SQUARE).sqrt() + EPS)

    def forward(self, images: Locals, texts: Locals, weights: tuple[Weights, Weights]) -> Tensor:
        """The nodes of every image with every text, (n, m, 1 + W, K)."""
        n, (m, words, _) = len(images), texts.parts.shape
        s, scale = self.affinities(images, texts)
        w = self.attention((s * scale).flatten(0, 1).transpose(0, 1), images, images.mask)
        every = texts.parts.view(1, m * words, -1).expand(n, -1, -1)
        differences = torch.baddbmm(every, w.to(every.dtype), images.parts, beta=-1)  # context − word
        of_words = unit(squared_linear(differences, *weights[0])).view(n, m, words, -1)
        of_pair = unit(squared_linear(images.whole[:, None] - texts.whole, *weights[1]))  # (n, m, K)
        return torch.cat([of_pair[:, :, None], of_words], dim=2)

    def matched(self, images: Locals, texts: Locals, weights: tuple[Weights, Weights]) -> Tensor:
        """The nodes of image p with text p, (P, 1 + W, K)."""
        s = F.leaky_relu(torch.bmm(texts.parts, images.parts.transpose(1, 2)), SLOPE)  # (P, W, R)
        scale = self.sharpness / (_length_over_words(s) + EPS)
        w = torch.softmax(_hidden(s * scale, images.mask), dim=-1)
        # an image occurs once: its gram matrix would cost more than the lengths of its contexts
        context = unit(torch.bmm(w, images.parts))
        of_words = unit(squared_linear(context - texts.parts, *weights[0]))
        of_pair = unit(squared_linear(images.whole - texts.whole, *weights[1]))
        return torch.cat([of_pair[:, None], of_words], dim=1)


def cast(layer: nn.Linear, dtype: torch.dtype) -> Weights:
    """Weight and bias in the type of a computation."""
    return layer.weight.to(dtype), layer.bias.to(dtype)


def unit(x: Tensor) -> Tensor:
    """x / (‖x‖ + 1e-8) over the last axis; the length is summed in float32, the type stays."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=full_type(x))
    rows: Tensor = x * (1 / (length + EPS)).to(x.dtype)
    return rows


def product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ in float32 or better; halves are multiplied as halves, with float32 sums."""
    if WIDE_RESULTS and a.is_cuda and a.element_size() < 4 and not torch.is_grad_enabled():
        out: Tensor = torch.mm(a, b.T, out_dtype=torch.float32)
        return out
    return (a @ b.T).to(full_type(a))


def full_type(x: Tensor) -> torch.dtype:
    """Float32, or float64 where x has it."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _hidden(s: Tensor, mask: Tensor) -> Tensor:
    """s (n, words, R) with the lowest number at the regions that ``mask`` (n, R) leaves out."""
    if mask.is_cpu and bool(mask.all()):
        return s
    return s.masked_fill(~mask[:, None], torch.finfo(s.dtype).min)


def _length_over_words(s: Tensor) -> Tensor:
    """‖s‖ over axis 1, which stays. Without gradients a CPU sums squares: ten times as fast over a middle axis."""
    if s.is_cpu and not torch.is_grad_enabled():
        return s.square().sum(1, keepdim=True).sqrt_()
    length: Tensor = torch.linalg.vector_norm(s, dim=1, keepdim=True)
    return length


def squared_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W x² + b; x is spent: without gradients it is squared in place, with them it alone is kept, not its square."""
    if not torch.is_grad_enabled():
        return F.linear(x.square_(), weight, bias)
    out: Tensor = _SquaredLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _SquaredLinear(torch.autograd.Function):
    """The square is computed again in the backward pass: half the memory of the largest tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.square(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_weight = rows.T @ x.square().flatten(0, -2)
        return (gradient @ weight).mul_(x).mul_(2), of_weight, rows.sum(0)


MOST_REGIONS, MOST_NODES = 64, 64  # of a kernel's tile
BLOCK = 64  # columns of D and of K that a kernel reads at a time


def fits(images: Locals, nodes: int) -> bool:
    """Whether the kernels can compute this: on a GPU, in half precision, in sizes they tile."""
    parts, (_, regions, dim) = images.parts, images.parts.shape
    tiled = regions <= MOST_REGIONS and dim % BLOCK == 0 and nodes in (64, 128, 256)
    return tiled and parts.dtype in (torch.bfloat16, torch.float16) and on_gpu(parts.device)


def similarity_vectors(
    vectors: SimilarityVectors, images: Locals, texts: Locals, weights: tuple[Weights, Weights]
) -> Tensor:
    """The nodes (n, m, 1 + W, K) of a tile, as ``SimilarityVectors`` computes them."""
    from diptych.kernels import pair_nodes

    (local, local_bias), overall = weights
    n, r, d = images.parts.shape
    m, words, _ = texts.parts.shape
    k = len(local)
    s, scale = vectors.affinities(images, texts)  # (m, W, n, R), (m, 1, n, R)
    assert images.gram is not None
    out = torch.empty(n, m, 1 + words, k, device=s.device, dtype=images.parts.dtype)
    out[:, :, 0] = unit(F.linear((images.whole[:, None] - texts.whole).square_(), *overall))
    pair_nodes.local_nodes(
        (
            s,
            scale,
            images.mask.contiguous(),
            images.parts.contiguous(),
            texts.parts,
            images.gram.contiguous(),
        ),
        (local.T.contiguous(), local_bias),
        out,
        (n, m, words, r, d, k),
        EPS,
    )
    return out


def reason_all(nodes: Tensor, mask: Tensor, step: Any) -> Tensor:
    """One step of reasoning over the nodes (n, m, P, K), with ``mask`` (m, P)."""
    from diptych.kernels import pair_nodes

    (folded, folded_bias), (mix, mix_bias) = step
    out = torch.empty_like(nodes)
    pair_nodes.reasoned(
        nodes, mask.contiguous(), (folded.T.contiguous(), folded_bias), (mix.T.contiguous(), mix_bias), out
    )
    return out


def answer(nodes: Tensor, mask: Tensor, step: Any, score: Weights) -> Tensor:
    """The last step for node 0 alone, and sigmoid(w · n_0 + b), (n, m) in float32."""
    from diptych.kernels import pair_nodes

    (folded, folded_bias), mix = step
    n, m, _, k = nodes.shape
    asked = F.linear(nodes[:, :, 0].reshape(n * m, k), folded, folded_bias)
    mixed = torch.empty_like(asked)
    pair_nodes.mixed_first(nodes, asked, mask.contiguous(), mixed)
    first = F.relu(F.linear(mixed, *mix))
    return torch.sigmoid(F.linear(first, *score).float()).view(n, m)


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
