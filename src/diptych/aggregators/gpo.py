"""GPO: pooling with learned weights over the sorted values of each channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from diptych import ops
from diptych.aggregators.generators import CosSinBiGRU, Generator
from diptych.aggregators.pooling import Aggregator
from diptych.aggregators.sorting import sort_sets
from diptych.errors import positive
from diptych.parts import part
from diptych.types import Features

ALL_SIZES = 64  # on a GPU, lengths up to this get a row for every size: cheaper than waiting for the sizes


@part
class GPO(Aggregator, ops.TensorCache):
    """Generalised pooling operator: v_i = Σ_k θ_k · sort_k(x_i), θ = softmax_{k<N}(score(k, N) / T).

    ==================  ===========================================================================
    paper               here
    ==================  ===========================================================================
    sort_k (max_k)      k-th largest value of channel i among the N valid elements
    g(k, N)             ``generator``; the published one is ``CosSinBiGRU()``, the default
    temperature T       ``temperature``; 0.1 in the authors' code, in neither paper
    per-dimension       ``GPO(CosSinBiGRU(outputs=D))``
    data-dependent      ``GPO(SortedRowBiGRU(dim=D))``
    ==================  ===========================================================================

    Shapes: values (B, L, D), mask (B, L) → (B, D). A set of one element has θ = 1; an empty set gives zeros.
    Sort, softmax and sum run in float32 or better, also under autocast.

    θ depends on the size of a set alone, so the generator runs on sizes, not on samples. Which sizes:

    1. under ``torch.compile`` or while a CUDA graph is captured, where no shape may depend on data: all of
       1 … L, or the B sizes themselves where B < L;
    2. on a GPU with L ≤ 64: all of 1 … L, so that the host never waits;
    3. otherwise: the sizes present (``torch.unique``).

    In evaluation under ``torch.inference_mode`` the rows are kept until the weights or the mode change.
    """

    def __init__(self, generator: nn.Module | None = None, temperature: float = 0.1) -> None:
        super().__init__()
        self.generator = generator if generator is not None else CosSinBiGRU()
        self.temperature = positive(temperature, "the temperature of GPO")

    def forward(self, features: Features) -> Tensor:
        with torch.autocast(features.values.device.type, enabled=False):
            ranked = sort_sets(features)  # (B, D, L), largest last
            sizes = features.sizes.clamp_min(1)
            if isinstance(self.generator, Generator):
                theta = self.coefficients(sizes, ranked.shape[2])
            else:
                theta = self._softmax(self.generator(sizes, ranked), sizes)
            theta = theta.to(ranked.dtype).flip(1)  # (B, L, K), weight of the largest last
            if theta.shape[2] == 1:
                return torch.bmm(ranked, theta).squeeze(2)
            return (ranked * theta.transpose(1, 2)).sum(dim=2)

    def coefficients(self, sizes: Tensor, length: int) -> Tensor:
        """θ of sets of the given ``sizes`` (S,), each at least 1: (S, length, K), zeros at ranks ≥ size."""
        if every_size(sizes, length):
            table, row = self.rows_of_every_size(length, sizes.device), sizes - 1
        else:
            distinct, row = distinct_sizes(sizes)
            table = self._table(distinct, length)  # (distinct, length, K)
        # a lookup whose gradient is summed in a fixed order, also on a GPU
        return embedding(row, table.flatten(1)).view(-1, *table.shape[1:])

    def rows_of_every_size(self, length: int, device: torch.device) -> Tensor:
        """θ of sets of 1 … ``length`` elements, (length, length, K): needs nothing of the batch."""
        return self._table(torch.arange(1, length + 1, device=device), length)

    def _table(self, distinct: Tensor, length: int) -> Tensor:
        """θ of these sizes, (S, length, K); while encoding, those of a set of sizes are computed once."""

        def table() -> Tensor:
            return self._softmax(self.generator(distinct.clone(), length), distinct)

        if _shapes_are_fixed(distinct) or self.training or not torch.is_inference_mode_enabled():
            return table()  # no size is asked of the device
        every = distinct.is_cuda and length <= ALL_SIZES
        key = length, None if every else tuple(distinct.tolist())
        return self.cached(list(self.generator.parameters()), key, table)

    def _softmax(self, scores: Tensor, sizes: Tensor) -> Tensor:
        """Scores (S or 1, L, K) → coefficients (S, L, K) over the first ``sizes`` ranks."""
        valid = torch.arange(scores.shape[1], device=scores.device) < sizes[:, None]  # (S, L)
        return ops.masked_softmax(scores / self.temperature, valid[..., None], dim=1)


def distinct_sizes(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes that need a row, and the row of each sample, where not every size gets one."""
    if _shapes_are_fixed(sizes):
        return sizes, torch.arange(len(sizes), device=sizes.device)
    distinct, row = torch.unique(sizes, return_inverse=True)
    return distinct, row


def every_size(sizes: Tensor, length: int) -> bool:
    """Whether every size of 1 … ``length`` gets a row, by the rule in ``GPO``."""
    if _shapes_are_fixed(sizes):
        return len(sizes) >= length
    return sizes.is_cuda and length <= ALL_SIZES


def _shapes_are_fixed(tensor: Tensor) -> bool:
    """Whether the program is being recorded, so that no shape may depend on data."""
    if torch.compiler.is_compiling():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
