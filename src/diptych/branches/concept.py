"""CODER's concept branch: both sides described by the same concepts of a commonsense graph, which CVSE shares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from diptych import ops
from diptych.branches.branch import Branch
from diptych.data.concepts import Concepts, WordVectors
from diptych.entries import MODEL
from diptych.errors import SettingsError, one_of
from diptych.parts import content_digest, part
from diptych.types import Batch, Embeddings, Features

Norm = Literal["sym", "cvse", "coder"]

BASE, SHIFT = 5.0, 0.02  # CVSE's rescaling s(x) = 5^(x − .02) − 5^(−.02)
NEIGHBOURS = 0.25  # CVSE: the weight all neighbours of a concept share


def concept_graph(concepts: Concepts, *, threshold: float = 0.3, norm: Norm = "sym") -> NDArray[np.float32]:
    """The normalised adjacency Ã (g, g) of ``concepts``.

    P_ij = B_ij / N_i, rescaled by s(x) = 5^(x − .02) − 5^(−.02), H_ij = [s(P_ij) ≥ ε]      (supp. Eq. 4)

    =========  ==============================================================================================
    ``sym``    D^(−½) (max(H, Hᵀ) + I) D^(−½): symmetric, and defined where a concept has no neighbour
    ``cvse``   what CVSE's code computes: A = .25 · H / column sums + I, then D^(−½) Aᵀ D^(−½)
    ``coder``  as CODER prints it: D^(−½) H D^(−½) + I, although H is not symmetric
    =========  ==============================================================================================

    D holds row sums; D^(−½) is 0 where a row is empty. ``threshold`` is ε: .3 is CVSE's, CODER gives none.
    """
    one_of(norm, "the graph's normalisation", Norm)
    p = concepts.pairs / np.maximum(concepts.occurrences, 1)[:, None]
    linked = (BASE ** (p - SHIFT) - BASE**-SHIFT >= threshold).astype(np.float64)
    np.fill_diagonal(linked, 0)
    own = np.eye(len(linked))
    if norm == "coder":
        root = _inverse_root(linked.sum(1))
        graph = root[:, None] * linked * root + own
    elif norm == "cvse":
        weighted = NEIGHBOURS * linked / (linked.sum(0, keepdims=True) + 1e-6) + own
        root = _inverse_root(weighted.sum(1))
        graph = root[:, None] * weighted.T * root
    else:
        both = np.maximum(linked, linked.T) + own
        root = _inverse_root(both.sum(1))
        graph = root[:, None] * both * root
    return np.asarray(graph, dtype=np.float32)


def _inverse_root(degrees: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(1.0, np.sqrt(degrees), out=np.zeros_like(degrees), where=degrees > 0)


SLOPE = 0.2  # slope of LeakyReLU, from CVSE's code; CODER does not give ρ
UNKNOWN_SPREAD = 0.4  # standard deviation of GloVe's numbers, for a vocabulary without any known word


@part
class ConceptBranch(Branch, ops.TensorCache):
    """Each side as a mixture of concept embeddings, weighed by how well they answer its query.

    Y = unit(ρ(Ã X W))                                                                       (supp. Eq. 5)
    a_i = softmax_i(λ · q W^v y_i),   v^C = unit(Σ_i a_i y_i), and alike with W^w for texts      (Eq. 2)

    ===================  ===================================================================================
    X (g, d)             ``vectors``, the words' GloVe vectors, fixed
    Ã (g, g)             ``adjacency``, fixed (``concept_graph``)
    W, ρ                 ``layers``, LeakyReLU of slope .2; with ``hidden`` CVSE's two layers d → hidden → D,
                         of which only the first is followed by ρ
    q                    the tower's own vector, or that of a second aggregator over the same local features.
                         CODER shares the image side and gives texts their own: ``text_aggregator=GPO()``
    W^v, W^w (D, D)      ``image_query``, ``text_query``
    λ                    ``attention``; 10 is CVSE's, CODER gives none
    1 − β                ``weight`` of the branch in the score
    ===================  ===================================================================================

    Shapes: vectors (B, D) and local features (B, L, D) → (B, D). Y is computed once per step, and once per
    model while searching.
    """

    vectors: Tensor
    adjacency: Tensor

    def __init__(
        self,
        words: Sequence[str],
        dim: int = 1024,
        word_dim: int = 300,
        *,
        weight: float = 0.1,
        attention: float = 10.0,
        hidden: int | None = None,
        image_aggregator: nn.Module | None = None,
        text_aggregator: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= weight < 1:
            raise SettingsError(f"the concept branch has the weight {weight}: give 0 or more, below 1.")
        self.words, self.dim, self.weight, self.attention = list(words), dim, weight, attention
        self.image_aggregator, self.text_aggregator = image_aggregator, text_aggregator
        sizes = [word_dim, dim] if hidden is None else [word_dim, hidden, dim]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))
        self.image_query = nn.Linear(dim, dim, bias=False)
        self.text_query = nn.Linear(dim, dim, bias=False)
        for layer in [*self.layers, self.image_query, self.text_query]:
            nn.init.xavier_uniform_(layer.weight)
        self.register_buffer("vectors", torch.zeros(len(self.words), word_dim))
        self.register_buffer("adjacency", torch.eye(len(self.words)))

    @classmethod
    def from_concepts(
        cls,
        concepts: Concepts,
        dim: int = 1024,
        *,
        vectors: WordVectors | None = None,
        word_dim: int = 300,
        threshold: float = 0.3,
        norm: Norm = "sym",
        **settings: Any,
    ) -> ConceptBranch:
        """A branch over ``concepts``, their graph, and their word vectors.

        ``vectors`` (from ``word_vectors(concepts.words, …)``) go before those of the concepts. A word without
        a vector gets a random one with the spread of the others, and so do all where there are none, of ``word_dim``
        numbers.
        """
        g = len(concepts.words)
        if vectors is None and concepts.vectors is not None:
            vectors = WordVectors(concepts.vectors, np.ones(g, dtype=np.bool_))
        if vectors is not None and (vectors.matrix.ndim != 2 or len(vectors.matrix) != g):
            raise SettingsError(f"{g} concepts need {g} word vectors, not an array {vectors.matrix.shape}.")
        width = word_dim if vectors is None else vectors.matrix.shape[1]
        branch = cls(concepts.words, dim, width, **settings)
        with torch.no_grad():
            branch.adjacency.copy_(torch.from_numpy(concept_graph(concepts, threshold=threshold, norm=norm)))
            branch.vectors.copy_(_completed(vectors, g, width))
        return branch

    def image(self, vector: Tensor, features: Features) -> Tensor:
        return self._image(vector, features, self.concepts())

    def text(self, vector: Tensor, features: Features) -> Tensor:
        return self._text(vector, features, self.concepts())

    def forward(self, seen: Embeddings, batch: Batch) -> Embeddings:
        """Both sides, with one pass through the graph."""
        (images, texts), y = seen.local_features(), self.concepts()
        return Embeddings(self._image(seen.image, images, y), self._text(seen.text, texts, y))

    def concepts(self) -> Tensor:
        """Y (g, D), unit rows; remembered while searching."""
        return self.cached([*self.layers.parameters(), self.vectors, self.adjacency], None, self._convolve)

    def save_assets(self, folder: Path) -> dict[str, Any]:
        name = f"concepts-{self.content_arguments()['words']}.json"
        MODEL.write(folder / name, json.dumps(self.words, ensure_ascii=False))
        return {"words": name}

    def content_arguments(self) -> dict[str, Any]:
        return {"words": content_digest("\n".join(self.words))}

    def _convolve(self) -> Tensor:
        y = self.vectors
        for number, layer in enumerate(self.layers):
            y = layer(self.adjacency @ y)  # (Ã X) W: the narrow product first
            if number == 0:
                y = leaky_relu(y, SLOPE)
        return ops.unit(ops.at_least_float32(y))

    def _image(self, vector: Tensor, features: Features, y: Tensor) -> Tensor:
        return self._attend(self.image_query(_query(self.image_aggregator, vector, features)), y)

    def _text(self, vector: Tensor, features: Features, y: Tensor) -> Tensor:
        return self._attend(self.text_query(_query(self.text_aggregator, vector, features)), y)

    def _attend(self, query: Tensor, y: Tensor) -> Tensor:
        scores = self.attention * ops.at_least_float32(query @ y.to(query.dtype).T)  # (B, g)
        mixed = torch.softmax(scores, dim=1) @ y  # in half precision under autocast
        return ops.unit(ops.at_least_float32(mixed))


def _query(aggregator: nn.Module | None, vector: Tensor, features: Features) -> Tensor:
    return vector if aggregator is None else ops.unit(ops.at_least_float32(aggregator(features)))


def _completed(vectors: WordVectors | None, g: int, width: int) -> Tensor:
    """(g, width) with random rows for the words that have no vector."""
    random = torch.randn(g, width)
    if vectors is None:
        return UNKNOWN_SPREAD * random
    found = torch.from_numpy(vectors.found)
    matrix = torch.from_numpy(np.asarray(vectors.matrix, dtype=np.float32))
    spread = float(matrix[found].std()) if int(found.sum()) else UNKNOWN_SPREAD
    return torch.where(found[:, None], matrix, spread * random)
