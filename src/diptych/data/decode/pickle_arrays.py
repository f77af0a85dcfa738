"""Arrays inside a pickle: what describes them, and how bytes in the file become one.

A pickled array is a call, a type, a shape and bytes. Here each is a plain value of this module: no name out of the
file is imported, and no array exists before its type is on a short list and its bytes have the right length.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.errors import DataError

MOST_AXES = 32  # numpy's own limit when these files were written
NUMBERS = re.compile(r"[<>|=]?(?:[iu][1248]|f[248]|b1)|\?")

_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
NAMES = {
    **{(module, "_reconstruct"): "reconstruct" for module in _MULTIARRAY},
    **{(module, "scalar"): "scalar" for module in _MULTIARRAY},
    **{(module, "_frombuffer"): "frombuffer" for module in _NUMERIC},
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    ("collections", "OrderedDict"): "dict",
    ("builtins", "bytes"): "bytes",
    ("__builtin__", "bytes"): "bytes",
}
"""Names a pickle of arrays refers to, and what they mean here. They are words, not objects."""


class RefusedError(Exception):
    """Something in the file that an array does not need."""


@dataclass(frozen=True)
class Span:
    """Bytes of a file that were not read yet."""

    path: Path
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        """The bytes; an error where the file has been cut since."""
        file = os.open(self.path, os.O_RDONLY)
        blocks: list[bytes] = []
        done = 0
        try:
            while done < self.size and (block := os.pread(file, self.size - done, self.start + done)):
                blocks.append(block)
                done += len(block)
        finally:
            os.close(file)
        if done < self.size:
            raise DataError(
                f"{self.path} ends early: it was changed while being read, restore it and run again."
            )
        return b"".join(blocks)


class Stored:
    """An array whose bytes may still lie in the file: ``shape``, ``dtype``, and ``load``."""

    def __init__(
        self, source: bytes | Span, dtype: np.dtype[Any], shape: tuple[int, ...], by_columns: bool = False
    ) -> None:
        expected = prod(shape) * dtype.itemsize
        if len(source) != expected:
            raise RefusedError(
                f"an array of {shape} {dtype} needs {expected:,} bytes and has {len(source):,}"
            )
        self.source, self.dtype, self.shape, self.by_columns = source, dtype, shape, by_columns

    def load(self) -> NDArray[Any]:
        """The array in this machine's byte order, a copy of its own."""
        data = self.source if isinstance(self.source, bytes) else self.source.read()
        array = np.frombuffer(data, self.dtype).reshape(self.shape, order="F" if self.by_columns else "C")
        return np.array(array, dtype=self.dtype.newbyteorder("="), order="C")


@dataclass(frozen=True)
class Name:
    """A name the pickle refers to; ``meaning`` is one of the words of ``NAMES``."""

    meaning: str


@dataclass
class Type:
    """A type under construction, whose byte order comes later; ``code`` is "O" for objects."""

    code: str
    order: str = "="

    def dtype(self) -> np.dtype[Any]:
        """The type of an array of numbers."""
        if self.code == "O":
            raise RefusedError("an array of objects")
        return np.dtype(self.code) if self.order == "|" else np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]

    def complete(self, state: tuple[Any, ...]) -> None:
        """(3, byte order, subtype, names, fields, size, alignment, flags), without fields or flags."""
        if len(state) != 8 or state[1] not in ("<", ">", "|", "="):
            raise RefusedError("a type is described in an unknown way")
        if any(part is not None for part in state[2:5]) or (state[7] != 0 and self.code != "O"):
            raise RefusedError("a type with fields in it")
        self.order = state[1]


@dataclass
class Array:
    """An array under construction, whose shape, type and bytes come later."""

    built: Any = None

    def complete(self, state: tuple[Any, ...], claim: Claim) -> None:
        """(version, shape, type, by columns, bytes)."""
        if len(state) != 5 or not isinstance(state[2], Type):
            raise RefusedError("an array is described in an unknown way")
        _, shape, kind, by_columns, source = state
        if kind.code == "O":  # how numpy.save writes a dict: an array without axes whose one item is the dict
            if shape != () or type(source) is not list or len(source) != 1:
                raise RefusedError("an array of objects")
            self.built = source[0]
        else:
            self.built = _stored(source, kind, shape, by_columns is True, claim)


Claim = Callable[[int], None]
"""Counts bytes against the length of the file: what is made of one string many times is refused."""


def call(meaning: str, arguments: tuple[Any, ...], claim: Claim) -> Any:
    """What a call in the pickle stands for."""
    if meaning == "reconstruct":
        kind = arguments[0] if len(arguments) == 3 else None
        if not isinstance(kind, Name) or kind.meaning != "ndarray" or arguments[1] != (0,):
            raise RefusedError("it builds an array in an unusual way")
        return Array()
    if meaning == "dtype":
        return _type(arguments)
    if meaning == "frombuffer":
        return _from_buffer(arguments, claim)
    if meaning == "scalar":
        if len(arguments) != 2 or not isinstance(arguments[0], Type):
            raise RefusedError("a number is described in an unknown way")
        return _stored(arguments[1], arguments[0], (), False, claim).load().item()
    if meaning == "encode":  # how protocol 2 of Python 3 writes bytes
        if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] != "latin1":
            raise RefusedError("it encodes text in an unusual way")
        claim(len(arguments[0]))
        return arguments[0].encode("latin1")
    if meaning in ("dict", "bytes") and not arguments:
        return {} if meaning == "dict" else b""
    raise RefusedError(f"it calls {meaning} in an unusual way")


def _type(arguments: tuple[Any, ...]) -> Type:
    code = arguments[0] if 1 <= len(arguments) <= 3 else None
    if type(code) is not str or not (code in ("O", "O8") or NUMBERS.fullmatch(code)):
        raise RefusedError(f"an array of type {str(code)[:20]!r}, not of numbers")
    return Type("O" if code.startswith("O") else code)


def _from_buffer(arguments: tuple[Any, ...], claim: Claim) -> Stored:
    """(bytes, type, shape, "C" or "F"), as protocol 5 writes arrays."""
    if len(arguments) not in (4, 5) or not isinstance(arguments[1], Type) or arguments[3] not in ("C", "F"):
        raise RefusedError("an array is described in an unknown way")
    if len(arguments) == 5 and arguments[4] is not None:
        raise RefusedError("an array with its axes in another order")
    return _stored(arguments[0], arguments[1], arguments[2], arguments[3] == "F", claim)


def _stored(source: Any, kind: Type, shape: Any, by_columns: bool, claim: Claim) -> Stored:
    if isinstance(source, str):  # the bytes of Python 2
        source = source.encode("latin1")
    if not isinstance(source, bytes | Span):
        raise RefusedError("an array without bytes")
    if type(shape) is not tuple or len(shape) > MOST_AXES or any(type(n) is not int or n < 0 for n in shape):
        raise RefusedError("an array whose shape is not a tuple of sizes")
    claim(len(source))
    return Stored(source, kind.dtype(), shape, by_columns)
