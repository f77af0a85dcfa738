"""CVSE's consensus level: both sides as mixtures of concepts, a text also by the concepts that its own words name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diptych import ops
from diptych.branches.concept import ConceptBranch
from diptych.encoders.encoder import Around, Encoder
from diptych.errors import DataError, SettingsError, between
from diptych.parts import part
from diptych.types import Batch, Embeddings, Features, Inputs


@dataclass(frozen=True, slots=True)
class WordStates(Features):
    """Encoded words, with ``concepts`` (B, g): 1 where a concept is one of the words of a text."""

    concepts: Tensor


@part
class ConceptWords(Around):
    """An encoder of token ids whose states also say which concepts occur in each text.

    ``concept_of`` (vocabulary,) is the concept of each word, −1 for none; ``concepts`` is their number g. Shapes: ids
    (B, W) → states (B, L, D) of ``encoder``, and z (B, g).
    """

    wrapped = "encoder"
    concept_of: Tensor

    def __init__(self, encoder: Encoder, concept_of: Sequence[int], concepts: int) -> None:
        super().__init__()
        self.encoder, self.concepts, self.dim = encoder, concepts, encoder.dim
        numbers = torch.tensor([number if number >= 0 else concepts for number in concept_of])
        self.register_buffer("concept_of", numbers, persistent=False)

    def forward(self, inputs: Inputs) -> WordStates:
        if not isinstance(inputs, Features) or not inputs.is_ids:
            raise DataError("concepts are found in token ids: prepare the texts with the model's text input.")
        found: Features = self.encoder(inputs)
        numbers = self.concept_of[inputs.values.masked_fill(~inputs.mask, 0)].masked_fill(
            ~inputs.mask, self.concepts
        )
        z = torch.zeros(numbers.shape[0], self.concepts + 1, device=numbers.device).scatter_(1, numbers, 1.0)
        return WordStates(found.values, found.mask, z[:, :-1])


FUSED, CONCEPT, WEIGHTS = "fused", "concept", "weights"  # the views of the branch's own view


class _Attention(nn.Module):
    """a_i = w · (tanh(BN(K y_i)) ∘ tanh(BN(Q x))): how well concept i answers the vector x of a side."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.key = ops.xavier_linear(dim, dim, bias=False)
        self.key_norm, self.query_norm = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.common = ops.xavier_linear(dim, 1, bias=False)

    def forward(self, query: Tensor, y: Tensor) -> Tensor:
        """Q x (B, D) and Y (g, D) → (B, g)."""
        asked = torch.tanh(self.query_norm(query))
        answers = torch.tanh(self.key_norm(self.key(y.to(self.key.weight.dtype))))
        return (asked * self.common.weight) @ answers.T


@part
class ConsensusBranch(ConceptBranch):
    """Consensus vectors, the vectors fused with them, and the score of both.

    ::

        p^I = softmax(λ a),  p^T = share · softmax(λ z) + (1 − share) · softmax(λ a)
        c = unit(Σ_i p_i y_i),   f = unit(α x + (1 − α) c),   S = ω f · f' + (1 − ω) c · c'

    ===================  ===================================================================================
    CVSE                 argument
    ===================  ===================================================================================
    Y (g, D)             ``ConceptBranch.concepts``, two graph layers with dim / 2 in between
    x                    the tower's own vector
    z (B, g)             the concepts of a text's own words (``ConceptWords``)
    λ                    ``attention``, 10
    share                ``label_share``, 0.35 (COCO: 0.4)
    α                    ``instance_share``, 0.85 (COCO: 0.9)
    ω                    ``fused_share``, 0.95
    ===================  ===================================================================================

    Shapes: vectors (B, D) → [√ω f, √(1 − ω) c] (B, 2D), the whole score of the model. A training step also sees
    ``fused``, ``concept`` (B, D) and ``weights`` p (B, g) as views of this view.
    """

    def __init__(
        self,
        words: Sequence[str],
        dim: int = 1024,
        word_dim: int = 300,
        *,
        attention: float = 10.0,
        label_share: float = 0.35,
        instance_share: float = 0.85,
        fused_share: float = 0.95,
    ) -> None:
        super().__init__(words, dim, word_dim, weight=0.0, attention=attention, hidden=max(1, dim // 2))
        self.weight, self.dim = 1.0, 2 * dim
        self.label_share = between(label_share, "label_share")
        self.instance_share = between(instance_share, "instance_share")
        self.fused_share = between(fused_share, "fused_share")
        self.image_attention, self.text_attention = _Attention(dim), _Attention(dim)

    def forward(self, seen: Embeddings, batch: Batch) -> Embeddings:
        (_, texts), y = seen.local_features(), self.concepts()
        image = self._side(seen.image, self._image_weights(seen.image, y), y)
        text = self._side(seen.text, self._text_weights(seen.text, texts, y), y)
        names = (FUSED, CONCEPT, WEIGHTS)
        views = {name: Embeddings(a, b) for name, a, b in zip(names, image, text, strict=True)}
        return Embeddings(self._join(*image[:2]), self._join(*text[:2]), views=views)

    def _image(self, vector: Tensor, features: Features, y: Tensor) -> Tensor:
        return self._join(*self._side(vector, self._image_weights(vector, y), y)[:2])

    def _text(self, vector: Tensor, features: Features, y: Tensor) -> Tensor:
        return self._join(*self._side(vector, self._text_weights(vector, features, y), y)[:2])

    def _image_weights(self, vector: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(self.attention * self.image_attention(self.image_query(vector), y), dim=1)

    def _text_weights(self, vector: Tensor, features: Features, y: Tensor) -> Tensor:
        if not isinstance(features, WordStates):
            raise SettingsError("the consensus branch reads concepts of a text: encode it with ConceptWords.")
        asked = torch.softmax(self.attention * self.text_attention(self.text_query(vector), y), dim=1)
        named = torch.softmax(self.attention * features.concepts.to(asked.dtype), dim=1)
        return self.label_share * named + (1 - self.label_share) * asked

    def _side(self, vector: Tensor, weights: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f, c and p of one side."""
        concept = ops.unit(weights @ y.to(weights.dtype))
        fused = ops.unit(self.instance_share * vector + (1 - self.instance_share) * concept)
        return fused, concept, weights

    def _join(self, fused: Tensor, concept: Tensor) -> Tensor:
        return torch.cat([self.fused_share**0.5 * fused, (1 - self.fused_share) ** 0.5 * concept], dim=1)
