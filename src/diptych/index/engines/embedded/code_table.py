"""Binary codes of the vectors of a kind: a proposer that needs no library, no training and little memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from diptych.codes import WORD, Codes, hamming, nearest
from diptych.index.engines.coding import Coder, code_bits
from diptych.index.engines.embedded.segments import FILES
from diptych.index.protocol import Vectors

SUFFIX = ".codes"
_FORMAT = 1

Keys = NDArray[np.uint64]


class CodeTable:
    """Codes by key, with the operations of a usearch index that the approximate search asks for."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.mean: Vectors | None = None  # (D,), from the first vectors
        self.rotation: Vectors = np.zeros((dimension, 0), np.float32)  # (D, K)
        self.keys: Keys = np.zeros(0, np.uint64)
        self._codes: Codes = np.zeros((0, 0), np.uint64)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def bits(self) -> int:
        """K, a multiple of 64 that is at least the dimension."""
        return code_bits(self.dimension)

    def add(self, keys: Keys, vectors: Vectors) -> None:
        """Code more vectors."""
        if self.mean is None:
            coder = Coder.around(vectors.mean(axis=0))
            self.mean, self.rotation = coder.mean, coder.rotation
            self._codes = np.zeros((0, self.bits // WORD), np.uint64)
        fresh = Coder(self.mean, self.rotation).code(vectors)
        self.keys = np.concatenate([self.keys, keys.astype(np.uint64)])
        self._codes = np.asfortranarray(np.concatenate([self._codes, fresh]))

    def remove(self, keys: Keys) -> None:
        """Forget these."""
        keep = ~np.isin(self.keys, keys)
        self.keys, self._codes = self.keys[keep], np.asfortranarray(self._codes[keep])

    def rename(self, old: Keys, new: Keys) -> None:
        """Give rows their new keys."""
        order = np.argsort(old)
        place = np.minimum(np.searchsorted(old, self.keys, sorter=order), max(0, len(old) - 1))
        if len(old):
            found = old[order[place]] == self.keys
            self.keys = np.where(found, new[order[place]], self.keys)

    def propose(self, queries: Vectors, wanted: int) -> list[NDArray[np.int64]]:
        """For each query, the keys of the ``wanted`` rows with the nearest codes."""
        if not len(self):
            return [np.zeros(0, np.int64) for _ in queries]
        assert self.mean is not None  # it has rows
        codes = Coder(self.mean, self.rotation).code_queries(queries)
        return [self.keys[nearest(hamming(code, self._codes), wanted)].astype(np.int64) for code in codes]

    def save(self, path: str) -> None:
        """Write everything to a file."""
        mean = np.zeros(0, np.float32) if self.mean is None else self.mean
        facts = np.array([_FORMAT, self.dimension], np.int64)
        handle = FILES.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(handle, "wb") as file:
            for array in (facts, mean, self.rotation, self.keys, np.ascontiguousarray(self._codes.T)):
                np.lib.format.write_array(file, array, allow_pickle=False)

    def load(self, path: str) -> None:
        """Read what ``save`` wrote; a file of anything else is a ``RuntimeError``."""
        try:
            with os.fdopen(FILES.open(Path(path)), "rb") as file:
                facts, mean, rotation, keys, codes = (_read(file) for _ in range(5))
        except (ValueError, OSError, EOFError, MemoryError, OverflowError, SyntaxError) as error:
            raise RuntimeError(f"{path} holds no codes ({error})") from error
        shapes = [(array.shape, array.dtype) for array in (mean, rotation, keys, codes)]
        count, floats, words = keys.size, np.dtype(np.float32), np.dtype(np.uint64)
        full = [
            ((self.dimension,), floats), ((self.dimension, self.bits), floats), ((count,), words),
            ((self.bits // WORD, count), words),
        ]  # fmt: skip
        empty = [((0,), floats), ((self.dimension, 0), floats), ((0,), words), ((0, 0), words)]
        if facts.tolist() != [_FORMAT, self.dimension] or shapes not in (full, empty):
            raise RuntimeError(f"{path} holds codes of another kind")
        self.mean = mean if len(mean) else None
        self.rotation, self.keys, self._codes = rotation, keys, codes.T


def _read(file: BinaryIO) -> Any:
    return np.lib.format.read_array(file, allow_pickle=False)
