"""Binary codes: sign bits packed into 64-bit words, Hamming distances by XOR and popcount, nearest by counting.

A code of K bits is a row of W = ⌈K / 64⌉ unsigned words; bit b of a code is bit b mod 64 of word b // 64, and unused
bits are 0. Bit 1 stands for +1 and for every value h ≥ 0, bit 0 for −1 (sign(0) is +1 here). Many codes (N, W) are
fastest in Fortran order, where each word of all codes lies in one run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diptych.errors import DataError

Codes = NDArray[np.uint64]
Distances = NDArray[np.unsignedinteger[Any]]

WORD = 64
PIECE = 16_384  # codes compared at once: what XOR and popcount leave behind stays in the processor's cache


def pack(values: ArrayLike) -> Codes:
    """(N, K) numbers → (N, ⌈K / 64⌉) words, with bit 1 where a number is ≥ 0."""
    array = np.asarray(values)
    if array.ndim != 2 or array.shape[1] == 0:
        raise DataError(
            f"codes of {array.shape} numbers cannot be packed: give rows of numbers (N, K) with K ≥ 1."
        )
    if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
        raise DataError("codes cannot be packed from NaN: check the model and its input.")
    return pack_bits(array >= 0)


def pack_bits(bits: NDArray[np.bool_]) -> Codes:
    """(N, K) bools → (N, ⌈K / 64⌉) words."""
    words = -(-bits.shape[1] // WORD)
    rows = np.zeros((len(bits), words * 8), np.uint8)
    packed = np.packbits(bits, axis=1, bitorder="little")
    rows[:, : packed.shape[1]] = packed
    return np.ascontiguousarray(rows).view("<u8").astype(np.uint64, copy=False)


def hamming(query: Codes, codes: Codes) -> Distances:
    """Distances (N,) of one code (W,) to many (N, W): the number of bits that differ."""
    words = codes.shape[1]
    if query.shape != (words,):
        raise DataError(
            f"a code of {query.shape} words cannot be compared with codes of {words}: pack both alike."
        )
    if words == 1:
        return _one_word(query[0], codes[:, 0])
    out: Distances = np.zeros(len(codes), np.uint8 if words * WORD < 256 else np.uint16)
    for start in range(0, len(codes), PIECE):
        piece = out[start : start + PIECE]
        for word in range(words):
            np.add(piece, np.bitwise_count(codes[start : start + PIECE, word] ^ query[word]), out=piece)
    return out


def nearest(distances: Distances, k: int) -> NDArray[np.int64]:
    """Indices of the k least distances in the order (distance, index), without sorting all of them."""
    k = min(k, len(distances))
    if k <= 0:
        return np.zeros(0, np.int64)
    near = np.flatnonzero(distances <= kth(distances, k))
    return near[np.argsort(distances[near], kind="stable")[:k]]


def kth(distances: Distances, k: int) -> int:
    """The k-th least distance, counted from 1.

    Distances are small whole numbers: halving the range and counting is several times faster than a histogram.
    """
    low, high = int(distances.min()), int(distances.max())
    while low < high:
        middle = (low + high) // 2
        if np.count_nonzero(distances <= middle) >= k:
            high = middle
        else:
            low = middle + 1
    return low


def _one_word(query: Any, codes: Codes) -> Distances:
    out: NDArray[np.uint8] = np.empty(len(codes), np.uint8)
    for start in range(0, len(codes), PIECE):
        np.bitwise_count(codes[start : start + PIECE] ^ query, out=out[start : start + PIECE])
    return out
