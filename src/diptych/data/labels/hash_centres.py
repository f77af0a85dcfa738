"""Hash centres: for each class one code of −1 and +1, far from those of all other classes (CSQ)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diptych.data.decode.pickles import read_pickle
from diptych.errors import DataError, SettingsError

Signs = NDArray[np.int8]

BITS = (16, 32, 64)  # lengths in the papers; any power of two from 4 on has a Hadamard matrix
TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how torch began its files until version 1.5
REDRAWS = 20  # most attempts at a centre that lies too close to others


def hash_centres(classes: int, bits: int, seed: int = 0) -> Signs:
    """Centres (classes, bits) of −1 and +1.

    The rows of the Hadamard matrix of size K = ``bits``, then their negatives: any two of these 2K codes differ in
    K/2 bits, a row and its negative in all K. Further classes get drawn codes with as many +1 as −1; each is drawn
    again, ``REDRAWS`` times at most, until it differs from every centre before it in more than K/4 bits and from all
    of them in K/2 on average, and the best draw is kept. The same ``seed`` gives the same centres.
    """
    checked_bits(bits)
    if classes < 1:
        raise SettingsError(f"classes={classes} needs no hash centre: give at least one class.")
    matrix = hadamard(bits)
    centres = np.concatenate([matrix, -matrix])[:classes]
    rng = np.random.default_rng(seed)
    while len(centres) < classes:
        centres = np.concatenate([centres, _far_from(centres, rng)[None]])
    return centres


def tie_vector(bits: int, seed: int = 0) -> Signs:
    """One fixed random code (bits,): the value of the coordinates in which the labels of an image cancel out."""
    return np.random.default_rng([seed, bits]).choice(np.array([-1, 1], np.int8), size=bits)


def read_centres(path: str | Path) -> Signs:
    """Centres (classes, bits) out of a file: CSQ's ``64_coco_80_class.pkl``, a pickled or an ``.npy`` array.

    CSQ's files are tensors as older versions of torch saved them, read with torch's unpickler of weights, which makes
    tensors and nothing else; pickled arrays go through ``data.pickles``.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(TORCH_MAGIC))
        if start.startswith(b"PK") or start == TORCH_MAGIC:
            import torch

            values = torch.load(path, map_location="cpu", weights_only=True)
        else:
            values = np.load(path) if start.startswith(b"\x93NUMPY") else read_pickle(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: check the path of the hash centres.") from error
    except Exception as error:  # torch's reader of weights raises many kinds, UnpicklingError among them
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} holds no hash centres ({reason}): give a file of −1 and +1.") from error
    return checked_centres(values, str(path))


def checked_centres(values: ArrayLike, source: str) -> Signs:
    """Centres (classes, bits) out of a file, all −1 or +1."""
    array = np.asarray(values)
    if array.ndim != 2 or 0 in array.shape or not np.isin(array, (-1, 1)).all():
        raise DataError(
            f"{source} holds no hash centres: expected an array (classes, bits) of −1 and +1, not {array.shape}."
        )
    return array.astype(np.int8)


def hadamard(size: int) -> Signs:
    """Sylvester's Hadamard matrix: rows of −1 and +1, of which any two differ in half their places."""
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def checked_bits(bits: int) -> int:
    """A length of codes for which there are centres."""
    if bits < 4 or bits & (bits - 1):
        raise SettingsError(
            f"bits={bits} is not supported: choose a power of two, in the papers {', '.join(map(str, BITS))}."
        )
    return bits


def _far_from(centres: Signs, rng: np.random.Generator) -> Signs:
    """One balanced code, the best of the draws by its least and then by its mean distance to ``centres``."""
    bits = centres.shape[1]
    balanced = np.repeat(np.array([-1, 1], np.int8), bits // 2)
    best, found = balanced, (-1.0, -1.0)
    for _ in range(REDRAWS):
        code = rng.permutation(balanced)
        distances = (bits - centres.astype(np.int64) @ code) / 2
        quality = float(distances.min()), float(distances.mean())
        if quality > found:
            best, found = code, quality
        if quality[0] > bits / 4 and quality[1] >= bits / 2:
            break
    return best
