"""Which concepts occur in a text: beside its states, a row of zeros and ones from its own words (CVSE, repaired)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diptych.encoders.encoder import Encoder
from diptych.errors import DataError
from diptych.parts import part
from diptych.types import Features, Inputs


@dataclass(frozen=True, slots=True)
class WordStates(Features):
    """Encoded words, with ``concepts`` (B, g): 1 where a concept is one of the words of a text."""

    concepts: Tensor


@part
class ConceptWords(Encoder):
    """An encoder of token ids whose states also say which concepts occur in each text.

    ``concept_of`` (vocabulary,) is the concept of each word, −1 for none; ``concepts`` is their number g. Shapes: ids
    (B, W) → states (B, L, D) of ``encoder``, and z (B, g).
    """

    concept_of: Tensor

    def __init__(self, encoder: Encoder, concept_of: Sequence[int], concepts: int) -> None:
        super().__init__()
        self.encoder, self.concepts, self.dim = encoder, concepts, encoder.dim
        numbers = torch.tensor([number if number >= 0 else concepts for number in concept_of])
        self.register_buffer("concept_of", numbers, persistent=False)

    def forward(self, inputs: Inputs) -> WordStates:
        """Token ids → states with concepts."""
        if not isinstance(inputs, Features) or not inputs.is_ids:
            raise DataError("concepts are found in token ids: prepare the texts with the model's text input.")
        found: Features = self.encoder(inputs)
        numbers = self.concept_of[inputs.values.masked_fill(~inputs.mask, 0)].masked_fill(
            ~inputs.mask, self.concepts
        )
        z = torch.zeros(numbers.shape[0], self.concepts + 1, device=numbers.device).scatter_(1, numbers, 1.0)
        return WordStates(found.values, found.mask, z[:, :-1])

    def frozen_part(self) -> nn.Module | None:
        """That of the encoder inside."""
        return self.encoder.frozen_part()

    def pretrained(self) -> tuple[str, ...]:
        """Those of the encoder inside."""
        return tuple(f"encoder.{name}" for name in self.encoder.pretrained())
