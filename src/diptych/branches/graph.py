"""The statistical commonsense graph of CODER and CVSE: which concepts call up which."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from diptych.data.concepts import Concepts
from diptych.errors import SettingsError

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
    if norm not in get_args(Norm):
        raise SettingsError(f"the graph's normalisation is '{norm}': choose {', '.join(get_args(Norm))}.")
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
