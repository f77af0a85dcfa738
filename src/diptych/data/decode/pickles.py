"""Pickles of plain arrays, read without running them: the one reader for every pickle the package accepts.

A pickle is a program. This module follows its instructions itself, and knows those that numbers, texts, lists, dicts
and numpy arrays need. No name in the file is ever imported or called: each is a word of ``NAMES``, and no array exists
before its type is on a short list and its bytes have the right length. Anything else is refused with one sentence, and
memory stays in proportion to the file.
"""

from __future__ import annotations

import codecs
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from diptych.data.arrays import LazyArray, Span
from diptych.errors import DataError, reason_of

MOST_STEPS = 1_000_000  # instructions: bounds the memory of small values, of which a byte can make a hundred
EAGER_BYTES = 4096  # longer byte strings stay in the file until an array asks for them
DEEPEST = 16  # levels of lists and dicts
MOST_AXES = 32  # numpy's own limit when these files were written
NPY = b"\x93NUMPY"
TYPES = re.compile(r"[<>|=]?(?:[iu][1248]|f[248]|b1)|\?|O8?")
CORES = ("numpy.core", "numpy._core")
NAMES = {
    **{(f"{core}.multiarray", name): name for core in CORES for name in ("_reconstruct", "scalar")},
    **{(f"{core}.numeric", "_frombuffer"): "_frombuffer" for core in CORES},
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


def read_pickle(path: str | Path, most_steps: int = MOST_STEPS) -> Any:
    """The content of a pickle of numbers, texts, lists, dicts and arrays; nothing in it is run."""
    return _load_arrays(open_pickle(path, most_steps), load=True)


def open_pickle(path: str | Path, most_steps: int = MOST_STEPS) -> Any:
    """As ``read_pickle``, but each array is ``LazyArray``: the bytes of large ones are still in the file.

    An ``.npy`` file that holds one pickled object, as ``numpy.save`` writes a dict, is read as that object.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            _skip_npy_header(file)
            return _load_arrays(_Machine(file, path).run(most_steps), load=False)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: check the path.") from error
    except (RefusedError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{path} is not a pickle of plain arrays ({reason_of(error)}): it was not read."
        ) from error


@dataclass(frozen=True)
class Name:
    """A name the pickle refers to; ``meaning`` is one of the words of ``NAMES``."""

    meaning: str


@dataclass
class Type:
    """A type under construction, whose byte order comes later; ``code`` is "O" for objects."""

    code: str
    order: Any = "="

    def complete(self, state: Any, machine: _Machine) -> None:
        """(3, byte order, subtype, names, fields, size, alignment, flags), without fields or flags."""
        match state:
            case (_, "<" | ">" | "|" | "=" as order, None, None, None, _, _, flags) if (
                flags == 0 or self.code == "O"
            ):
                self.order = order
            case _:
                raise RefusedError("a type with fields in it, or one that is described in an unknown way")


@dataclass
class Array:
    """An array under construction, whose shape, type and bytes come later."""

    value: Any = None

    def complete(self, state: Any, machine: _Machine) -> None:
        """(version, shape, type, by columns, bytes)."""
        match state:
            # how numpy.save writes a dict: an array without axes whose one item is the dict
            case (_, (), Type("O"), _, list() as items) if len(items) == 1:
                self.value = items[0]
            case (_, shape, Type() as kind, by_columns, source):
                self.value = machine.lazy_array(source, kind, shape, "F" if by_columns is True else "C")
            case _:
                raise RefusedError("an array is described in an unknown way")


_MARK = object()  # below the items of a list, tuple or dict


class _Machine:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.allowance = 2 * self.size  # old protocols decode a string, then make it an array
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, most_steps: int) -> Any:
        for _ in range(most_steps):
            code = self.file.read(1)
            if code == b".":
                return self.pop()
            if code not in _STEPS:
                raise RefusedError(f"it uses the instruction {code!r}" if code else "it ends early")
            argument: Any = self.line() if code in _LINES else None
            if code in _FORMS:
                argument = struct.unpack(_FORMS[code], self.take(struct.calcsize(_FORMS[code])))[0]
            _STEPS[code](self, argument)
        raise RefusedError(f"it has more than {most_steps:,} instructions")

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, after checking that the file has them."""
        self._check(size)
        return self.file.read(size)

    def line(self) -> str:
        """The rest of a line, as the oldest protocol writes its arguments."""
        line = self.file.readline()
        if not line.endswith(b"\n"):
            raise RefusedError("a line in it does not end")
        return line[:-1].rstrip(b"\r").decode("latin1")

    def claim(self, size: int) -> None:
        """Count bytes that become an array or are decoded: together at most twice the file."""
        self.allowance -= size
        if self.allowance < 0:
            raise RefusedError("it uses one string many times")

    def _check(self, size: int) -> None:
        left = self.size - self.file.tell()
        if size > left:
            raise RefusedError(f"it announces {size:,} bytes and has {left:,}")

    def data(self, size: int) -> None:
        """Bytes: short ones at once, long ones left where they are."""
        if size <= EAGER_BYTES:
            self.stack.append(self.take(size))
            return
        self._check(size)
        self.stack.append(Span(self.path, self.file.tell(), size))
        self.file.seek(size, os.SEEK_CUR)

    def old_text(self, size: int) -> None:
        """A string of Python 2: a text, or the bytes of an array where it is long."""
        self.data(size)
        if size <= EAGER_BYTES:
            self.stack.append(self.stack.pop().decode("latin1"))

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise RefusedError("it takes a value that is not there")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def last(self, count: int) -> tuple[Any, ...]:
        return tuple(self.pop() for _ in range(count))[::-1]

    def pop_mark(self) -> list[Any]:
        """The values above the last mark, taken off with it."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        raise RefusedError("it closes a list that it did not open")

    def append(self, items: list[Any]) -> None:
        if type(self.top()) is not list:
            raise RefusedError("it appends to what is not a list")
        self.top().extend(items)

    def set_items(self, items: Any) -> None:
        """Add key, value, key, value, … to the dict on the stack."""
        target = self.top()
        if type(target) is not dict or len(items) % 2:
            raise RefusedError("it sets entries of what is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, bytes):
                raise RefusedError("a key of a dict is neither a text nor a whole number")
            target[key] = value

    def new_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def get(self, key: int) -> None:
        if key not in self.memo:
            raise RefusedError("it recalls a value that it did not keep")
        self.stack.append(self.memo[key])

    def put(self, key: int) -> None:
        self.memo[key] = self.top()

    def name(self, module: Any, name: Any) -> None:
        meaning = NAMES.get((module, name)) if type(module) is str and type(name) is str else None
        if meaning is None:
            raise RefusedError(f"it refers to {str(module)[:60]}.{str(name)[:60]}, which is not an array")
        self.stack.append(Name(meaning))

    def reduce(self) -> None:
        """A call, of which only those that make arrays are understood; none is made."""
        function, arguments = self.last(2)
        meaning = function.meaning if isinstance(function, Name) else "what is not a name"
        self.stack.append(self._call(meaning, arguments))

    def _call(self, meaning: str, arguments: Any) -> Any:
        match meaning, arguments:
            case "_reconstruct", (Name("ndarray"), (0,), _):
                return Array()
            case "dtype", (str(code), *rest) if len(rest) < 3 and TYPES.fullmatch(code):
                return Type(code[:1] if code.startswith("O") else code)
            case "dtype", (code, *_):
                raise RefusedError(f"an array of type {str(code)[:20]!r}, not of numbers")
            case "_frombuffer", (source, Type() as kind, shape, "C" | "F" as order, *rest) if not any(rest):
                return self.lazy_array(source, kind, shape, order)
            case "scalar", (Type() as kind, source):
                return self.lazy_array(source, kind, (), "C").load().item()
            case "encode", (str(text), "latin1"):  # how protocol 2 of Python 3 writes bytes
                self.claim(len(text))
                return text.encode("latin1")
            case "dict" | "bytes", ():
                return {} if meaning == "dict" else b""
        raise RefusedError(f"it calls {meaning} in an unusual way")

    def lazy_array(self, source: Any, kind: Type, shape: Any, order: Any) -> LazyArray:
        source = source.encode("latin1") if isinstance(source, str) else source  # the bytes of Python 2
        if kind.code == "O" or not isinstance(source, bytes | Span):
            raise RefusedError("an array of objects, or without bytes")
        few = type(shape) is tuple and len(shape) <= MOST_AXES
        if not few or any(type(n) is not int or n < 0 for n in shape):
            raise RefusedError("an array whose shape is not a tuple of sizes")
        dtype = np.dtype(kind.code)
        expected = prod(shape) * dtype.itemsize
        if len(source) != expected:
            raise RefusedError(f"{shape} of {dtype} needs {expected:,} bytes and has {len(source):,}")
        self.claim(expected)
        return LazyArray(source, dtype if kind.order == "|" else dtype.newbyteorder(kind.order), shape, order)

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if not isinstance(target, Type | Array):
            raise RefusedError("it builds something other than an array")
        target.complete(state, self)


def _check_bits(number: int) -> int:
    """A number of 64 bits: larger ones have no place in these files, and can be chosen so that a dict becomes slow."""
    if not -(1 << 63) <= number < 1 << 64:
        raise RefusedError("a number of more than 64 bits")
    return number


def _whole(text: str) -> int:
    return _check_bits(int(text.removesuffix("L")))


def _unquote(text: str) -> str:
    """A string of the oldest protocol, in quotes."""
    text = text.strip()
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        raise RefusedError("a string in it has no quotes")
    return codecs.escape_decode(text[1:-1].encode("latin1"))[0].decode("latin1")


def _load_arrays(root: Any, load: bool) -> Any:
    """The same lists and dicts with arrays in them, ``LazyArray`` or loaded; what occurs twice stays shared."""
    results: dict[int, Any] = {}

    def walk(value: Any, depth: int) -> Any:
        if id(value) in results:
            return results[id(value)]
        if depth > DEEPEST:  # also a list that contains itself
            raise RefusedError(f"lists and dicts are more than {DEEPEST} deep")
        match value:
            case Array():
                result = walk(value.value, depth + 1)
            case dict():
                result = {key: walk(item, depth + 1) for key, item in value.items()}
            case list() | tuple():
                result = type(value)([walk(item, depth + 1) for item in value])
            case Span() | Name() | Type():
                raise RefusedError("a value in it is neither a number, a text nor an array")
            case _:
                result = value.load() if load and isinstance(value, LazyArray) else value
        results[id(value)] = result
        return result

    return walk(root, 0)


def _skip_npy_header(file: BinaryIO) -> None:
    """Past the header of an ``.npy`` file that holds one pickled object."""
    if file.read(len(NPY)) != NPY:
        file.seek(0)
        return
    major = file.read(2)[:1]
    header = file.read(int.from_bytes(file.read(2 if major == b"\x01" else 4), "little") & 0xFFFF)
    if not re.search(rb"'descr':\s*'\|O8?'", header) or not re.search(rb"'shape':\s*\(\)", header):
        raise RefusedError("it is an .npy file without a pickled dict")


_LINES = frozenset(b"I L F V S g p c".split())
"""Instructions whose argument is a line."""

_FORMS = {
    **dict.fromkeys(b"\x80 K U \x8c C \x8a h q".split(), "<B"),
    **dict.fromkeys(b"X T B j r".split(), "<I"),
    **dict.fromkeys(b"\x95 \x8d \x8e \x96".split(), "<Q"),
    b"J": "<i",
    b"M": "<H",
    b"G": ">d",
}
"""Instructions whose argument is a number, or begins with one: a size."""

_STEPS: dict[bytes, Callable[[_Machine, Any], Any]] = {
    # the protocol's number, the length of a frame
    **dict.fromkeys(b"\x80 \x95".split(), lambda m, _: None),
    **dict.fromkeys(b"J K M G".split(), lambda m, number: m.stack.append(number)),
    **dict.fromkeys(b"X \x8c \x8d".split(), lambda m, size: m.stack.append(m.take(size).decode("utf-8"))),
    **dict.fromkeys(b"B C \x8e \x96".split(), _Machine.data),
    **dict.fromkeys(b"T U".split(), _Machine.old_text),
    **dict.fromkeys(b"h j".split(), _Machine.get),
    **dict.fromkeys(b"q r".split(), _Machine.put),
    b"(": lambda m, _: m.stack.append(_MARK),
    b"0": lambda m, _: m.pop(),
    b"1": lambda m, _: m.pop_mark(),
    b"2": lambda m, _: m.stack.append(m.top()),
    b"N": lambda m, _: m.stack.append(None),
    b"\x88": lambda m, _: m.stack.append(True),
    b"\x89": lambda m, _: m.stack.append(False),
    b"I": lambda m, text: m.stack.append(text == "01" if text in ("00", "01") else _whole(text)),
    b"L": lambda m, text: m.stack.append(_whole(text)),
    b"\x8a": lambda m, size: m.stack.append(_check_bits(int.from_bytes(m.take(size), "little", signed=True))),
    b"F": lambda m, text: m.stack.append(float(text)),
    b"S": lambda m, text: m.stack.append(_unquote(text)),
    b"V": lambda m, text: m.stack.append(text.encode("latin1").decode("raw-unicode-escape")),
    b"]": lambda m, _: m.stack.append([]),
    b"l": lambda m, _: m.stack.append(m.pop_mark()),
    b"a": lambda m, _: m.append([m.pop()]),
    b"e": lambda m, _: m.append(m.pop_mark()),
    b")": lambda m, _: m.stack.append(()),
    b"t": lambda m, _: m.stack.append(tuple(m.pop_mark())),
    b"\x85": lambda m, _: m.stack.append(m.last(1)),
    b"\x86": lambda m, _: m.stack.append(m.last(2)),
    b"\x87": lambda m, _: m.stack.append(m.last(3)),
    b"}": lambda m, _: m.stack.append({}),
    b"d": lambda m, _: m.new_dict(),
    b"s": lambda m, _: m.set_items(m.last(2)),
    b"u": lambda m, _: m.set_items(m.pop_mark()),
    b"g": lambda m, text: m.get(_whole(text)),
    b"p": lambda m, text: m.put(_whole(text)),
    b"\x94": lambda m, _: m.put(len(m.memo)),
    b"c": lambda m, module: m.name(module, m.line()),
    b"\x93": lambda m, _: m.name(*m.last(2)),
    b"R": lambda m, _: m.reduce(),
    b"b": lambda m, _: m.build(),
}
"""What each instruction does (``pickletools.opcodes`` has their names); those not listed are refused."""
