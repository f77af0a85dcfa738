"""Binary codes of vectors, for every engine that keeps a table of them.

The code of a vector v is the signs of (v − m) R: m the mean of the vectors that were there first, R a random rotation.
Two codes differ in about as many of K bits as K · angle / π. A query q is coded without m, since the ranking by q · v
is that by q · (v − m). Both m and R are stored with the codes: a table means the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diptych.codes import WORD, Codes, pack
from diptych.index.protocol import Vectors

LEAST_BITS = 256  # shortest code: with fewer bits, the shortlist of a small dimension misses too much
PROPOSALS, FACTOR = 400, 20  # size of the shortlist: at least this many, and this many per hit
SEED = 0


@dataclass(frozen=True)
class Coder:
    """Codes vectors and queries; ``mean`` (D,), ``rotation`` (D, K)."""

    mean: Vectors
    rotation: Vectors

    @staticmethod
    def around(mean: Vectors) -> Coder:
        """A coder of vectors with this mean."""
        return Coder(mean, random_rotation(len(mean), code_bits(len(mean))))

    @property
    def bits(self) -> int:
        return int(self.rotation.shape[1])

    def code(self, vectors: Vectors) -> Codes:
        """(N, D) → packed codes (N, K / 64)."""
        return pack((vectors - self.mean) @ self.rotation)

    def code_queries(self, queries: Vectors) -> Codes:
        """(Q, D) → packed codes (Q, K / 64)."""
        return pack(queries @ self.rotation)


def code_bits(dimension: int) -> int:
    """K, a multiple of 64 that is at least the dimension."""
    return -(-max(dimension, LEAST_BITS) // WORD) * WORD


def random_rotation(dimension: int, bits: int) -> Vectors:
    """(dimension, bits): random orthogonal matrices side by side, the last cut off."""
    rng = np.random.default_rng(SEED)
    blocks = [
        np.linalg.qr(rng.standard_normal((dimension, dimension)))[0] for _ in range(-(-bits // dimension))
    ]
    return np.ascontiguousarray(np.concatenate(blocks, axis=1)[:, :bits], np.float32)
