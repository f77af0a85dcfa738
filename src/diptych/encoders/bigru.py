"""Words → joint space by a GRU: both directions averaged (VSE∞), or the last state of one (VSE++)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from diptych import ops
from diptych.encoders.encoder import Encoder, check_rate
from diptych.errors import DataError, SettingsError
from diptych.parts import part
from diptych.types import Features, Inputs

EMBEDDING_RANGE = 0.1  # word vectors start uniform in ± this


class WordEncoder(Encoder):
    """An embedding of words, and a GRU that reads them from the first on."""

    def __init__(self, vocabulary_size: int, word_dim: int = 300, dim: int = 1024, pad: int = 0) -> None:
        super().__init__()
        self.dim, self.pad = dim, pad
        self.words = nn.Embedding(vocabulary_size, word_dim)
        nn.init.uniform_(self.words.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        self.ahead = nn.GRU(word_dim, dim, batch_first=True)

    def load_word_vectors(self, matrix: Tensor, found: Tensor) -> None:
        """Start the words that were ``found`` (V,) from ``matrix`` (V, word_dim); the others stay random."""
        weight = self.words.weight
        if matrix.shape != weight.shape:
            raise SettingsError(
                f"the word vectors are {tuple(matrix.shape)} but the encoder has {tuple(weight.shape)}: set word_dim "
                f"to {matrix.shape[-1]} and use one vocabulary for both."
            )
        with torch.no_grad():
            weight[found] = matrix[found].to(weight)


@part
class BiGRU(WordEncoder):
    """Token ids (B, W) → embedding → GRU → (B, W, dim); the states of the two directions are averaged.

    Exact in the lengths: padding never touches a state, and the backward direction starts at the last valid
    word. ``bidirectional=False`` gives the forward states alone. ``dropout`` zeroes entries of the embedded words
    while training (SGRAF: 0.4).
    """

    LATER = ("dropout",)

    def __init__(
        self,
        vocabulary_size: int,
        word_dim: int = 300,
        dim: int = 1024,
        pad: int = 0,
        bidirectional: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(vocabulary_size, word_dim, dim, pad)
        self.dropout = check_rate(dropout, "dropout")
        self.back = nn.GRU(word_dim, dim, batch_first=True) if bidirectional else None

    def forward(self, inputs: Inputs) -> Features:
        ids = valid_first(inputs, self.pad)
        x = F.dropout(self.words(ids.values), self.dropout, self.training)  # (B, W, word_dim)
        states = _run(self.ahead, x, ids)
        if self.back is not None:
            mirror = (ids.sizes[:, None] - 1 - torch.arange(x.shape[1], device=x.device)).clamp_min(0)
            backward = _run(self.back, _reorder(x, mirror), ids)
            states = (states + _reorder(backward, mirror)) / 2
        return Features(states, ids.mask)


@part
class UniGRU(WordEncoder):
    """Token ids (B, W) → embedding → forward GRU → its state at the last word, a set of one (B, 1, dim)."""

    def forward(self, inputs: Inputs) -> Features:
        ids = valid_first(inputs, self.pad)
        states = _run(self.ahead, self.words(ids.values), ids)
        return Features.whole(_reorder(states, (ids.sizes[:, None] - 1).clamp_min(0)))


def valid_first(inputs: Inputs, pad: int) -> Features:
    """The same ids with the valid ones moved to the front, in order, and ``pad`` behind them."""
    if not isinstance(inputs, Features) or not inputs.is_ids:
        raise DataError("a GRU reads token ids (texts, words): prepare texts with the model's text input.")
    places = torch.arange(inputs.mask.shape[1], device=inputs.mask.device)
    # no two are equal: stable, and exportable
    order = torch.argsort(places + inputs.mask.shape[1] * ~inputs.mask, dim=1)
    mask = inputs.mask.gather(1, order)
    return Features(inputs.values.gather(1, order).masked_fill(~mask, pad), mask)


def _run(gru: nn.GRU, x: Tensor, ids: Features) -> Tensor:
    """States (B, W, dim) of a forward GRU; it reaches the padding only after every valid word."""
    if x.is_cuda or ops.is_exported():
        # packing would read the lengths back to the host, which no CUDA graph and no export allows
        states: Tensor = gru(x)[0]
        return states
    packed = pack_padded_sequence(x, ids.sizes, batch_first=True, enforce_sorted=False)  # 10 to 40 % faster
    return pad_packed_sequence(gru(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def _reorder(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of (B, W, D) at ``positions`` (B, L)."""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
