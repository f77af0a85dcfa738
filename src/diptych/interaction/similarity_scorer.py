"""Tiles, buckets of similar lengths and recomputation, once for SGR, SAF and SCAN; scorers over similarity vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diptych.errors import DataError
from diptych.interaction import similarity as fused_form
from diptych.interaction.similarity import Locals, PairScorer, SimilarityVectors
from diptych.types import Features


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of texts that are padded to the same number of words."""

    rows: Sequence[int]
    words: int


def length_buckets(sizes: Sequence[int], overhead: float) -> list[Bucket]:
    """The buckets with the least padding, shortest texts first.

    Minimises Σ over buckets of ``overhead`` + rows · (longest + 1): ``overhead`` is the cost of one more bucket
    in words, the 1 is the global node. Texts of one length stay together and in order.
    """
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    lengths = sorted(set(sizes))
    counts = [0] * len(lengths)
    place = {length: n for n, length in enumerate(lengths)}
    for size in sizes:
        counts[place[size]] += 1
    before = [0, *accumulate(counts)]  # texts shorter than lengths[n]
    # cost of the first n lengths, and where their last bucket starts
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end, longest in enumerate(lengths, start=1):
        costs = (
            (best[start][0] + overhead + (before[end] - before[start]) * (longest + 1), start)
            for start in range(end)
        )
        best.append(min(costs))
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    cuts.reverse()
    return [Bucket(order[before[a] : before[b]], lengths[b - 1]) for a, b in pairwise(cuts)]


def spans(count: int, most: int) -> Iterator[slice]:
    """Slices of about equal length, none longer than ``most``."""
    pieces = max(1, -(-count // max(1, most)))
    size = -(-count // pieces) if count else 0
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + size, count))


CPU_ROWS = 8192  # nodes of pairs in one tile: what stays in the caches of a few cores
CUDA_ROWS = 1 << 18
CUDA_KERNEL_ROWS = 1 << 20  # with the kernels of ``fused``, which keep no context
CPU_BUCKET, CUDA_BUCKET = 64, 60_000  # nodes of pairs that take as long as one more bucket
TRAINING_BYTES = 3 << 30  # memory that a training step may keep for its backward pass before it recomputes


class TiledScorer(PairScorer):
    """A pair scorer that computes its scores in tiles of images × texts of similar length.

    While training every tile holds all images, so that the statistics of a text are those of the whole batch; tiles are
    recomputed in the backward pass once what they keep would pass ``TRAINING_BYTES``. Products run in the type autocast
    asks for, with float32 sums; without autocast in float32.
    """

    dim: int
    refines = True
    ahead = 0  # elements before the local ones: the global vector of a side

    def locals_of(self, features: Features, dtype: torch.dtype) -> Locals:
        """One side as tiles read it."""
        raise NotImplementedError

    def ready(self, images: Locals, dtype: torch.dtype) -> tuple[Locals, Any, int]:
        """The images, what ``tile`` needs beside them, and how many elements of texts × images fill a tile."""
        raise NotImplementedError

    def tile(self, images: Locals, texts: Locals, weights: Any) -> tuple[Tensor, ...]:
        """Scores (n, m), and what is to be kept of each text (m,)."""
        raise NotImplementedError

    def element_bytes(self, images: Locals, dtype: torch.dtype) -> int:
        """What a word of a text beside one image keeps for the backward pass."""
        raise NotImplementedError

    def matched(self, images: Locals, texts: Locals) -> Tensor:
        """Scores (P,) of image p with text p."""
        raise NotImplementedError

    def keep(self, statistics: tuple[Tensor, ...]) -> None:
        """Take what ``tile`` returned beside the scores, for all texts (M,) in their order."""

    def forward(self, images: Features, texts: Features) -> Tensor:
        """(N, ahead + R, D) and (M, ahead + W, D) → (N, M)."""
        for name, side in (("image", images), ("text", texts)):
            if (
                side.values.dim() != 3
                or side.values.shape[-1] != self.dim
                or side.values.shape[1] <= self.ahead
            ):
                first = " with the global vector first" if self.ahead else ""
                raise DataError(
                    f"the {name} features have shape {tuple(side.values.shape)}, this pair scorer reads (items, "
                    f"{'1 + ' * self.ahead}elements, {self.dim}){first}: encode them with its own model."
                )
        device = images.values.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        if images.values.dtype == torch.float64:
            dtype = torch.float64
        with torch.autocast(device, enabled=False):
            return self._scores(self.locals_of(images, dtype), self.locals_of(texts, dtype), dtype)

    def pairs(self, images: Features, texts: Features) -> Tensor:
        """Scores (P,) of image p with text p, in float32, without gradients."""
        with torch.autocast(images.values.device.type, enabled=False), torch.no_grad():
            return self.matched(*(self.locals_of(side, torch.float32) for side in (images, texts)))

    def _scores(self, images: Locals, texts: Locals, dtype: torch.dtype) -> Tensor:
        device = images.whole.device
        if not len(images) or not len(texts):
            return torch.zeros(len(images), len(texts), device=device)
        images, weights, tile_rows = self.ready(images, dtype)
        buckets = self._buckets(texts, len(images))
        recompute = torch.is_grad_enabled() and self._bytes(buckets, images, dtype) > TRAINING_BYTES
        columns: list[tuple[Tensor, ...]] = []
        for bucket in buckets:
            # in its own order: nothing is sent to the device, so a graph can capture it
            whole = len(buckets) == 1
            some = texts if whole else texts[torch.tensor(bucket.rows, device=device)]
            some = some.shortened(bucket.words)
            pairs = max(1, tile_rows // (bucket.words + 1))
            # about as many images as texts, so that both sides of the products are long
            across = len(images) if self.training else min(len(images), max(1, int(pairs**0.5)))
            across = max(across, min(len(images), pairs // len(some)))
            for part in spans(len(some), pairs // across):
                tiles = []
                for rows in spans(len(images), across):
                    tile = partial(self.tile, images[rows], some[part], weights)
                    # nothing random inside: the state of the generator need not be kept
                    kept = partial(checkpoint, tile, use_reentrant=False, preserve_rng_state=False)
                    tiles.append(kept() if recompute else tile())
                columns.append((torch.cat([tile[0] for tile in tiles]), *tiles[0][1:]))
        found = [torch.cat(one, dim=-1) for one in zip(*columns, strict=True)]  # (N, M), then (M,) each
        if len(buckets) > 1:
            order = [row for bucket in buckets for row in bucket.rows]
            place = torch.tensor(order, device=device).argsort()
            found = [one[..., place] for one in found]
        if self.training:
            self.keep(tuple(found[1:]))
        return found[0]

    def _buckets(self, texts: Locals, images: int) -> list[Bucket]:
        if texts.mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return [Bucket(range(len(texts)), texts.mask.shape[1])]  # nothing may be read back to the host
        sizes = texts.mask.sum(1).clamp_min(1).tolist()
        return length_buckets(sizes, (CUDA_BUCKET if texts.mask.is_cuda else CPU_BUCKET) / images)

    def _bytes(self, buckets: list[Bucket], images: Locals, dtype: torch.dtype) -> int:
        """What all tiles keep for the backward pass."""
        elements = sum(len(bucket.rows) * (bucket.words + 1) for bucket in buckets)
        return len(images) * elements * self.element_bytes(images, dtype)


class SimilarityScorer(TiledScorer):
    """A pair scorer that reads the similarity vectors of a pair.

    On a GPU in half precision and without gradients, the kernels of ``fused`` take the place of the plain operations.
    """

    ahead = 1

    def __init__(self, dim: int, nodes: int, sharpness: float) -> None:
        super().__init__()
        self.dim = dim
        self.vectors = SimilarityVectors(dim, nodes, sharpness)

    def weights(self, dtype: torch.dtype) -> Any:
        """What ``read`` and ``read_fused`` need of the layers, cast once for all tiles."""
        raise NotImplementedError

    def read(self, nodes: Tensor, mask: Tensor, weights: Any) -> tuple[Tensor, ...]:
        """Scores (n, m) of nodes (n, m, P, K) with ``mask`` (m, P), and what is to be kept of each text (m,)."""
        raise NotImplementedError

    def read_fused(self, nodes: Tensor, mask: Tensor, weights: Any) -> tuple[Tensor, ...]:
        return self.read(nodes, mask, weights)

    def locals_of(self, features: Features, dtype: torch.dtype) -> Locals:
        return Locals.of(features, dtype)

    def ready(self, images: Locals, dtype: torch.dtype) -> tuple[Locals, Any, int]:
        """Images with their products, and the layers in the type of the computation."""
        fused = (
            not torch.is_grad_enabled() and not self.training and fused_form.fits(images, self.vectors.nodes)
        )
        rows = CUDA_KERNEL_ROWS if fused else CUDA_ROWS if images.whole.is_cuda else CPU_ROWS
        return images.with_gram(), (self.vectors.weights(dtype), self.weights(dtype), fused), rows

    def tile(self, images: Locals, texts: Locals, weights: Any) -> tuple[Tensor, ...]:
        mask = F.pad(texts.mask, (1, 0), value=True)  # (m, P)
        of_vectors, own, fused = weights
        if fused:
            return self.read_fused(
                fused_form.similarity_vectors(self.vectors, images, texts, of_vectors), mask, own
            )
        return self.read(self.vectors(images, texts, of_vectors), mask, own)

    def matched(self, images: Locals, texts: Locals) -> Tensor:
        nodes = self.vectors.matched(images, texts, self.vectors.weights(torch.float32))
        mask = F.pad(texts.mask, (1, 0), value=True)
        return self.read(nodes[None], mask, self.weights(torch.float32))[0][0]

    def element_bytes(self, images: Locals, dtype: torch.dtype) -> int:
        """A difference, and about ten vectors, for each node."""
        return (self.dim + 10 * self.vectors.nodes) * dtype.itemsize
